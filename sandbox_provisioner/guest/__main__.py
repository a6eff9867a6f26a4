"""PID 1 of the sandbox: starts and reaps processes and connects their sockets and pipes to the host's pipe.

One thread, one epoll. The host is trusted and always reads, so writing to it may block; nothing else may block. File
descriptors 0 and 1 are the pipes from and to the host and are never closed: a restored sandbox gets new ones in their
place. With the argument ``outlive`` PID 1 does not exit when the host does, but waits to be checkpointed and restored.
With the argument ``template`` it receives ``outlive`` and the path of its folder when a copy of it is activated.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from capabilities import CARRIED, bind, renounce
from frames import (
    AMOUNT,
    CONTROL,
    CREDIT,
    DATA,
    EOF,
    HEADER,
    MAX_PAYLOAD,
    OPEN,
    RESET,
    SMALLEST_CREDIT,
    VERSION,
    WINDOW,
    Decoder,
    encode,
    encode_credit,
)
from hooks import call
from host_api import PATH, RESTORED, Asks
from processes import Process, prepare, settle, start
from seccomp import confine

HOST_IN, HOST_OUT = 0, 1
MAPS = "/run/jupyter/maps"
"""Copy of PID 1's mappings for ``open_files`` and ``zygote``, which may not read them from /proc."""
CONNECT_RETRY = 0.01
TCP_CONNECT = 0.05
ORPHAN_TURN = 0.1
SETTLING = 1.0
"""Seconds after a restore during which a signal first waits for the process's main thread to settle."""


class HostGone(Exception):
    """The host closed its end of the pipe."""


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


