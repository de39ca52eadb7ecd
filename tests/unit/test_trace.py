"""Accounts of hand-made histories. Times are milliseconds after the request was accepted."""

from typing import Any

import msgspec
import pytest

from pdq.cli.trace import LOST, Account, account, lines
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import Policy
from pdq.ports import LogEntry, Record

ACCEPTED = 1_750_000_000_000


def _record(state: State, **fields: Any) -> Record:
    defaults: dict[str, Any] = {
        "key": RecordKey("org/model.v1", "0197c0de-0000-7000-8000-000000000001"),
        "attempt": 1,
        "epoch": 2,
        "deadline_ms": ACCEPTED + 600_000,
        "reply_to": "r",
        "prompt_tokens": 700,
        "max_new_tokens": 64,
        "secret": "s",
        "policy": Policy(),
        "created_ms": ACCEPTED,
    }
    return Record(state=state, **(defaults | fields))


def _entry(after_ms: int, event: str, state: State, worker: str = "", epoch: int = 0, **note: Any) -> LogEntry:
    return LogEntry(ACCEPTED + after_ms, event, state, worker, epoch, note)


QUEUED = _entry(0, "enqueue", State.QUEUED)
BEGUN = _entry(40, Event.BEGIN, State.PREFILLING, "prefill-a", 1)
READY = _entry(340, Event.READY, State.READY, "prefill-a", 1, prefill_ms=290.5, prompt_tokens=700, first_token_ms=335.0)
CLAIMED = _entry(350, Event.CLAIM, State.READY, "decode-b", 2)
FETCHED = _entry(
    362,
    Event.FETCHED,
    State.FETCHED,
    "decode-b",
    2,
    transport="shm",
    bytes=32_243_712,
    transfer_ms=11.2,
    tried=[["ucx", "connection refused"]],
)
FINISHED = _entry(2362, Event.FINISH, State.DONE, "decode-b", 2, tokens=51, decode_ms=2000.0)
WHOLE = [QUEUED, BEGUN, READY, CLAIMED, FETCHED, FINISHED]
DONE = _record(State.DONE, emitted=51, ended_ms=ACCEPTED + 2362, ended_code="stop")


def test_a_request_that_went_well_is_told_from_acceptance_to_its_end() -> None:
    told = account(DONE, WHOLE)
    assert (told.queued_ms, told.first_token_ms, told.total_ms, told.tokens) == (40, 335.0, 2362, 51)
    assert told.tokens_per_s == pytest.approx(25.5)
    (attempt,) = told.attempts
    assert (attempt.number, attempt.worker, attempt.prefill_ms, attempt.outcome) == (1, "prefill-a", 290.5, "finish")
    (decoding,) = attempt.decodings
    assert (decoding.worker, decoding.transport, decoding.bytes, decoding.transfer_ms) == (
        "decode-b",
        "shm",
        32_243_712,
        11.2,
    )
    assert decoding.waited_ms == 10
    assert decoding.tried == (("ucx", "connection refused"),)


def test_a_claim_during_prefill_did_not_wait() -> None:
    early = _entry(60, Event.CLAIM, State.PREFILLING, "decode-b", 2)
    told = account(DONE, [QUEUED, BEGUN, early, READY, FETCHED, FINISHED])
    assert told.attempts[0].decodings[0].waited_ms is None
    assert told.attempts[0].prefill_ms == 290.5


def test_a_second_attempt_is_told_beside_the_first_with_the_reason() -> None:
    told = account(
        msgspec.structs.replace(DONE, attempt=2, ended_ms=ACCEPTED + 5000),
        [
            QUEUED,
            BEGUN,
            READY,
            CLAIMED,
            _entry(900, Event.REQUEUE, State.QUEUED, "decode-b", 2, reason="peer_lost", tried=[["ucx", "reset"]]),
            _entry(1000, Event.BEGIN, State.PREFILLING, "prefill-c", 3),
            _entry(1300, Event.READY, State.READY, "prefill-c", 3, prefill_ms=280.0, prompt_tokens=700),
            _entry(1310, Event.CLAIM, State.READY, "decode-d", 4),
            _entry(1330, Event.FETCHED, State.FETCHED, "decode-d", 4, transport="ucx", bytes=10, transfer_ms=9.0),
            _entry(5000, Event.FINISH, State.DONE, "decode-d", 4, tokens=50, decode_ms=2500.0),
        ],
    )
    first, second = told.attempts
    assert (first.number, first.outcome, first.reason) == (1, "requeue", "peer_lost")
    assert first.decodings[0].tried == (("ucx", "reset"),)
    assert first.decodings[0].outcome == "requeue"
    assert (second.number, second.worker, second.queued_ms, second.outcome) == (2, "prefill-c", 100, "finish")
    assert second.decodings[0].worker == "decode-d"
    assert told.queued_ms == 40
    assert told.tokens_per_s == pytest.approx(20.0)


