"""The real servers that tests run against, started once per session on free loopback ports."""

import asyncio
from collections.abc import Iterator

import pytest

from pdq.adapters.processes import Server, nats_server, valkey_server


def _run(server: Server) -> Iterator[Server]:
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real NATS server with JetStream. Tests share it: use model names of your own."""
    yield from _run(nats_server(tmp_path_factory.mktemp("nats")))


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Valkey server. Tests share it: use model names of your own."""
    yield from _run(valkey_server(tmp_path_factory.mktemp("valkey")))
