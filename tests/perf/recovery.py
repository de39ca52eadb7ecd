"""How long clients wait for the dead, and sources for the gone: ``python -m tests.perf.recovery``.

Real processes (two of each pool, sim engine), at the default leases and at short ones:

* from SIGKILL of a decode worker in the middle of a stream to the next token of that stream,
* from a client's disconnect to all of the source's blocks being free, in the middle of a long prompt.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from pdq.core.handoff import State
from pdq.ports import Record
from tests.e2e.stack import SHORT_LEASES
from tests.faults.matrix.plant import MODEL, Plant

DEFAULT_LEASES: Final = {
    "PDQ_LEASE_TTL_MS": "10000",
    "PDQ_LEASE_REAPER_PERIOD_MS": "1000",
    "PDQ_QUEUE_ACK_WAIT_S": "10",
}
BEFORE_THE_KILL: Final = 20
"""Tokens that the client has when the worker dies."""
PAUSE_S: Final = 0.2


async def live(plant: Plant, state: State) -> Record:
    """The one live request, once it is in ``state``."""
    while True:
        for record in await plant.system.ledger.live(MODEL):
            if record.state is state:
                return record
        await asyncio.sleep(0.002)


async def kill_to_next_token(plant: Plant) -> float:
    body = {"model": MODEL, "prompt": "kill me " * 20, "max_tokens": 200, "stream": True}
    killed_at, seen, last = 0.0, 0, 0.0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{plant.url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            seen, now = seen + 1, time.monotonic()
            # What was on its way when the worker died comes at once; the first pause is the one that is meant.
            if killed_at and now - last > PAUSE_S:
                return now - killed_at
            last = now
            if seen == BEFORE_THE_KILL:
                record = await live(plant, State.FETCHED)
                assert record.sink is not None
                victim = next(it for it in plant.programs.values() if it.identity == record.sink.worker)
                victim.child.signal(9)
                killed_at = last = time.monotonic()
    raise AssertionError("the stream ended before its worker was killed")


async def disconnect_to_free(plant: Plant) -> float:
    body = {"model": MODEL, "prompt": "long " * 4000, "max_tokens": 5, "stream": True}

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            await client.post(f"{plant.url}/v1/completions", json=body)

    asking = asyncio.create_task(ask())
    record = await live(plant, State.PREFILLING)
    await asyncio.sleep(0.3)
    assert record.source is not None
    gone_at = time.monotonic()
    asking.cancel()
    while True:
        account = await plant.system.bus.ask_account(record.source.worker, 5)
        if account is not None and account.free_blocks == account.total_blocks:
            return time.monotonic() - gone_at
        await asyncio.sleep(0.001)


def told(what: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{what:52} median {statistics.median(ordered):7.3f} s   {ordered[0]:.3f} .. {ordered[-1]:.3f}"


async def measure(leases: str, extra: dict[str, str], repeats: int) -> None:
    # A chunk of 256 tokens takes about 50 ms, a step 5 ms.
    speed = {
        "PDQ_SIM_PREFILL_MS_PER_TOKEN": "0.2",
        "PDQ_SIM_STEP_MS": "5",
        "PDQ_ENGINE_CHUNK_TOKENS": "256",
        "PDQ_ENGINE_KV_TOKENS": "65536",
    }
    with tempfile.TemporaryDirectory(prefix="pdq-perf-") as directory:
        plant = await Plant(Path(directory), {**speed, **extra}).start()
        try:
            kills = []
            for _ in range(repeats):
                kills.append(await kill_to_next_token(plant))
                await plant.whole()
            gone = [await disconnect_to_free(plant) for _ in range(repeats * 4)]
        finally:
            await plant.close()
    print(told(f"{leases}: SIGKILL to the next token", kills))
    print(told(f"{leases}: disconnect to free source blocks", gone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    asyncio.run(measure("short leases (1.5 s)", SHORT_LEASES, repeats))
    asyncio.run(measure("default leases (10 s)", DEFAULT_LEASES, repeats))


if __name__ == "__main__":
    main()
