"""What is refused: with which status, naming which field, and leaving nothing behind."""

import json
from typing import Any

import pytest

from pdq.adapters.memory.queue import MemoryQueue
from pdq.core.errors import Overloaded, PdqError, Unavailable
from pdq.core.handoff import State
from pdq.core.settings import QueueSettings
from pdq.ports import Pool
from tests.unit.bridge.harness import CHAT, MESSAGES, MODEL, rig, settings, until

COMPLETION = "/v1/completions"
GOOD = {"model": MODEL, "messages": MESSAGES}
PROMPT = {"model": MODEL, "prompt": "hello"}


def chat(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({**PROMPT, **fields}).encode()


TABLE: list[tuple[str, bytes, int, str | None]] = [
    (CHAT, b"", 400, None),
    (CHAT, b"{", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b"null", 400, None),
    (CHAT, b"\xff\xfe\x00", 400, None),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', 400, None),
    (CHAT, b'{"model":"%s","messages":[{"role":"user","content":"\\ud800"}]}' % MODEL.encode(), 400, None),
    (CHAT, b'{"x":' + b"[" * 200_000, 400, None),
    (CHAT, b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, None),
    (CHAT, b'{"tools":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}", 400, None),
    (CHAT, b"{}", 400, "model"),
    (CHAT, json.dumps({"model": MODEL}).encode(), 400, "messages"),
    (CHAT, json.dumps({"messages": MESSAGES}).encode(), 400, "model"),
    (CHAT, chat(model=7), 400, "model"),
    (CHAT, chat(model=""), 400, "model"),
    (CHAT, chat(model="x" * 300), 400, "model"),
    (CHAT, chat(model="nobody/serves-this"), 404, "model"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hello"), 400, "messages"),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user", "content": 7}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0].content[0]"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature=float("nan")), 400, "temperature"),
    (CHAT, chat(temperature=float("-inf")), 400, "temperature"),
    (CHAT, chat(temperature=1e300), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-5), 400, "max_tokens"),
    (CHAT, chat(max_tokens=2.5), 400, "max_tokens"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**400), 400, "max_tokens"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens"),
    (CHAT, chat(max_tokens=100_000), 400, "max_tokens"),
    (CHAT, chat(max_tokens=5, min_tokens=6), 400, "min_tokens"),
    (CHAT, chat(n=3), 400, "n"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(seed=2**70), 400, "seed"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop=["x"] * 17), 400, "stop"),
    (CHAT, chat(stop=[7]), 400, "stop[0]"),
    (CHAT, chat(logit_bias={"5": 1}), 400, "logit_bias"),
    (CHAT, chat(logprobs=5), 400, "logprobs"),
    (CHAT, chat(top_logprobs=5), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(priority="vip"), 400, "priority"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (COMPLETION, json.dumps({"model": MODEL}).encode(), 400, "prompt"),
    (COMPLETION, completion(prompt=None), 400, "prompt"),
    (COMPLETION, completion(prompt=[]), 400, "prompt"),
    (COMPLETION, completion(prompt=["a", "b"]), 400, "prompt"),
    (COMPLETION, completion(prompt=[1, "b"]), 400, "prompt"),
    (COMPLETION, completion(prompt=[5, 258]), 400, "prompt"),
    (COMPLETION, completion(prompt=[-1]), 400, "prompt[0]"),
    (COMPLETION, completion(prompt={"text": "a"}), 400, "prompt"),
    (COMPLETION, completion(best_of=2), 400, "best_of"),
    (COMPLETION, completion(echo=True), 400, "echo"),
    (COMPLETION, completion(logprobs=True), 400, "logprobs"),
]


