"""PID 1 of the sandbox. Runs inside the sandbox, in one thread with one epoll loop.

``Init`` reads the host's frames. It passes streams to ``streams`` and executes control messages in ``Init.control``,
which lists all requests of the host. The host is trusted and always reads, so writing to it may block; nothing else
may block. File descriptors 0 and 1 are the pipes from and to the host and are never closed: a restored sandbox gets
new ones in their place.

Arguments: with ``outlive`` PID 1 does not exit when the host does, but waits to be checkpointed and restored. With
``template`` the sandbox is a template, and each copy gets its folder and ``outlive`` by the request "activate".
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from capabilities import drop_capabilities, show_folder
from frames import CONTROL, MAX_PAYLOAD, OPEN, VERSION, Decoder, encode
from hooks import call_hook
from host_api import PATH, RESTORED, HostApi
from processes import Processes, failure, write_files
from seccomp import confine
from streams import CONNECT_RETRY, Streams

HOST_IN, HOST_OUT = 0, 1
NEW_HOST_POLL = 0.1
"""Seconds between two checks whether a new host has sent data."""
RESTORE_GRACE = 1.0
"""Seconds after a restore during which a signal first waits until the process's main thread sleeps."""


class HostGone(Exception):
    """The host closed its end of the pipe."""


class Init:
    """PID 1: the event loop, the pipe to the host, and the host's requests. Runs in the sandbox, in its only thread."""

    def __init__(self, outlive: bool, api_path: str, template: bool = False) -> None:
        self.outlive = outlive
        self.template = template
        self.api_path = api_path
        self.has_host = True
        self.quiesced = False
        self.resumed_at = 0.0
        self.epoll = select.epoll()
        self.host_api = HostApi(self.epoll, self.tell)
        self.processes = Processes(self.tell)
        self.streams = Streams(self.epoll, self.send, self.processes)
        self.decoder = Decoder()
        self.inbox = memoryview(bytearray(MAX_PAYLOAD))
        self.child_exits, self.wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- the event loop ----------------------------------------------------------------------------------------

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
        self.say_hello()
        while True:
            try:
                self.wait_and_handle()
            except HostGone:
                if not self.outlive:
                    os._exit(0)
                self.wait_for_new_host()

    def wait_and_handle(self) -> None:
        """Wait for events and handle them. While quiesced, only read the host. Raises HostGone."""
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

    def wait_for_new_host(self) -> None:
        """Keep the processes, drop all streams and requests, and return when a new host has sent data."""
        self.has_host = False
        self.drop_streams()
        self.host_api.stop()
        self.epoll.unregister(HOST_IN)
        while not (data := os.read(HOST_IN, MAX_PAYLOAD)):
            if self.epoll.poll(NEW_HOST_POLL):
                self.reap()
        self.epoll.register(HOST_IN, select.EPOLLIN)
        self.has_host = True
        self.host_api.accept()
        self.decoder = Decoder()
        self.handle_frames(data)

    def reap(self) -> None:
        """Report the processes that have exited."""
        with suppress(BlockingIOError):
            os.read(self.child_exits, 4096)
        self.processes.reap()

    # -- the pipe to the host ----------------------------------------------------------------------------------

    def send(self, frame: bytes | memoryview) -> None:
        """Send a frame to the host, if there is one. Raises HostGone."""
        view = memoryview(frame)
        while view and self.has_host:
            try:
                view = view[os.write(HOST_OUT, view) :]
            except OSError as error:
                raise HostGone from error

    def tell(self, **message: Any) -> None:
        """Send a control message to the host. Raises HostGone."""
        self.send(encode(CONTROL, 0, json.dumps(message).encode()))

    def say_hello(self) -> None:
        """Tell the host the protocol version and the running processes."""
        self.tell(op="hello", version=VERSION, processes=self.processes.running())

    def read_host(self) -> None:
        """Read from the host and handle the frames. Raises HostGone."""
        try:
            data = bytes(self.inbox[: os.readv(HOST_IN, [self.inbox])])
        except OSError as error:
            raise HostGone from error
        if not data:
            raise HostGone
        self.handle_frames(data)

    def handle_frames(self, data: bytes) -> None:
        """Handle the frames that ``data`` completes."""
        for kind, stream, payload in self.decoder.feed(data):
            if kind == CONTROL:
                self.control(json.loads(payload))
            elif kind == OPEN:
                self.streams.open(stream, payload.decode())
            else:
                self.streams.receive(stream, kind, payload)

    # -- the host's requests -----------------------------------------------------------------------------------

    def control(self, message: dict[str, Any]) -> None:
        """Execute a control message. Unknown operations are ignored."""
        match message["op"]:
            case "spawn":
                self.processes.spawn(message, without_capabilities=self.template)
            case "signal":
                self.processes.signal(message["process"], message["signal"], self.resumed_at + RESTORE_GRACE)
            case "hook":
                self.tell(op="hooked", trouble=call_hook(message["request"], message["seconds"]))
            case "quiesce":
                self.quiesced = True
                self.tell(op="quiesced")
            case "resume":
                self.quiesced = False
                self.resumed_at = time.monotonic()
                self.tell(op="resumed")
            case "adopt":
                self.drop_streams()
                self.host_api.answer_all(RESTORED)
                self.say_hello()
            case "activate":
                self.activate(message)
            case "answer":
                self.host_api.answer(message["number"], message["answer"])

    def drop_streams(self) -> None:
        """Close all streams and end the quiesced state: a new host takes over the processes, not the streams."""
        self.streams.close_all()
        self.quiesced = False

    def activate(self, message: dict[str, Any]) -> None:
        """Turn this copy of a template into a normal sandbox: show its folder and give up all capabilities."""
        try:
            write_files(message["files"], message["expect"])
            if self.template:
                if message["folder"]:
                    show_folder(message["folder"], message["parts"], message["cover"])
                drop_capabilities()
                self.template = False
            self.outlive = message["outlive"]
        except (OSError, ValueError) as error:
            self.tell(op="activated", **failure(error))
        else:
            self.tell(op="activated", errno=0, filename="")


if __name__ == "__main__":
    confine()
    path = PATH if os.getpid() == 1 else ""
    Init(outlive="outlive" in sys.argv, api_path=path, template="template" in sys.argv).run()
