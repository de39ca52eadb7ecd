"""What overload does to those who are let in: ``python -m tests.perf.overload [--seconds 60]``.

Real processes (one worker of each pool, sim engine) that can do about ten requests a second:

* ten times that is offered for ``--seconds``: how early the rest is refused, whether what is accepted ends in time and
  complete, its latency against that of an unloaded system, and whether the system accepts again at once afterwards;
* interactive requests with 500 batch requests behind them, when prefill is what lacks and when decode is, against the
  same requests without.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.e2e.audits import assert_clean
from tests.e2e.crowd import Answer, Ask, Crowd, quantile
from tests.e2e.stack import SHORT_LEASES, Stack, running

PROMISED: Final = {**SHORT_LEASES, "PDQ_ADMISSION_INTERACTIVE_WAIT_S": "0.5"}
SLOW_PREFILL: Final = {**PROMISED, "PDQ_SIM_PREFILL_MS_PER_TOKEN": "2", "PDQ_SIM_STEP_MS": "10"}
"""A prompt of 50 tokens takes 0.1 s: ten requests a second, and 64 could decode at a time."""
SLOW_DECODE: Final = {**PROMISED, "PDQ_SIM_STEP_MS": "50", "PDQ_ENGINE_MAX_RUNNING": "4"}
"""Eight tokens take 0.4 s, four requests at a time: ten requests a second."""
CAPACITY: Final = 10.0
TIMEOUT_S: Final = 10.0
BATCH: Final = 500
INTERACTIVE: Final = 40


def p99(answers: Sequence[Answer]) -> float:
    return quantile([it.seconds for it in answers], 0.99)


async def overload(stack: Stack, seconds: float) -> None:
    usual = Ask(timeout_s=TIMEOUT_S)
    people = Crowd(stack)
    await people.warm_up(usual)
    calm = await people.at_rate(usual, CAPACITY / 5, 10)
    answers = await people.at_rate(usual, 10 * CAPACITY, seconds)
    ended = time.monotonic()
    after = await people.ask(usual)
    accepted = [it for it in answers if it.accepted]
    refused = [it for it in answers if it.status in (429, 503)]
    others = Counter((it.status, it.code) for it in answers if not it.accepted and it not in refused)
    print(f"offered {len(answers)} in {seconds:.0f} s, accepted {len(accepted)}, refused {len(refused)}", end="; ")
    print(f"accepted and not complete: {sum(it.tokens != usual.max_tokens for it in accepted)}, else: {dict(others)}")
    half, most = (1000 * quantile([it.seconds for it in refused], part) for part in (0.5, 0.99))
    print(f"  refused after (p50 / p99): {half:.1f} / {most:.1f} ms")
    print(f"  p99 of accepted {p99(accepted):.2f} s, unloaded {p99(calm):.2f} s: {p99(accepted) / p99(calm):.1f} times")
    print(
        f"  the next request, {after.began - ended:.2f} s after the last answer: {after.status} in {after.seconds:.2f} s"
    )
    assert_clean(stack)
    print("  pdq audit: clean")


async def behind(people: Crowd, batch: int) -> tuple[list[Answer], list[Answer]]:
    """The answers to interactive requests, one after the other, and to those of a batch that was there before."""
    waiting = [asyncio.create_task(people.ask(Ask(priority="batch"))) for _ in range(batch)]
    await asyncio.sleep(3.0 if batch else 0.0)
    urgent = [await people.ask(Ask()) for _ in range(INTERACTIVE)]
    return urgent, await asyncio.gather(*waiting)


async def classes(stack: Stack) -> None:
    people = Crowd(stack)
    await people.warm_up(Ask())
    alone, _ = await behind(people, 0)
    urgent, batch = await behind(people, BATCH)
    unfinished = sum(it.ended > urgent[-1].ended for it in batch)
    print(f"  interactive p99 {p99(alone):.2f} s alone, {p99(urgent):.2f} s with {BATCH} batch requests behind it")
    print(
        f"  batch: {unfinished} unended when the last interactive one ended, {sum(it.accepted for it in batch)} served"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as directory:
        for number, (what, env) in enumerate((("slow prefill", SLOW_PREFILL), ("slow decode", SLOW_DECODE))):
            with running(Path(directory) / str(number), "--engine", "sim", env=env) as stack:
                print(f"--- {what}")
                asyncio.run(overload(stack, seconds))
                asyncio.run(classes(stack))


if __name__ == "__main__":
    main()
