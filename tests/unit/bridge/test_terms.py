"""Who asks, and on what terms: keys, tenants, classes, and refusals at the gate as a client sees them."""

import json
from typing import Any

import httpx
import pytest

from pdq.bridge.caller import Keys
from pdq.core.errors import InvalidSettings
from pdq.core.settings import SecretLines
from pdq.ports import Pool
from tests.unit.bridge.harness import MODEL, Rig, rig, settings

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 5}
ACME, NIGHTLY = "key-of-acme-0123456789", "key-of-nightly-0123456789"
KEYS = SecretLines(f"# who may ask\n\n{ACME} acme\n  {NIGHTLY}\tnightly  batch \n")
WITH_KEYS = settings(bridge={"api_keys": KEYS})


async def ask(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await client.post(PATH, json=BODY | fields, headers=headers)


async def terms_of(world: Rig, answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    record = await world.record(answer.headers["x-request-id"])
    job = next(job for job in world.jobs if job.request_id == record.key.request_id)
    assert (job.tenant, job.priority) == (record.tenant, record.priority)
    return record.tenant, record.priority


# --- Headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "fields", "tenant", "priority"),
    [
        ({}, {}, "", "interactive"),
        ({}, {"user": "acme", "priority": "batch"}, "acme", "batch"),
        ({"x-pdq-tenant": "acme", "x-pdq-priority": "batch"}, {}, "acme", "batch"),
        ({"x-pdq-tenant": "acme"}, {"user": "end-user-7"}, "acme", "interactive"),
        ({"x-pdq-priority": "batch"}, {"priority": "batch"}, "", "batch"),
    ],
)
async def test_tenant_and_class_come_from_the_headers_or_the_body(
    headers: dict[str, str], fields: dict[str, Any], tenant: str, priority: str
) -> None:
    async with rig() as world, world.http() as client:
        assert await terms_of(world, await ask(client, headers, **fields)) == (tenant, priority)


@pytest.mark.parametrize(
    ("header", "value", "fields"),
    [
        ("x-pdq-priority", "vip", {}),
        ("x-pdq-priority", "", {}),
        ("x-pdq-priority", "Batch", {}),
        ("x-pdq-priority", "batch", {"priority": "interactive"}),
        ("x-pdq-tenant", "", {}),
        ("x-pdq-tenant", "x" * 257, {}),
        ("x-pdq-tenant", "a\tb", {}),
    ],
)
async def test_a_header_that_cannot_be_understood_is_refused_by_name(
    header: str, value: str, fields: dict[str, Any]
) -> None:
    async with rig() as world, world.http() as client:
        answer = await ask(client, {header: value}, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert world.jobs == []


# --- Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer key-of-nobody-0123456789", f"Basic {ACME}", ACME]
)
async def test_without_a_known_key_nothing_under_v1_answers_and_health_and_metrics_do(
    authorization: str | None,
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with rig(config=WITH_KEYS) as world, world.http() as client:
        for answer in (await ask(client, headers), await client.get("/v1/models", headers=headers)):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.json()["error"]["type"] == "invalid_request_error"
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await client.get(path, headers=headers)).status_code == 200
    assert world.jobs == []


@pytest.mark.parametrize(
    ("key", "headers", "fields", "tenant", "priority"),
    [
        (ACME, {}, {}, "acme", "interactive"),
        (ACME, {}, {"user": "end-user-7"}, "acme", "interactive"),
        (ACME, {"x-pdq-tenant": "acme"}, {"priority": "batch"}, "acme", "batch"),
        (NIGHTLY, {}, {}, "nightly", "batch"),
        (NIGHTLY, {"x-pdq-priority": "batch"}, {}, "nightly", "batch"),
    ],
)
async def test_the_key_is_the_tenant_and_the_best_class(
    key: str, headers: dict[str, str], fields: dict[str, Any], tenant: str, priority: str
) -> None:
    async with rig(config=WITH_KEYS) as world, world.http() as client:
        answer = await ask(client, {"authorization": f"bearer {key}", **headers}, **fields)
        assert await terms_of(world, answer) == (tenant, priority)


@pytest.mark.parametrize(
    ("headers", "fields", "status", "param"),
    [
        ({"x-pdq-priority": "interactive"}, {}, 403, "x-pdq-priority"),
        ({}, {"priority": "interactive"}, 403, "priority"),
        ({"x-pdq-tenant": "acme"}, {}, 400, "x-pdq-tenant"),
    ],
)
async def test_a_key_cannot_ask_for_more_than_it_stands_for(
    headers: dict[str, str], fields: dict[str, Any], status: int, param: str
) -> None:
    async with rig(config=WITH_KEYS) as world, world.http() as client:
        answer = await ask(client, {"authorization": f"Bearer {NIGHTLY}", **headers}, **fields)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert world.jobs == []


async def test_no_answer_metric_or_log_line_shows_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    wrong = "key-that-is-wrong-0123456789"
    async with rig(config=WITH_KEYS) as world, world.http() as client:
        answers = [await ask(client, {"authorization": f"Bearer {key}"}) for key in (ACME, wrong)]
        shown = "".join(answer.text for answer in answers) + (await client.get("/metrics")).text
    shown += caplog.text + repr(WITH_KEYS)
    assert ACME not in shown
    assert wrong not in shown


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("key-of-acme-0123456789", "line 1"),
        ("# acme\nkey-of-acme-0123456789 acme vip", "line 2"),
        ("key-of-acme-0123456789 acme batch more", "line 1"),
        ("short acme", "line 1"),
        ("key-of-äcme-0123456789 acme", "line 1"),
        ("key-of-acme-0123456789 acme\nkey-of-acme-0123456789 other", "line 2"),
        ("# nobody yet\n", "no key"),
    ],
)
def test_a_list_of_keys_with_a_mistake_is_refused_by_line_and_not_shown(text: str, named: str) -> None:
    with pytest.raises(InvalidSettings, match=named) as caught:
        Keys(SecretLines(text))
    assert "key-of" not in str(caught.value)


