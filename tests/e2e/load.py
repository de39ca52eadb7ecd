"""Steady load: clients that stream through the bridge again and again, and know what they must get."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.e2e.audits import assert_clean
from tests.e2e.stack import Stack, wait_for

CLIENTS = 4
PROMPTS = [f"Worker {n} leaves, and nobody notices. " * (2 + 5 * n) for n in range(8)]
OPTIONS = {"max_tokens": 60, "min_tokens": 60, "temperature": 1.0, "seed": 11}
ROUND_S = 90.0


class Load:
    """``expected`` is what an undisturbed run answers to each prompt."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._model = stack.model
        self._expected = {prompt: stack.complete(prompt, **OPTIONS)["choices"][0]["text"] for prompt in PROMPTS}
        self._stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._finished: Counter[int] = Counter()
        self.wrong: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self._thread.join(ROUND_S)
        assert not self._thread.is_alive(), "a client hangs"

    def another_round(self) -> None:
        """Returns when every client has begun and finished a request since."""
        before = self._finished.copy()

        def went_round() -> bool:
            return bool(self.wrong) or all(self._finished[n] >= before[n] + 2 for n in range(CLIENTS))

        wait_for(went_round, "every client is served", ROUND_S)
        assert not self.wrong

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=ROUND_S) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not self._stop:
            prompt = PROMPTS[turn % len(PROMPTS)]
            try:
                text = await self._stream(http, prompt)
                if text != self._expected[prompt]:
                    self.wrong.append(f"{text!r} instead of {self._expected[prompt]!r}")
            except Exception as error:
                self.wrong.append(repr(error))
            self._finished[number] += 1
            turn += 1

    async def _stream(self, http: httpx.AsyncClient, prompt: str) -> str:
        body = {"model": self._model, "prompt": prompt, "stream": True, **OPTIONS}
        text, ended = "", False
        async with http.stream("POST", f"{self._stack.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    chunk = httpx.Response(200, text=line[6:]).json()
                    assert "error" not in chunk, chunk
                    text += "".join(choice["text"] for choice in chunk["choices"])
        assert ended, "the stream was cut"
        return text


@contextmanager
def under_load(stack: Stack) -> Iterator[Load]:
    """No request fails, no stream is cut, every text is the undisturbed one, and nothing is left behind."""
    load = Load(stack)
    load.start()
    try:
        load.another_round()
        yield load
        load.another_round()
    finally:
        load.stop()
    assert not load.wrong
    assert_clean(stack)
