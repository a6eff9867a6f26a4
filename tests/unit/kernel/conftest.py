"""Fixtures: a relay, its ports, and clients that connect to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest
from guests import descriptors
from relays import ANY, IP, Client, until

from sandbox_provisioner.kernel.relay import ChannelRelay


@pytest.fixture
async def relay() -> AsyncIterator[ChannelRelay]:
    """A relay that leaves no descriptor behind."""
    before = descriptors(os.getpid())
    relay = ChannelRelay()
    yield relay
    await relay.close()
    await until(lambda: descriptors(os.getpid()) <= before)


@pytest.fixture
async def ports(relay: ChannelRelay) -> dict[str, int]:
    ports = await relay.reserve_tcp(IP, ANY)
    await relay.listen()
    return ports


@pytest.fixture
async def dial(relay: ChannelRelay) -> AsyncIterator[Callable[..., asyncio.Future[Client]]]:
    """Return a function that connects a client to a port or a path. All clients are closed after the test."""
    clients: list[Client] = []

    async def dial(address: int | str) -> Client:
        if isinstance(address, str):
            clients.append(Client(*await asyncio.open_unix_connection(address)))
        else:
            clients.append(Client(*await asyncio.open_connection(IP, address)))
        return clients[-1]

    yield dial  # type: ignore[misc]
    await asyncio.gather(*(client.close() for client in clients))