class Init:
    """The state and event loop of PID 1."""

    def __init__(self, outlive: bool, asks: str, template: bool = False) -> None:
        self.outlive = outlive
        self.template = template
        self.asks_path = asks
        self.orphaned = False
        self.epoll = select.epoll()
        self.asks = Asks(self.epoll, self.tell)
        self.decoder = Decoder()
        self.endpoints: dict[int, Endpoint] = {}
        self.connecting: dict[int, str] = {}
        self.by_fd: dict[int, Endpoint] = {}
        self.interest: dict[int, int] = {}
        self.processes: dict[int, Process] = {}
        self.waking, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.quiesced = False
        self.resumed = 0.0
        self.frame = memoryview(bytearray(HEADER.size + MAX_PAYLOAD))
        self.inbox = memoryview(bytearray(MAX_PAYLOAD))

    def run(self) -> None:
        """Serve until the host closes the pipe; then wait for a new host if ``outlive`` is set, else exit.

        The sandbox ends when PID 1 exits.
        """
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        self.epoll.register(self.waking, select.EPOLLIN)
        self.epoll.register(HOST_IN, select.EPOLLIN)
        if self.asks_path:
            self.asks.listen(self.asks_path)
        self.greet()
        while True:
            try:
                self.turn()
            except HostGone:
                if not self.outlive:
                    os._exit(0)
                self.wait_for_adoption()

    def wait_for_adoption(self) -> None:
        """Keep the processes, drop all streams and requests, and return when a new host has sent data."""
        self.orphaned = True
        self.let_go()
        self.asks.stop()
        self.epoll.unregister(HOST_IN)
        while not (data := os.read(HOST_IN, MAX_PAYLOAD)):
            if self.epoll.poll(ORPHAN_TURN):
                self.reap()
        self.epoll.register(HOST_IN, select.EPOLLIN)
        self.orphaned = False
        self.asks.go_on()
        self.decoder = Decoder()
        self.take(data)

    def turn(self) -> None:
        if self.quiesced:
            self.read_host()
            return
        for fd, events in self.epoll.poll(CONNECT_RETRY if self.connecting else -1):
            if fd == HOST_IN:
                self.read_host()
                if self.quiesced:
                    return
            elif fd == self.waking:
                self.reap()
            elif not self.asks.serve(fd):
                self.serve(fd, events)
        for stream in list(self.connecting):
            if not self.connect(stream):
                self.connecting[stream] = self.connecting.pop(stream)
                break

    # -- the host ----------------------------------------------------------------------------------------------

    def send(self, frame: bytes | memoryview) -> None:
        if self.orphaned:
            return
        view = memoryview(frame)
        while view:
            try:
                view = view[os.write(HOST_OUT, view) :]
            except OSError as error:
                raise HostGone from error

    def greet(self) -> None:
        alive = [name for name, process in self.processes.items() if process.pid]
        self.tell(op="hello", version=VERSION, processes=alive)

    def tell(self, **message: Any) -> None:
        self.send(encode(CONTROL, 0, json.dumps(message).encode()))

    def read_host(self) -> None:
        try:
            data = bytes(self.inbox[: os.readv(HOST_IN, [self.inbox])])
        except OSError as error:
            raise HostGone from error
        if not data:
            raise HostGone
        self.take(data)

    def take(self, data: bytes) -> None:
        for kind, stream, payload in self.decoder.feed(data):
            if kind == CONTROL:
                self.obey(json.loads(payload))
            elif kind == OPEN:
                self.open(stream, payload.decode())
            elif stream in self.endpoints:
                self.receive(self.endpoints[stream], kind, payload)

    def receive(self, endpoint: Endpoint, kind: int, payload: bytes) -> None:
        if kind == DATA:
            endpoint.backlog += payload
            self.drain(endpoint)
        elif kind == CREDIT:
            endpoint.credit += AMOUNT.unpack(payload)[0]
            self.watch(endpoint)
        elif kind == EOF:
            endpoint.host_ended = True
            if endpoint.stream in self.connecting:
                self.end(endpoint, RESET)
            else:
                self.drain(endpoint)
        elif kind == RESET:
            endpoint.host_ended = True
            self.end(endpoint, RESET)

    def obey(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "spawn":
            self.spawn(message)
        elif op == "signal":
            self.signal(message["process"], message["signal"])
        elif op == "hook":
            self.tell(op="hooked", trouble=call(message["request"], message["seconds"]))
        elif op == "quiesce":
            self.quiesced = True
            self.tell(op="quiesced")
        elif op == "resume":
            self.quiesced = False
            self.resumed = time.monotonic()
            self.tell(op="resumed")
        elif op == "adopt":
            self.let_go()
            self.asks.settle(RESTORED)
            self.greet()
        elif op == "activate":
            self.activate(message)
        elif op == "answer":
            self.asks.answered(message["number"], message["answer"])

    def let_go(self) -> None:
        """Close all streams. The processes keep running, and their pipes stay open."""
        for endpoint in list(self.endpoints.values()):
            self.forget(endpoint, keep_pipes=True)
        self.quiesced = False

    # -- processes ---------------------------------------------------------------------------------------------

    def spawn(self, message: dict[str, Any]) -> None:
        name = message["process"]
        try:
            prepare(message["expect"], message["files"])
            record_mappings()
            process = start(
                name, message["argv"], message["env"], message["cwd"], message["stdin"], powerful=self.template
            )
        except (OSError, ValueError) as error:
            self.tell(op="failed", process=name, **_trouble(error))
            return
        self.processes[name] = process
        self.tell(op="started", process=name)

    def activate(self, message: dict[str, Any]) -> None:
        """Turn this copy of a template into a normal sandbox: bind its folder and give up all capabilities."""
        try:
            prepare(message["expect"], message["files"])
            if self.template:
                if message["folder"]:
                    bind(CARRIED, message["folder"])
                renounce()
                self.template = False
            self.outlive = message["outlive"]
        except (OSError, ValueError) as error:
            self.tell(op="activated", **_trouble(error))
            return
        self.tell(op="activated", errno=0, filename="")

    def signal(self, name: int, signum: int) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        if process.pid:
            settle(process.pid, until=self.resumed + SETTLING)
        try:
            os.killpg(process.group, signum)
        except OSError:
            pass

    def reap(self) -> None:
        try:
            os.read(self.waking, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for name, process in list(self.processes.items()):
                if process.pid == pid:
                    process.pid = 0
                    self.tell(op="exited", process=name, status=os.waitstatus_to_exitcode(status))
                    self.drop(process)

    def drop(self, process: Process) -> None:
        """Remove a process from the table if it has exited and its pipes are closed."""
        if not process.pid and {process.stdin, process.stdout, process.stderr} == {-1}:
            self.processes.pop(process.name, None)

    # -- streams -----------------------------------------------------------------------------------------------

    def open(self, stream: int, target: str) -> None:
        kind, _, rest = target.partition(":")
        endpoint = self.endpoints[stream] = Endpoint(stream)
        if kind in ("unix", "tcp"):
            self.connecting[stream] = target
            self.connect(stream)
            return
        name, _, which = rest.partition(":")
        process = self.processes.get(int(name)) if kind == "process" else None
        if process is None:
            self.end(endpoint, RESET)
            return
        endpoint.process = process
        if which == "output":
            endpoint.reader, endpoint.writer = process.stdout, process.stdin
        else:
            endpoint.reader = process.stderr
        if endpoint.reader < 0:
            self.end(endpoint, RESET)
            return
        self.watch(endpoint)

    def connect(self, stream: int) -> bool:
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
        self.drain(endpoint)
        return True

    def watch(self, endpoint: Endpoint) -> None:
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

    def serve(self, fd: int, events: int) -> None:
        endpoint = self.by_fd.get(fd)
        if endpoint is None:
            return
        if fd == endpoint.writer and events & (select.EPOLLOUT | select.EPOLLERR):
            self.drain(endpoint)
        if fd == endpoint.reader and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self.fill(endpoint)

    def fill(self, endpoint: Endpoint) -> None:
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
            self.end(endpoint, EOF if endpoint.owner is None else RESET)
            return
        endpoint.credit -= size
        HEADER.pack_into(self.frame, 0, DATA, endpoint.stream, size)
        self.send(self.frame[: HEADER.size + size])
        if endpoint.credit <= 0:
            self.watch(endpoint)

    def drain(self, endpoint: Endpoint) -> None:
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
                    self.end(endpoint, RESET)
                    return
                written = len(endpoint.backlog)
            del endpoint.backlog[:written]
            endpoint.owed += written
            if endpoint.owed >= SMALLEST_CREDIT:
                self.send(encode_credit(endpoint.stream, endpoint.owed))
                endpoint.owed = 0
        if endpoint.host_ended and not endpoint.backlog:
            self.close_writer(endpoint)
        self.watch(endpoint)

    def close_writer(self, endpoint: Endpoint) -> None:
        if endpoint.owner is not None:
            self.end(endpoint, RESET)
            return
        if endpoint.writer >= 0:
            self.close(endpoint, endpoint.writer)
            endpoint.writer = -1
        if endpoint.ended:
            self.forget(endpoint)

    def end(self, endpoint: Endpoint, how: int) -> None:
        """Send the host EOF or RESET, once, and forget the stream when both sides have ended."""
        if not endpoint.ended:
            endpoint.ended = True
            self.send(encode(how, endpoint.stream))
        if how == RESET or endpoint.host_ended:
            self.forget(endpoint)
        else:
            self.watch(endpoint)

    def forget(self, endpoint: Endpoint, keep_pipes: bool = False) -> None:
        self.endpoints.pop(endpoint.stream, None)
        self.connecting.pop(endpoint.stream, None)
        for fd in {endpoint.reader, endpoint.writer} - {-1}:
            self.release(fd)
            if endpoint.process and not (keep_pipes and not endpoint.ended):
                self.close(endpoint, fd)
        if endpoint.owner is not None:
            endpoint.owner.close()

    def close(self, endpoint: Endpoint, fd: int) -> None:
        """Close one of a process's pipes and mark it as closed in the process's entry."""
        self.release(fd)
        os.close(fd)
        process = endpoint.process
        if process is None:
            return
        for pipe in ("stdin", "stdout", "stderr"):
            if getattr(process, pipe) == fd:
                setattr(process, pipe, -1)
        self.drop(process)

    def release(self, fd: int) -> None:
        if self.interest.pop(fd, 0):
            self.epoll.unregister(fd)
        self.by_fd.pop(fd, None)


def record_mappings() -> None:
    """Write PID 1's mappings to MAPS. A process can prevent that, which affects only later restores of its sandbox."""
    try:
        with open("/proc/self/maps", errors="replace") as maps:
            prepare({}, {MAPS: maps.read()})
    except (OSError, ValueError):
        pass


def _trouble(error: OSError | ValueError) -> dict[str, Any]:
    return {
        "errno": getattr(error, "errno", None) or errno.EINVAL,
        "filename": str(getattr(error, "filename", "")),
    }


if __name__ == "__main__":
    confine()
    asks = PATH if os.getpid() == 1 else ""
    Init(outlive="outlive" in sys.argv, asks=asks, template="template" in sys.argv).run()