def test_a_prefill_worker_that_vanished_is_told_as_lost() -> None:
    again = _entry(9_000, Event.BEGIN, State.PREFILLING, "prefill-c", 2)
    told = account(_record(State.PREFILLING, attempt=2), [QUEUED, BEGUN, again])
    assert [attempt.outcome for attempt in told.attempts] == [LOST, ""]
    assert told.total_ms is None


def test_a_decode_worker_that_gave_up_and_its_successor_belong_to_one_attempt() -> None:
    told = account(
        DONE,
        [
            QUEUED,
            BEGUN,
            READY,
            CLAIMED,
            _entry(400, Event.YIELD, State.READY, "decode-b", 2, reason="capacity_exhausted"),
            _entry(450, Event.CLAIM, State.READY, "decode-d", 3),
            FETCHED,
            FINISHED,
        ],
    )
    gave_up, successor = told.attempts[0].decodings
    assert (gave_up.outcome, gave_up.reason) == ("yield", "capacity_exhausted")
    assert (successor.worker, successor.waited_ms, successor.transport) == ("decode-d", 50, "shm")


def test_a_decode_worker_that_vanished_is_told_as_lost() -> None:
    told = account(DONE, [QUEUED, BEGUN, READY, CLAIMED, _entry(12_000, Event.CLAIM, State.READY, "decode-d", 3)])
    assert [decoding.outcome for decoding in told.attempts[0].decodings] == [LOST, ""]


def test_an_aggregated_request_has_no_transfer() -> None:
    adopted = _entry(345, Event.ADOPT, State.FETCHED, "decode-b", 1, prefill_ms=300.0, prompt_tokens=700)
    told = account(
        msgspec.structs.replace(DONE, mode="aggregated"),
        [QUEUED, msgspec.structs.replace(BEGUN, worker="decode-b"), adopted, FINISHED],
    )
    (attempt,) = told.attempts
    assert (attempt.worker, attempt.prefill_ms) == ("decode-b", 300.0)
    assert (attempt.decodings[0].worker, attempt.decodings[0].transport, attempt.decodings[0].waited_ms) == (
        "decode-b",
        "",
        None,
    )


def test_a_request_that_the_first_token_ended_has_no_decoding() -> None:
    end = _entry(340, Event.FINISH, State.DONE, "prefill-a", 1, prefill_ms=290.0, prompt_tokens=700, tokens=1)
    told = account(_record(State.DONE, emitted=1, ended_ms=ACCEPTED + 340, ended_code="length"), [QUEUED, BEGUN, end])
    (attempt,) = told.attempts
    assert (attempt.prefill_ms, attempt.decodings, told.tokens) == (290.0, (), 1)


def test_a_request_cancelled_in_the_queue_was_never_begun() -> None:
    cancelled = _record(State.CANCELLED, attempt=0, ended_ms=ACCEPTED + 20, ended_code="cancelled")
    told = account(cancelled, [QUEUED, _entry(20, Event.CANCEL, State.CANCELLED)])
    assert (told.queued_ms, told.total_ms, told.attempts) == (None, 20, ())


def test_a_log_that_lost_its_oldest_entries_is_told_from_where_it_begins() -> None:
    told = account(msgspec.structs.replace(DONE, attempt=3), [CLAIMED, FETCHED, FINISHED])
    (attempt,) = told.attempts
    assert (attempt.number, attempt.worker, attempt.decodings[0].tokens) == (3, "", 51)


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_every_unfinished_history_can_be_told_and_written(length: int) -> None:
    told = account(_record(State.QUEUED if length < 2 else WHOLE[length - 1].state), WHOLE[:length])
    assert list(lines(told))
    assert msgspec.json.decode(msgspec.json.encode(told), type=Account) == told


def test_the_text_names_workers_times_and_what_was_tried() -> None:
    text = "\n".join(lines(account(DONE, WHOLE)))
    for part in (
        "prefill-a",
        "decode-b",
        "ucx failed: connection refused",
        "30.8 MiB over shm in 11 ms",
        "25.5 tokens/s",
    ):
        assert part in text