# --- The gate ---------------------------------------------------------------------------------------------------------


async def test_a_request_that_is_refused_leaves_nothing_behind_and_is_counted_by_reason() -> None:
    config = settings(admission={"without_workers": "refuse"})
    async with rig(config=config, workers=(Pool.PREFILL,)) as world, world.http() as client:
        before = (await client.get("/metrics")).text
        answer = await ask(client, {"x-pdq-priority": "batch"})
        metrics = (await client.get("/metrics")).text
        assert await world.ledger.live(MODEL) == []
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "unavailable"
    assert "no decode worker" in answer.json()["error"]["message"]
    assert world.jobs == []
    assert world.cancelled() == []
    counted = f'pdq_bridge_admission_refusals_total{{class="batch",model="{MODEL}",reason="no_workers"}}'
    assert f"{counted} 0.0" in before
    assert f"{counted} 1.0" in metrics
    assert 'pdq_bridge_refusals_total{code="unavailable"} 1.0' in metrics


async def test_a_tenant_over_its_limit_gets_429_and_others_are_served() -> None:
    config = settings(admission={"tenant_reserved_tokens": 30})
    async with rig(config=config) as world, world.http() as client:
        answer = await ask(client, {"x-pdq-tenant": "greedy"}, max_tokens=50)
        other = await ask(client, {"x-pdq-tenant": "modest"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"]
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("tenant_limit", "rate_limit_error")
    assert "greedy" in error["message"]
    assert other.status_code == 200
    assert len(world.jobs) == 1


@pytest.mark.parametrize(
    ("mode", "prompt", "counted"),
    [
        ("disaggregated", "hello", ("disaggregated", "configured")),
        ("auto", "hello", ("aggregated", "short_prompt")),
        ("auto", "hello " * 20, ("disaggregated", "long_prompt")),
    ],
)
async def test_where_a_request_runs_is_counted_with_the_reason(
    mode: str, prompt: str, counted: tuple[str, str]
) -> None:
    async with rig(config=settings(handoff={"mode": mode})) as world, world.http() as client:
        answer = await ask(client, prompt=prompt)
        metrics = (await client.get("/metrics")).text
        record = await world.record(answer.headers["x-request-id"])
    assert record.mode == counted[0]
    name = f'pdq_bridge_routed_total{{mode="{counted[0]}",model="{MODEL}",reason="{counted[1]}"}}'
    assert f"{name} 1.0" in metrics
    assert json.dumps(metrics).count("pdq_bridge_routed_total{") == 6
