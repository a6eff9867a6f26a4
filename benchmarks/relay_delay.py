"""Measure the cost of the relay's host side: the round trip of a small message to an echo process.

The echo process replaces the guest: it returns all frames. A message is sent alternately through the relay (client's
socket, relay, pipe, echo process, and back) and directly through the pipes of another echo process. The difference of
the two times is the delay that the relay adds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from sandbox_provisioner.guest.frames import CONTROL, DATA, MAX_PAYLOAD, VERSION, WINDOW, Decoder, encode
from sandbox_provisioner.io_thread import IO
from sandbox_provisioner.kernel.relay import CHANNELS, ChannelRelay
from sandbox_provisioner.mux.connection import GuestConnection

MAX_ROUND_TRIPS = 2000
MESSAGE = b"x" * (WINDOW // MAX_ROUND_TRIPS)
"""Small, because the echo process never renews the connection's credit: one run can send this message 2000 times."""


def relay_cpu_time() -> float:
    """Return the CPU seconds that the I/O thread has used."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "sandbox-io")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(count: int) -> tuple[float, float]:
    """Return the seconds that the relay adds to a round trip (median), and its CPU seconds for each round trip."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        DirectEcho() as direct,
        RelayedEcho(Path(folder)) as relayed,
    ):
        times: dict[Echo, list[float]] = {direct: [], relayed: []}
        before = relay_cpu_time()
        for _ in range(count):
            for echo, samples in times.items():
                begin = time.perf_counter()
                echo.round_trip()
                samples.append(time.perf_counter() - begin)
        cpu = relay_cpu_time() - before
    return statistics.median(times[relayed]) - statistics.median(times[direct]), cpu / count


class Echo(ABC):
    """An echo process and the ends of its pipes."""

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._child.stdin and self._child.stdout
        self._to_echo, self._from_echo = self._child.stdin.fileno(), self._child.stdout.fileno()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()

    @abstractmethod
    def round_trip(self) -> None:
        """Send a message and wait until it is returned."""


class DirectEcho(Echo):
    """An echo process without a relay."""

    def round_trip(self) -> None:
        """Use the pipes directly."""
        frame = encode(DATA, 1, MESSAGE)
        os.write(self._to_echo, frame)
        missing = len(frame)
        while missing:
            missing -= len(os.read(self._from_echo, missing))


class RelayedEcho(Echo):
    """An echo process behind a relay, and a client's connection to the relay."""

    def __init__(self, folder: Path) -> None:
        self._paths = {channel: str(folder / channel) for channel in CHANNELS}
        self._relay = ChannelRelay()
        self._client = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        super().__enter__()
        IO.hold(self, self._relay.close)
        asyncio.run(IO.run(self._connect()))
        self._client.connect(self._paths["shell"])
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        asyncio.run(IO.run(self._disconnect()))
        asyncio.run(IO.release(self))
        super().__exit__()

    async def _connect(self) -> None:
        self._connection = GuestConnection()
        await self._connection.attach(os.dup(self._to_echo), os.dup(self._from_echo))
        self._connection._send_at_once(op="hello", version=VERSION, processes=[])
        await self._connection.greeted()
        await self._relay.reserve_ipc(self._paths)
        await self._relay.listen()
        self._relay.connect(self._connection, dict.fromkeys(CHANNELS, "unix:/echo"))

    async def _disconnect(self) -> None:
        await self._relay.close()
        self._connection.detach()

    def round_trip(self) -> None:
        """Use the client's socket, the relay and the pipes."""
        self._client.sendall(MESSAGE)
        missing = len(MESSAGE)
        while missing:
            missing -= len(self._client.recv(missing))


def serve() -> None:
    """Run the echo process. It returns data and control frames: the returned hello completes the handshake."""
    decoder = Decoder()
    while data := os.read(0, MAX_PAYLOAD):
        for kind, stream, payload in decoder.feed(data):
            if kind in (CONTROL, DATA):
                os.write(1, encode(kind, stream, payload))


if __name__ == "__main__":
    serve()
