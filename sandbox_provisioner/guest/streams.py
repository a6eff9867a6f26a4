"""Connect the host's streams to sockets and to the pipes of processes. Part of PID 1's event loop."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

from frames import AMOUNT, CREDIT, DATA, EOF, HEADER, MAX_PAYLOAD, RESET, SMALLEST_CREDIT, WINDOW, encode, encode_credit
from processes import Process, Processes

CONNECT_RETRY = 0.01
TCP_CONNECT = 0.05


class Endpoint:
    """One stream: a file descriptor in the sandbox to read from, one to write to, and the credit in both directions."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.reader = -1
        self.writer = -1
        self.owner: socket.socket | None = None
        self.process: Process | None = None
        self.credit = WINDOW
        self.owed = 0
        self.backlog = bytearray()
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
        self.interest: dict[int, int] = {}
        self.frame = memoryview(bytearray(HEADER.size + MAX_PAYLOAD))

    def open(self, stream: int, target: str) -> None:
        """Open a stream to a socket, or to the pipes of a process. Reset it if there is no such process."""
        kind, _, rest = target.partition(":")
        endpoint = self.endpoints[stream] = Endpoint(stream)
        if kind in ("unix", "tcp"):
            self.connecting[stream] = target
            self._connect(stream)
            return
        name, _, which = rest.partition(":")
        process = self.processes.table.get(int(name)) if kind == "process" else None
        if process is None:
            self._end(endpoint, RESET)
            return
        endpoint.process = process
        if which == "output":
            endpoint.reader, endpoint.writer = process.stdout, process.stdin
        else:
            endpoint.reader = process.stderr
        if endpoint.reader < 0:
            self._end(endpoint, RESET)
            return
        self._watch(endpoint)

    def receive(self, stream: int, kind: int, payload: bytes) -> None:
        """Handle a frame from the host. Frames for closed streams are ignored."""
        endpoint = self.endpoints.get(stream)
        if endpoint is None:
            return
        if kind == DATA:
            endpoint.backlog += payload
            self._drain(endpoint)
        elif kind == CREDIT:
            endpoint.credit += AMOUNT.unpack(payload)[0]
            self._watch(endpoint)
        elif kind == EOF:
            endpoint.host_ended = True
            if endpoint.stream in self.connecting:
                self._end(endpoint, RESET)
            else:
                self._drain(endpoint)
        elif kind == RESET:
            endpoint.host_ended = True
            self._end(endpoint, RESET)

    def serve(self, fd: int, events: int) -> None:
        """Handle epoll events of a descriptor. Descriptors of closed streams are ignored."""
        endpoint = self.by_fd.get(fd)
        if endpoint is None:
            return
        if fd == endpoint.writer and events & (select.EPOLLOUT | select.EPOLLERR):
            self._drain(endpoint)
        if fd == endpoint.reader and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._fill(endpoint)

    def connect_pending(self) -> None:
        """Connect to the sockets that did not listen before, until one still does not; that one is tried last next."""
        for stream in list(self.connecting):
            if not self._connect(stream):
                self.connecting[stream] = self.connecting.pop(stream)
                break

    def close_all(self) -> None:
        """Close all streams. The processes keep running, and their pipes stay open."""
        for endpoint in list(self.endpoints.values()):
            self._forget(endpoint, keep_pipes=True)

    def _connect(self, stream: int) -> bool:
        kind, _, address = self.connecting[stream].partition(":")
        family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
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
        endpoint.owner, endpoint.reader, endpoint.writer = sock, sock.fileno(), sock.fileno()
        self._drain(endpoint)
        return True

    def _watch(self, endpoint: Endpoint) -> None:
        """Register with epoll the events that this endpoint can handle now."""
        wanted: dict[int, int] = {}
        if endpoint.reader >= 0 and not endpoint.ended and endpoint.credit > 0:
            wanted[endpoint.reader] = select.EPOLLIN
        if endpoint.writer >= 0 and endpoint.backlog:
            wanted[endpoint.writer] = wanted.get(endpoint.writer, 0) | select.EPOLLOUT
        for fd in {endpoint.reader, endpoint.writer} - {-1}:
            events, before = wanted.get(fd, 0), self.interest.get(fd, 0)
            if events == before:
                continue
            if not before:
                self.epoll.register(fd, events)
            elif not events:
                self.epoll.unregister(fd)
            else:
                self.epoll.modify(fd, events)
            self.interest[fd] = events
            self.by_fd[fd] = endpoint

    def _fill(self, endpoint: Endpoint) -> None:
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
            self._end(endpoint, EOF if endpoint.owner is None else RESET)
            return
        endpoint.credit -= size
        HEADER.pack_into(self.frame, 0, DATA, endpoint.stream, size)
        self.send(self.frame[: HEADER.size + size])
        if endpoint.credit <= 0:
            self._watch(endpoint)

    def _drain(self, endpoint: Endpoint) -> None:
        """Move bytes from the host to the sandbox, and give credit for the bytes written."""
        if endpoint.stream in self.connecting:
            return
        if endpoint.backlog:
            try:
                written = os.write(endpoint.writer, endpoint.backlog) if endpoint.writer >= 0 else len(endpoint.backlog)
            except BlockingIOError:
                written = 0
            except OSError:
                if endpoint.owner is not None:
                    self._end(endpoint, RESET)
                    return
                written = len(endpoint.backlog)
            del endpoint.backlog[:written]
            endpoint.owed += written
            if endpoint.owed >= SMALLEST_CREDIT:
                self.send(encode_credit(endpoint.stream, endpoint.owed))
                endpoint.owed = 0
        if endpoint.host_ended and not endpoint.backlog:
            self._close_writer(endpoint)
        self._watch(endpoint)

    def _close_writer(self, endpoint: Endpoint) -> None:
        if endpoint.owner is not None:
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
            if endpoint.process and not (keep_pipes and not endpoint.ended):
                self._close_pipe(endpoint, fd)
        if endpoint.owner is not None:
            endpoint.owner.close()

    def _close_pipe(self, endpoint: Endpoint, fd: int) -> None:
        self._unwatch(fd)
        os.close(fd)
        if endpoint.process:
            self.processes.pipe_closed(endpoint.process, fd)

    def _unwatch(self, fd: int) -> None:
        if self.interest.pop(fd, 0):
            self.epoll.unregister(fd)
        self.by_fd.pop(fd, None)
