"""PID 1 of the sandbox: starts and reaps processes and connects their sockets and pipes to the host's pipe.

One thread, one epoll. The host is trusted and always reads, so writing to it may block; nothing else may block. File
descriptors 0 and 1 are the pipes from and to the host and are never closed: a restored sandbox gets new ones in their
place. With the argument ``outlive`` PID 1 does not exit when the host does, but waits to be checkpointed and restored.
With the argument ``template`` it receives ``outlive`` and the path of its folder when a copy of it is activated.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from capabilities import CARRIED, bind, renounce
from frames import CONTROL, MAX_PAYLOAD, OPEN, VERSION, Decoder, encode
from hooks import call
from host_api import PATH, RESTORED, HostApi
from processes import Processes, failure, prepare
from seccomp import confine
from streams import CONNECT_RETRY, Streams

HOST_IN, HOST_OUT = 0, 1
ORPHAN_TURN = 0.1
SETTLING = 1.0
"""Seconds after a restore during which a signal first waits for the process's main thread to settle."""


class HostGone(Exception):
    """The host closed its end of the pipe."""


class Init:
    """The event loop of PID 1, its pipe to the host, and the host's control messages."""

    def __init__(self, outlive: bool, api_path: str, template: bool = False) -> None:
        self.outlive = outlive
        self.template = template
        self.api_path = api_path
        self.orphaned = False
        self.quiesced = False
        self.resumed = 0.0
        self.epoll = select.epoll()
        self.host_api = HostApi(self.epoll, self.tell)
        self.processes = Processes(self.tell)
        self.streams = Streams(self.epoll, self.send, self.processes)
        self.decoder = Decoder()
        self.inbox = memoryview(bytearray(MAX_PAYLOAD))
        self.child_exits, self.wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until the host closes the pipe; then wait for a new host if ``outlive`` is set, else exit.

        The sandbox ends when PID 1 exits.
        """
        signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        self.epoll.register(self.child_exits, select.EPOLLIN)
        self.epoll.register(HOST_IN, select.EPOLLIN)
        if self.api_path:
            self.host_api.listen(self.api_path)
        self.greet()
        while True:
            try:
                self.turn()
            except HostGone:
                if not self.outlive:
                    os._exit(0)
                self.wait_for_adoption()

    def turn(self) -> None:
        """Wait for events and handle them. While quiesced, only the host is read."""
        if self.quiesced:
            self.read_host()
            return
        for fd, events in self.epoll.poll(CONNECT_RETRY if self.streams.connecting else -1):
            if fd == HOST_IN:
                self.read_host()
                if self.quiesced:
                    return
            elif fd == self.child_exits:
                self.reap()
            elif not self.host_api.serve(fd):
                self.streams.serve(fd, events)
        self.streams.connect_pending()

    def wait_for_adoption(self) -> None:
        """Keep the processes, drop all streams and requests, and return when a new host has sent data."""
        self.orphaned = True
        self.close_streams()
        self.host_api.stop()
        self.epoll.unregister(HOST_IN)
        while not (data := os.read(HOST_IN, MAX_PAYLOAD)):
            if self.epoll.poll(ORPHAN_TURN):
                self.reap()
        self.epoll.register(HOST_IN, select.EPOLLIN)
        self.orphaned = False
        self.host_api.accept()
        self.decoder = Decoder()
        self.take(data)

    def reap(self) -> None:
        """Report the processes that have exited."""
        try:
            os.read(self.child_exits, 4096)
        except BlockingIOError:
            pass
        self.processes.reap()

    def close_streams(self) -> None:
        """Close all streams, because the host has changed. Its successor knows the processes, but not the streams."""
        self.streams.close_all()
        self.quiesced = False

    # -- the host ----------------------------------------------------------------------------------------------

    def send(self, frame: bytes | memoryview) -> None:
        """Send a frame to the host, if there is one. Raises HostGone."""
        if self.orphaned:
            return
        view = memoryview(frame)
        while view:
            try:
                view = view[os.write(HOST_OUT, view) :]
            except OSError as error:
                raise HostGone from error

    def tell(self, **message: Any) -> None:
        """Send a control message to the host."""
        self.send(encode(CONTROL, 0, json.dumps(message).encode()))

    def greet(self) -> None:
        """Send the hello message with the running processes."""
        self.tell(op="hello", version=VERSION, processes=self.processes.running())

    def read_host(self) -> None:
        """Read from the host and handle the frames. Raises HostGone."""
        try:
            data = bytes(self.inbox[: os.readv(HOST_IN, [self.inbox])])
        except OSError as error:
            raise HostGone from error
        if not data:
            raise HostGone
        self.take(data)

    def take(self, data: bytes) -> None:
        """Handle the frames in ``data``."""
        for kind, stream, payload in self.decoder.feed(data):
            if kind == CONTROL:
                self.control(json.loads(payload))
            elif kind == OPEN:
                self.streams.open(stream, payload.decode())
            else:
                self.streams.receive(stream, kind, payload)

    def control(self, message: dict[str, Any]) -> None:
        """Execute a control message. Unknown operations are ignored."""
        op = message["op"]
        if op == "spawn":
            self.processes.spawn(message, drop_capabilities=self.template)
        elif op == "signal":
            self.processes.signal(message["process"], message["signal"], settle_until=self.resumed + SETTLING)
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
            self.close_streams()
            self.host_api.answer_all(RESTORED)
            self.greet()
        elif op == "activate":
            self.activate(message)
        elif op == "answer":
            self.host_api.answer(message["number"], message["answer"])

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
            self.tell(op="activated", **failure(error))
            return
        self.tell(op="activated", errno=0, filename="")


if __name__ == "__main__":
    confine()
    path = PATH if os.getpid() == 1 else ""
    Init(outlive="outlive" in sys.argv, api_path=path, template="template" in sys.argv).run()
