"""Many clients at once, each with a request and a connection of its own, and what came of it for each.

They speak plain HTTP over sockets: a client library's time for hundreds of requests would be taken for the bridge's.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.stack import Stack

PATIENCE_S = 120.0
"""Longer than any deadline here: whoever is not answered by then hangs."""


@dataclass
class Answer:
    """One request's."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]
    """With names in lower case."""
    began: float
    """``time.monotonic``, as ``ended``."""
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def accepted(self) -> bool:
        return "choices" in self.body

    @property
    def tokens(self) -> int:
        tokens: int = self.body["usage"]["completion_tokens"]
        return tokens

    @property
    def code(self) -> str:
        code: str = self.body["error"]["code"]
        return code


@dataclass
class Ask:
    """A request that differs from others in what a crowd's clients differ in."""

    prompt_tokens: int = 50
    max_tokens: int = 8
    priority: str | None = None
    tenant: str | None = None
    timeout_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def of(self, model: str) -> tuple[dict[str, Any], dict[str, str]]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": [65] * self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "min_tokens": self.max_tokens,
        }
        headers = {
            "x-pdq-priority": self.priority,
            "x-pdq-tenant": self.tenant,
            "x-request-timeout-ms": None if self.timeout_s is None else str(round(self.timeout_s * 1000)),
        }
        return body, {name: value for name, value in headers.items() if value is not None} | self.headers


class Crowd:
    def __init__(self, stack: Stack) -> None:
        self._model = stack.model
        self._at = urlsplit(stack.url)

    async def ask(self, ask: Ask) -> Answer:
        body, headers = ask.of(self._model)
        began = time.monotonic()
        status, found, content = await self._exchange("POST", "/v1/completions", json.dumps(body), headers)
        return Answer(status, json.loads(content), found, began, time.monotonic())

    async def metrics(self) -> str:
        return (await self._exchange("GET", "/metrics", "", {}))[2]

    async def _exchange(
        self, method: str, path: str, body: str, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], str]:
        all_headers = {"host": self._at.netloc, "connection": "close", "content-length": str(len(body)), **headers}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(self._at.hostname, self._at.port)
            try:
                writer.write(f"{head}\r\n{body}".encode())
                answer = await reader.read(-1)
            finally:
                writer.close()
        first, *lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
        found = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), found, answer.partition(b"\r\n\r\n")[2].decode()

    async def at_once(self, asks: Iterable[Ask]) -> list[Answer]:
        return await asyncio.gather(*map(self.ask, asks))

    async def at_rate(self, ask: Ask, per_s: float, seconds: float) -> list[Answer]:
        """An open loop: nobody waits for anybody's answer."""
        began = time.monotonic()
        asked: list[asyncio.Task[Answer]] = []
        for number in range(round(per_s * seconds)):
            await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
            asked.append(asyncio.create_task(self.ask(ask)))
        return await asyncio.gather(*asked)

    async def warm_up(self, ask: Ask) -> None:
        """Until the gate has measured how fast prefill is."""
        unmeasured = f'pdq_bridge_admission_wait_seconds_count{{model="{self._model}"}} 0.0'
        async with asyncio.timeout(PATIENCE_S):
            while unmeasured in await self.metrics():
                assert (await self.ask(ask)).accepted


def quantile(values: Sequence[float], part: float) -> float:
    """The least value that ``part`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
