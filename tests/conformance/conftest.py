"""What the suites over the in-memory adapters and a real Valkey share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from tests.conformance.ledgers import World, memory_world, redis_world


@pytest.fixture(params=["memory", "valkey"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Of the server; None: in memory."""
    return None if request.param == "memory" else request.getfixturevalue("valkey").url


@pytest.fixture
async def world(url: str | None, model: str) -> AsyncIterator[World]:
    async with redis_world(url, model) if url else memory_world(model) as made:
        yield made


@dataclass
class Time:
    """A clock for the adapter in memory; a server has its own."""

    real: bool
    now_ms: int = 1_700_000_000_000

    def clock(self) -> int:
        return self.now_ms

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Lets time pass until the condition holds."""
        async with asyncio.timeout(10):
            while not await condition():
                self.now_ms += 10
                await asyncio.sleep(0.005 if self.real else 0)


@pytest.fixture
def time(url: str | None) -> Time:
    return Time(real=url is not None)
