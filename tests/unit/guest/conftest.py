"""Fixtures for PID 1, run as a child on the host."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from guests import real_guest

from sandbox_provisioner.mux.connection import GuestConnection
from sandbox_provisioner.process import LocalProcess


@pytest.fixture
async def guest() -> AsyncIterator[tuple[GuestConnection, LocalProcess]]:
    async with real_guest() as pair:
        yield pair


@pytest.fixture
def connection(guest: tuple[GuestConnection, LocalProcess]) -> GuestConnection:
    return guest[0]


@pytest.fixture
def init(guest: tuple[GuestConnection, LocalProcess]) -> LocalProcess:
    return guest[1]
