"""Connect the host's streams to sockets and to the pipes of processes. Runs in PID 1, in its event loop."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

from frames import AMOUNT, CREDIT, DATA, EOF, HEADER, MAX_PAYLOAD, RESET, SMALLEST_CREDIT, WINDOW, encode, encode_credit
from processes import Process, Processes

CONNECT_RETRY = 0.01
"""Seconds until the next attempt to connect to a socket that does not listen yet."""
TCP_CONNECT = 0.05
"""Time limit in seconds for connecting to a TCP port: PID 1 waits for it."""


class Endpoint:
    """One stream: its socket, or the pipes of its process, and the credit in both directions."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.reader = -1
        self.writer = -1
        self.socket: socket.socket | None = None
        self.process: Process | None = None
        self.credit = WINDOW
        """Bytes that may still be sent to the host."""
        self.uncredited = 0
        """Bytes from the host that were written, and for which the host has no credit yet."""
        self.unwritten = bytearray()
        """Bytes from the host that the socket or pipe has not accepted yet."""
        self.host_ended = False
        self.ended = False


class Streams:
    """All open streams. ``send`` sends a frame to the host."""

    def __init__(self, epoll: select.epoll, send: Callable[[bytes | memoryview], None], processes: Processes) -> None:
        self.epoll = epoll
        self.send = send
        self.processes = processes
        self.endpoints: dict[int, Endpoint] = {}
        self.connecting: dict[int, str] = {}
        self.by_fd: dict[int, Endpoint] = {}
        self.watched: dict[int, int] = {}
        """The epoll events of each registered descriptor."""
        self.frame = memoryview(bytearray(HEADER.size + MAX_PAYLOAD))

    def open(self, stream: int, target: str) -> None:
        """Open a stream to ``target``: a socket, or the pipes of a process. Reset it if there is no such process.

        Targets are "unix:PATH", "tcp:HOST:PORT", "process:NUMBER:output" (with stdin) and "process:NUMBER:errors".
        """
        kind, _, rest = target.partition(":")
        endpoint = self.endpoints[stream] = Endpoint(stream)
        if kind in ("unix", "tcp"):
            self.connecting[stream] = target
            self._connect(stream)
            return
        number, _, pipe = rest.partition(":")
        process = self.processes.table.get(int(number)) if kind == "process" else None
        if process:
            endpoint.process = process
            if pipe == "output":
                endpoint.reader, endpoint.writer = process.stdout, process.stdin
            else:
                endpoint.reader = process.stderr
        if endpoint.reader < 0:
            self._end(endpoint, RESET)
        else:
            self._watch(endpoint)

    def receive(self, stream: int, kind: int, payload: bytes) -> None:
        """Handle a frame from the host. Frames for closed streams are ignored."""
        endpoint = self.endpoints.get(stream)
        if endpoint is None:
            return
        if kind == DATA:
            endpoint.unwritten += payload
            self._write(endpoint)
        elif kind == CREDIT:
            endpoint.credit += AMOUNT.unpack(payload)[0]
            self._watch(endpoint)
        else:
            endpoint.host_ended = True
            if kind == RESET or stream in self.connecting:
                self._end(endpoint, RESET)
            else:
                self._write(endpoint)

    def serve(self, fd: int, events: int) -> None:
        """Handle epoll events of a descriptor. Descriptors of closed streams are ignored."""
        endpoint = self.by_fd.get(fd)
        if endpoint is None:
            return
        if fd == endpoint.writer and events & (select.EPOLLOUT | select.EPOLLERR):
            self._write(endpoint)
        if fd == endpoint.reader and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._read(endpoint)

    def connect_pending(self) -> None:
        """Connect to sockets that did not listen before. After a failure, leave the others for the next call."""
        for stream in list(self.connecting):
            if not self._connect(stream):
                self.connecting[stream] = self.connecting.pop(stream)
                break

    def close_all(self) -> None:
        """Close all streams. The processes keep running, and their pipes stay open."""
        for endpoint in list(self.endpoints.values()):
            self._forget(endpoint, keep_pipes=True)

    def _connect(self, stream: int) -> bool:
        """Connect a stream to its socket. Return False if the socket does not accept now."""
        kind, _, address = self.connecting[stream].partition(":")
        sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        try:
            if kind == "unix":
                sock.setblocking(False)
                sock.connect(address)
            else:
                sock.settimeout(TCP_CONNECT)
                host, _, port = address.rpartition(":")
                sock.connect((host, int(port)))
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            return False
        del self.connecting[stream]
        endpoint = self.endpoints[stream]
        endpoint.socket = sock
        endpoint.reader = endpoint.writer = sock.fileno()
        self._write(endpoint)
        return True

    def _watch(self, endpoint: Endpoint) -> None:
        """Register with epoll the events that this endpoint can handle now."""
        wanted: dict[int, int] = {endpoint.reader: 0, endpoint.writer: 0}
        if not endpoint.ended and endpoint.credit > 0:
            wanted[endpoint.reader] = select.EPOLLIN
        if endpoint.unwritten:
            wanted[endpoint.writer] |= select.EPOLLOUT
        wanted.pop(-1, None)
        for fd, events in wanted.items():
            before = self.watched.get(fd, 0)
            if events == before:
                continue
            if not before:
                self.epoll.register(fd, events)
            elif not events:
                self.epoll.unregister(fd)
            else:
                self.epoll.modify(fd, events)
            self.watched[fd] = events
            self.by_fd[fd] = endpoint

    def _read(self, endpoint: Endpoint) -> None:
        """Move bytes from the sandbox to the host, limited by the endpoint's credit."""
        if endpoint.ended or endpoint.credit <= 0 or endpoint.reader < 0:
            return
        room = min(MAX_PAYLOAD, endpoint.credit)
        try:
            size = os.readv(endpoint.reader, [self.frame[HEADER.size : HEADER.size + room]])
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._end(endpoint, RESET if endpoint.socket else EOF)
            return
        endpoint.credit -= size
        HEADER.pack_into(self.frame, 0, DATA, endpoint.stream, size)
        self.send(self.frame[: HEADER.size + size])
        if endpoint.credit <= 0:
            self._watch(endpoint)

    def _write(self, endpoint: Endpoint) -> None:
        """Move bytes from the host to the sandbox, and give credit for the bytes written.

        Bytes for a pipe that the process has closed are discarded.
        """
        if endpoint.stream in self.connecting:
            return
        if endpoint.unwritten:
            written = len(endpoint.unwritten)
            try:
                if endpoint.writer >= 0:
                    written = os.write(endpoint.writer, endpoint.unwritten)
            except BlockingIOError:
                written = 0
            except OSError:
                if endpoint.socket:
                    self._end(endpoint, RESET)
                    return
            del endpoint.unwritten[:written]
            endpoint.uncredited += written
            if endpoint.uncredited >= SMALLEST_CREDIT:
                self.send(encode_credit(endpoint.stream, endpoint.uncredited))
                endpoint.uncredited = 0
        if endpoint.host_ended and not endpoint.unwritten:
            self._close_writer(endpoint)
        self._watch(endpoint)

    def _close_writer(self, endpoint: Endpoint) -> None:
        if endpoint.socket:
            self._end(endpoint, RESET)
            return
        if endpoint.writer >= 0:
            self._close_pipe(endpoint, endpoint.writer)
            endpoint.writer = -1
        if endpoint.ended:
            self._forget(endpoint)

    def _end(self, endpoint: Endpoint, how: int) -> None:
        """Send the host EOF or RESET, once, and forget the stream when both sides have ended."""
        if not endpoint.ended:
            endpoint.ended = True
            self.send(encode(how, endpoint.stream))
        if how == RESET or endpoint.host_ended:
            self._forget(endpoint)
        else:
            self._watch(endpoint)

    def _forget(self, endpoint: Endpoint, keep_pipes: bool = False) -> None:
        self.endpoints.pop(endpoint.stream, None)
        self.connecting.pop(endpoint.stream, None)
        for fd in {endpoint.reader, endpoint.writer} - {-1}:
            self._unwatch(fd)
            if endpoint.process and (endpoint.ended or not keep_pipes):
                self._close_pipe(endpoint, fd)
        if endpoint.socket:
            endpoint.socket.close()

    def _close_pipe(self, endpoint: Endpoint, fd: int) -> None:
        self._unwatch(fd)
        os.close(fd)
        if endpoint.process:
            self.processes.pipe_closed(endpoint.process, fd)

    def _unwatch(self, fd: int) -> None:
        if self.watched.pop(fd, 0):
            self.epoll.unregister(fd)
        self.by_fd.pop(fd, None)
