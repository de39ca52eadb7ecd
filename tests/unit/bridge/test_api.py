"""The OpenAI API as its official client sees it."""

import pytest

from pdq.adapters.tokenizer import ByteTokenizer
from pdq.core.messages import ChatMessage, PolicyWish
from tests.unit.bridge.harness import ANSWER, MESSAGES, MODEL, rig

PROMPT = len(ByteTokenizer().encode(ByteTokenizer().render([ChatMessage("user", "hello")]), add_special_tokens=False))
TOKENS = len(ANSWER.encode()) + 1


async def test_a_chat_gives_text_finish_reason_and_usage() -> None:
    async with rig() as world:
        answer = await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id == f"chatcmpl-{world.jobs[0].request_id}"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT, TOKENS)
    assert answer.usage.total_tokens == PROMPT + TOKENS
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_gives_the_same_text_and_one_usage_chunk_at_the_end() -> None:
    async with rig() as world:
        stream = await world.openai().chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices].count(None) == len(chunks) - 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_include_usage_has_no_usage_chunk() -> None:
    async with rig() as world:
        stream = await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), ["hello"], [list(b"hello")]], ids=str)
async def test_a_completion_takes_text_or_ids_alone_or_in_a_list(prompt: str) -> None:
    async with rig() as world:
        answer = await world.openai().completions.create(model=MODEL, prompt=prompt)
        stream = await world.openai().completions.create(model=MODEL, prompt=prompt, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert answer.choices[0].text == streamed == ANSWER
    assert answer.object == "text_completion"
    text = isinstance(prompt[0], str)
    assert world.jobs[0].prompt_token_ids == tuple(([ByteTokenizer.BOS] if text else []) + list(b"hello"))


async def test_content_in_parts_is_joined() -> None:
    async with rig() as world:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        await world.openai().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])  # type: ignore[list-item, misc]
    assert bytes(world.jobs[0].prompt_token_ids or ()) == b"user: hel\nlo\nassistant: "


async def test_max_tokens_ends_with_length_in_both_spellings() -> None:
    async with rig() as world:
        client = world.openai()
        old = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9)
        new = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=9)
        both = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=9, max_tokens=9
        )
    for answer in (old, new, both):
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 9
        assert answer.choices[0].message.content == ANSWER.encode()[:9].decode()


async def test_absent_max_tokens_is_what_the_context_leaves() -> None:
    async with rig() as world:
        await world.openai().completions.create(model=MODEL, prompt=list(b"x" * 990))
    assert world.jobs[0].sampling.max_tokens == 10


@pytest.mark.parametrize("stop", [" fox", [" fox", "zebra"]])
async def test_a_stop_string_cuts_streamed_and_whole_text_alike(stop: str | list[str]) -> None:
    async with rig() as world:
        client = world.openai()
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=stop)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=stop, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == ANSWER[: ANSWER.index(" fox")]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra == {"stop_reason": " fox"}


async def test_chat_logprobs_have_one_position_per_token_streamed_or_not() -> None:
    async with rig() as world:
        client = world.openai()
        arguments = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 12}
        whole = await client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        stream = await client.chat.completions.create(**arguments, stream=True)  # type: ignore[call-overload]
        streamed = [p async for chunk in stream if (part := chunk.choices[0].logprobs) for p in part.content]
    positions = whole.choices[0].logprobs.content
    assert positions == streamed
    assert len(positions) == 12
    assert positions[4].token == ByteTokenizer().piece(ANSWER.encode()[4])
    assert positions[0].logprob == -0.5
    assert [top.logprob for top in positions[0].top_logprobs] == [-0.5, -1.5]
    assert positions[8].bytes == [ANSWER.encode()[8]]


async def test_completion_logprobs_are_columns_with_offsets_into_the_text() -> None:
    async with rig() as world:
        client = world.openai()
        whole = await client.completions.create(model=MODEL, prompt="x", logprobs=1, max_tokens=12)
        stream = await client.completions.create(model=MODEL, prompt="x", logprobs=1, max_tokens=12, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
        offsets = [at for part in parts if part for at in part.text_offset or ()]
    columns = whole.choices[0].logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.token_logprobs == [-0.5] * 12
    assert columns.text_offset == offsets
    assert len(columns.tokens) == len(columns.top_logprobs or ()) == len(offsets) == 12
    assert offsets[-1] < len(whole.choices[0].text)


async def test_no_logprobs_unless_asked_for() -> None:
    async with rig() as world:
        answer = await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].logprobs is None


async def test_every_sampling_field_reaches_the_job() -> None:
    async with rig() as world:
        await world.openai().chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0.5,
            top_p=0.25,
            seed=7,
            presence_penalty=1,
            frequency_penalty=-1,
            user="ann",
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.5,
                "min_tokens": 3,
                "ignore_eos": False,
                "stop_token_ids": [4],
                "priority": "batch",
            },
        )
    job, sampling = world.jobs[0], world.jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 7, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.min_p, sampling.min_tokens, sampling.stop_token_ids) == (0.1, 3, (4,))
    assert (job.priority, job.tenant) == ("batch", "ann")


async def test_without_a_seed_every_request_has_its_own() -> None:
    async with rig() as world:
        for _ in range(2):
            await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert world.jobs[0].sampling.seed != world.jobs[1].sampling.seed


async def test_internal_fields_cannot_be_set_by_a_client() -> None:
    async with rig() as world:
        await world.openai().chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            extra_body={
                "request_id": "mine",
                "reply_to": "elsewhere",
                "policy": {"max_attempts": 99},
                "output_so_far": [1],
            },
        )
    job = world.jobs[0]
    assert job.request_id != "mine"
    assert job.reply_to == "pdq.tokens.bridge-test"
    assert job.policy == PolicyWish()
    assert job.output_so_far == ()


async def test_models_are_listed_and_described() -> None:
    async with rig() as world:
        client = world.openai()
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
    assert listed == [MODEL]
    assert one.owned_by == "pdq"
