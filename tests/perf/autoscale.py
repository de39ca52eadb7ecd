"""A load that steps up and down before ``pdq up --autoscale``, as it goes: ``python -m tests.perf.autoscale``.

Real processes, sim engine. One line every two seconds: what is offered, how many workers each pool has (ready of asked
for), why prefill has that size, what waits, and the time to first token of the requests that got theirs since the line
before. The sim engine computes one prompt in ``--prompt-ms``, so that is the best a request can have.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from pdq.core.handoff import State
from pdq.ports import Pool
from tests.e2e.stack import SHORT_LEASES, Stack, running

PROMPT: Final = "x" * 99
"""A token a byte, and one for the start."""
TOKENS: Final = 30
LINE_S: Final = 2.0
WINDOWS: Final = {
    "PDQ_SCALING_PERIOD_S": "1",
    "PDQ_SCALING_OUT_WINDOW_S": "1",
    "PDQ_SCALING_IN_WINDOW_S": "8",
    "PDQ_SCALING_OUT_COOLDOWN_S": "3",
    "PDQ_SCALING_IN_COOLDOWN_S": "4",
    "PDQ_SCALING_STARTUP_S": "4",
    "PDQ_SCALING_PREFILL_MAX": "4",
    "PDQ_SCALING_DECODE_MAX": "2",
}
"""Seconds instead of minutes."""


class Client:
    """Offers requests and measures them."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.rate = 0.0
        self.first_s: list[float] = []
        """Times to first token since they were last taken out."""
        self.failed: list[str] = []
        self.done = 0
        self._running: set[asyncio.Task[None]] = set()

    async def offer(self) -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            due = time.monotonic()
            while self.rate:
                task = asyncio.ensure_future(self._request(http))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                due += 1 / self.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*self._running)

    async def _request(self, http: httpx.AsyncClient) -> None:
        body = {"model": self.stack.model, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
        began, tokens = time.monotonic(), 0
        async with http.stream("POST", f"{self.stack.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.failed.append(f"{answer.status_code}: {(await answer.aread()).decode()}")
                return
            async for line in answer.aiter_lines():
                if '"text":"' in line:
                    if not tokens:
                        self.first_s.append(time.monotonic() - began)
                    tokens += len(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"])
        self.done += 1
        if tokens != TOKENS:
            self.failed.append(f"{tokens} of {TOKENS} tokens")

    def taken(self) -> tuple[str, str]:
        """p50 and p99 of the time to first token, and begin anew."""
        took, self.first_s = sorted(self.first_s), []
        if not took:
            return "-", "-"
        p50, p99 = (took[min(len(took) - 1, int(share * len(took)))] for share in (0.5, 0.99))
        return f"{1000 * p50:.0f} ms", f"{1000 * p99:.0f} ms"


async def timeline(stack: Stack, phases: Sequence[tuple[float, float]]) -> None:
    client = Client(stack)
    print(
        f"{'t':>4} {'offered':>8}  {'prefill':>7} {'decode':>7}  {'waiting':>7}  {'p50':>8} {'p99':>8}  prefill because"
    )
    began = time.monotonic()
    client.rate = phases[0][0]
    offering = asyncio.ensure_future(client.offer())
    for rate, lasts_s in phases:
        client.rate = rate
        until = time.monotonic() + lasts_s
        while time.monotonic() < until:
            await asyncio.sleep(LINE_S)
            await asyncio.to_thread(line, client, time.monotonic() - began)
    client.rate = 0.0
    await offering
    print(f"\n{client.done} requests, {len(client.failed)} of them refused, lost or cut", *client.failed[:3], sep="\n")


def line(client: Client, at_s: float) -> None:
    stack = client.stack
    report = stack.inside.ask(lambda it: it.board.last_report(stack.model))
    waiting = stack.inside.ask(lambda it: it.ledger.load(stack.model)).requests.get(State.QUEUED, 0)
    if report is None:
        return
    sizes = []
    for pool in Pool:
        ready = sum(it.state == "ready" for it in stack.workers(pool))
        sizes.append(f"{ready}/{report.pools[pool].decided}")
    said = report.pools[Pool.PREFILL]
    p50, p99 = client.taken()
    print(
        f"{at_s:4.0f} {client.rate:6.1f}/s  {sizes[0]:>7} {sizes[1]:>7}  {waiting:7d}  {p50:>8} {p99:>8}  {said.cause}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-ms", type=float, default=200, help="what one prompt costs a prefill worker")
    parser.add_argument("--low", type=float, default=2, help="requests a second before and after")
    parser.add_argument("--high", type=float, default=8, help="requests a second in between")
    parser.add_argument("--seconds", type=float, nargs=3, default=(20, 40, 60), help="how long each of the three lasts")
    options = parser.parse_args()
    per_token = options.prompt_ms / (len(PROMPT) + 1)
    env = {**SHORT_LEASES, **WINDOWS, "PDQ_SIM_PREFILL_MS_PER_TOKEN": f"{per_token:g}", "PDQ_SIM_STEP_MS": "10"}
    phases = list(zip((options.low, options.high, options.low), options.seconds, strict=True))
    with (
        tempfile.TemporaryDirectory(prefix="pdq-perf-") as directory,
        running(Path(directory) / "state", "--engine", "sim", "--autoscale", env=env) as stack,
    ):
        asyncio.run(timeline(stack, phases))


if __name__ == "__main__":
    main()
