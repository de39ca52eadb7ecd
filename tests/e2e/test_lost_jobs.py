"""A bridge that is killed around the publish of a job: what has no job ends soon, what has one goes on."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from pdq.core import names
from pdq.core.lease import RecordKey
from pdq.ports import Record
from tests.e2e.audits import assert_clean
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

OPTIONS = ("--engine", "sim")


def posted(stack: Stack) -> Record:
    """The record of the one request that this sends, whatever becomes of its sender's connection."""
    body = {"model": stack.model, "prompt": "who answers?", "max_tokens": 4}
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    server = redis.Redis.from_url(stack.environ["PDQ_REDIS_URL"], decode_responses=True)
    prefix = names.record_key(stack.model, "")
    [key] = server.scan_iter(prefix + "*")
    server.close()
    return read(stack, key.removeprefix(prefix))


def read(stack: Stack, request_id: str) -> Record:
    record = stack.inside.ask(lambda system: system.ledger.read(RecordKey(stack.model, request_id)))
    assert record is not None
    return record


def ended(stack: Stack, record: Record) -> Record:
    def look() -> Record | None:
        now = read(stack, record.key.request_id)
        return now if now.state.terminal else None

    found: Any = wait_for(look, "the request has ended")
    assert found.ended_ms < found.deadline_ms - 60_000, "long before its deadline"
    return found


def test_a_request_whose_bridge_was_killed_before_it_published_ends_long_before_its_deadline(tmp_path: Path) -> None:
    env = {**SHORT_LEASES, "PDQ_FAILPOINTS": "bridge.before_publish=kill"}
    with running(tmp_path / "state", *OPTIONS, env=env) as stack:
        record = ended(stack, posted(stack))
        assert (record.state, record.ended_code) == ("failed", "job_lost")
        assert_clean(stack)


def test_a_request_whose_bridge_was_killed_after_it_published_is_done_all_the_same(tmp_path: Path) -> None:
    """Its job lies in a worker's hands, without a lease, for longer than the reaper waits before it looks."""
    held = 2 * int(SHORT_LEASES["PDQ_LEASE_TTL_MS"])
    env = {**SHORT_LEASES, "PDQ_FAILPOINTS": f"bridge.after_publish=kill; prefill.delivered=delay:{held}"}
    with running(tmp_path / "state", *OPTIONS, env=env) as stack:
        record = ended(stack, posted(stack))
        assert record.state == "done"
        assert record.ended_ms >= record.created_ms + held
        assert_clean(stack)


def test_a_bridge_that_takes_long_to_publish_is_waited_for(tmp_path: Path) -> None:
    slow = 2 * int(SHORT_LEASES["PDQ_LEASE_TTL_MS"])
    env = {**SHORT_LEASES, "PDQ_FAILPOINTS": f"bridge.before_publish=delay:{slow}"}
    with running(tmp_path / "state", *OPTIONS, env=env) as stack:
        assert stack.complete("who answers?", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert_clean(stack)