async def test_junk_bodies_are_refused_by_field_and_the_bridge_goes_on() -> None:
    async with rig() as world, world.http() as client:
        for path, body, status, field in TABLE:
            answer = await client.post(path, content=body)
            assert answer.status_code == status, (body[:200], answer.text)
            error = answer.json()["error"]
            assert error["param"] == field, (body[:200], error)
            assert error["message"]
            assert error["type"] == "invalid_request_error"
            assert error["code"]
        assert world.jobs == []
        assert await world.ledger.live(MODEL) == []
        assert (await client.post(CHAT, content=chat())).status_code == 200
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"unknown": {"deep": [1, 2]}},
        {"tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"temperature": None, "max_tokens": None, "stop": None, "stream": None, "n": None},
        {"temperature": 1},
        {"top_k": -1},
        {"stop": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    async with rig() as world, world.http() as client:
        assert (await client.post(CHAT, content=chat(**fields))).status_code == 200


async def test_a_prompt_over_the_context_is_refused_with_the_numbers() -> None:
    async with rig() as world, world.http() as client:
        answer = await client.post(COMPLETION, content=completion(prompt=[5] * 1000))
        fits = await client.post(COMPLETION, content=completion(prompt=[5] * 999))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count("1000") == 2
    assert fits.status_code == 200
    assert len(world.jobs) == 1


async def test_prompt_and_max_tokens_over_the_context_are_refused_with_the_numbers() -> None:
    async with rig() as world, world.http() as client:
        answer = await client.post(COMPLETION, content=completion(prompt=[5] * 900, max_tokens=101))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("900", "101", "1001", "1000"))
    assert world.jobs == []


@pytest.mark.parametrize("length", ["announced", "chunked"])
async def test_a_body_of_ten_megabytes_is_refused_and_the_client_reads_why(length: str) -> None:
    async with rig(config=settings(bridge={"max_body_bytes": 1000})) as world, world.http() as client:
        body = chat(messages=[{"role": "user", "content": "x" * 10_000_000}])

        async def parts() -> Any:
            for at in range(0, len(body), 100_000):
                yield body[at : at + 100_000]

        answer = await client.post(CHAT, content=body if length == "announced" else parts())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert answer.headers["connection"] == "close"
        assert (await client.post(CHAT, content=chat())).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
        ("GET", "/v1/models/none", 404),
        ("POST", "/v1/x", 404),
    ],
)
async def test_unknown_paths_and_methods_get_an_error_body_and_a_request_id(
    method: str, path: str, status: int
) -> None:
    async with rig() as world, world.http() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_every_answer_has_an_id_of_ours_and_echoes_the_clients() -> None:
    async with rig() as world, world.http() as client:
        answers = [
            await client.post(CHAT, content=body, headers={"x-request-id": "mine, 1"})
            for body in (chat(), chat(), b"junk", chat(model="none"))
        ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    assert all(id_[14] == "7" for id_ in ids)  # UUIDv7
    assert {answer.headers["x-client-request-id"] for answer in answers} == {"mine, 1"}
    assert [job.request_id for job in world.jobs] == ids[:2]
    assert {job.client_id for job in world.jobs} == {"mine, 1"}
    assert (await world.record(ids[0])).client_id == "mine, 1"


@pytest.mark.parametrize(("value", "status"), [("5000", 200), ("0", 400), ("-1", 400), ("soon", 400), ("9" * 30, 400)])
async def test_the_timeout_header_becomes_the_deadline_within_its_bounds(value: str, status: int) -> None:
    async with rig() as world, world.http() as client:
        answer = await client.post(CHAT, content=chat(), headers={"x-request-timeout-ms": value})
    assert answer.status_code == status
    if status == 200:
        record = await world.record(answer.headers["x-request-id"])
        assert record.deadline_ms - record.created_ms == 5000
        assert world.jobs[0].timeout_ms == 5000
    else:
        assert answer.json()["error"]["param"] == "x-request-timeout-ms"


async def test_a_model_of_which_no_worker_was_ever_seen_is_refused_for_now() -> None:
    async with rig(workers=()) as world, world.http() as client:
        answer = await client.post(CHAT, content=chat())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "unavailable"


class RefusingQueue(MemoryQueue):
    def __init__(self, error: PdqError) -> None:
        super().__init__(QueueSettings())
        self.error = error

    async def publish(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("the queue is full", retry_after_s=2.5), 429), (Unavailable("the broker does not answer"), 503)],
)
async def test_a_job_that_cannot_be_published_fails_its_record_and_asks_to_come_back(
    error: PdqError, status: int
) -> None:
    async with rig(queue=RefusingQueue(error)) as world, world.http() as client:
        answer = await client.post(CHAT, content=chat())
        request_id = answer.headers["x-request-id"]
    assert answer.status_code == status
    assert answer.headers["retry-after"] == ("3" if status == 429 else "1")
    record = await world.record(request_id)
    assert record.state is State.FAILED
    assert record.ended_code == error.code


async def test_a_fault_in_the_bridge_is_a_500_without_its_details_and_ends_the_record() -> None:
    class Broken(MemoryQueue):
        async def publish(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("secret detail")

    async with rig(queue=Broken(QueueSettings())) as world, world.http() as client:
        answer = await client.post(CHAT, content=chat())
        request_id = answer.headers["x-request-id"]
        await until(lambda: request_id in world.cancelled())
        assert (await world.record(request_id)).state is State.CANCELLED
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_readiness_names_what_is_missing() -> None:
    async with rig(workers=(Pool.PREFILL,)) as world, world.http() as client:
        answer = await client.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json()["missing"] == [f"{MODEL}: no decode worker"]
    async with rig() as world, world.http() as client:
        assert (await client.get("/health/ready")).status_code == 200


async def test_readiness_of_aggregated_serving_needs_a_worker_that_takes_whole_requests() -> None:
    config = settings(handoff={"mode": "aggregated"})
    async with rig(config=config) as world, world.http() as client:
        assert (await client.get("/health/ready")).status_code == 503
    async with rig(config=config, workers=(Pool.DECODE,), aggregated=True) as world, world.http() as client:
        assert (await client.get("/health/ready")).status_code == 200


async def test_a_silent_broker_makes_the_bridge_not_ready() -> None:
    class Deaf(MemoryQueue):
        async def depth(self, *_: Any) -> tuple[int, int]:
            raise Unavailable("the broker does not answer")

    async with rig(queue=Deaf(QueueSettings())) as world, world.http() as client:
        answer = await client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["missing"] == ["broker: the broker does not answer"]
