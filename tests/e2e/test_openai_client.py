"""Many streams at once through the official client: all finish, all are right, and they shared the batch."""

import asyncio
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from tests.e2e.stack import Stack, running, wait_for
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack") / "state", "--model", str(tiny_model("llama"))) as stack:
        yield stack


async def chat(client: AsyncOpenAI, model: str, words: int, max_tokens: int) -> tuple[str, str | None, int]:
    """(text, finish reason, completion tokens) of one streamed chat."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": " ".join(f"word{n}" for n in range(words))}],
        max_tokens=max_tokens,
        temperature=0.7,
        seed=words,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, reason, tokens = "", None, 0
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return text, reason, tokens


async def test_sixteen_streams_of_mixed_lengths_finish_right_in_one_batch(tiny: Stack) -> None:
    wanted = [(1 + 7 * n % 60, 20 + 11 * n % 90) for n in range(16)]
    async with tiny.client() as client:
        alone = [await chat(client, tiny.model, words, tokens) for words, tokens in wanted[:4]]
        together = await asyncio.gather(*(chat(client, tiny.model, words, tokens) for words, tokens in wanted))
    assert together[:4] == alone
    for (_, tokens), (text, reason, completion) in zip(wanted, together, strict=True):
        assert reason == "length"
        assert completion == tokens
        assert text
    # One step serves many sequences: far fewer steps than tokens.
    total = sum(tokens for _, tokens in wanted) + sum(tokens for _, tokens in wanted[:4])

    def decoded() -> bool:
        (worker,) = tiny.workers("decode")
        return worker.occupancy.tokens >= total - 20

    wait_for(decoded, "the decode worker has accounted for its tokens")
    (worker,) = tiny.workers("decode")
    assert worker.occupancy.peak_batch >= 8
    assert worker.occupancy.steps < worker.occupancy.tokens / 2


async def test_completions_and_chat_agree_streamed_and_whole(tiny: Stack) -> None:
    async with tiny.client() as client:
        options = {"model": tiny.model, "prompt": "def main():", "max_tokens": 12, "temperature": 0}
        whole = await client.completions.create(**options)  # type: ignore[call-overload]
        pieces = [chunk async for chunk in await client.completions.create(**options, stream=True)]  # type: ignore[call-overload]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in pieces)
    assert whole.usage.completion_tokens == 12


async def test_models_are_listed(tiny: Stack) -> None:
    async with tiny.client() as client:
        (model,) = (await client.models.list()).data
    assert model.id == tiny.model
