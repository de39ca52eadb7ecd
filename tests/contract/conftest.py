"""What tests of the commands share: real servers, a worker that does as it is told, and ``pdq`` as a program."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdq.adapters.processes import Server
from tests.contract.commands import Cli
from tests.contract.scripted import WORKER, ScriptedWorker, scripted_worker


@pytest.fixture
async def worker(nats: Server, valkey: Server, model: str) -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker(nats.url, valkey.url, model) as scripted:
        await scripted.announce()
        yield scripted
        await scripted.system.registry.withdraw(WORKER)


@pytest.fixture
def cli(nats: Server, valkey: Server, tmp_path: Path) -> Cli:
    state_dir = tmp_path / ".pdq"
    state_dir.mkdir()
    (state_dir / "env").write_text(f"PDQ_NATS_URL={nats.url}\nPDQ_REDIS_URL={valkey.url}\n")
    return Cli(state_dir)
