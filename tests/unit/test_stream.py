"""Any loss, repetition, reordering and re-sending ends in exactly the original stream."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pdq.core.messages import End, Logprob, TokenEntry, TokenFrame, TokenLogprobs, Usage, encode
from pdq.core.stream import HELD_ENTRIES, Assembler, SentLog, halves, head, tail

ID = "request"
END = End(state="done", finish_reason="stop", usage=Usage(3, 5))


def entry(seq: int, count: int, *, end: bool = False, logprobs: bool = False) -> TokenEntry:
    """Tokens that say where they belong: token 100 + i and its piece at position i."""
    tokens = tuple(range(100 + seq, 100 + seq + count))
    return TokenEntry(
        request_id=ID,
        seq=seq,
        tokens=tokens,
        pieces=tuple(f"<{token}>" for token in tokens),
        logprobs=tuple(TokenLogprobs(t, str(t), -1.0, (Logprob(t, "x", -1.0),)) for t in tokens) if logprobs else None,
        end=END if end else None,
    )


def joined(delivered: Sequence[TokenEntry]) -> TokenEntry:
    """Delivered entries as one; fails if they are not dense."""
    at = delivered[0].seq
    for one in delivered:
        assert one.seq == at
        at += len(one.tokens)
    return TokenEntry(
        request_id=ID,
        seq=delivered[0].seq,
        tokens=tuple(t for one in delivered for t in one.tokens),
        pieces=tuple(p for one in delivered for p in one.pieces),
        logprobs=tuple(lp for one in delivered for lp in one.logprobs or ()) or None,
        end=next((one.end for one in delivered if one.end), None),
    )


@st.composite
def original(draw: st.DrawFn, logprobs: bool = False) -> list[TokenEntry]:
    """A stream as its sender cuts it; its end comes with, or after, the last token."""
    counts = draw(st.lists(st.integers(1, 4), min_size=0, max_size=12))
    starts = [0, *itertools.accumulate(counts)]
    entries = [entry(seq, count, logprobs=logprobs) for seq, count in zip(starts, counts, strict=False)]
    if entries and draw(st.booleans()):
        last = entries.pop()
        entries.append(entry(last.seq, len(last.tokens), end=True, logprobs=logprobs))
    else:
        entries.append(entry(starts[-1], 0, end=True))
    return entries


@st.composite
def parts_of(draw: st.DrawFn, whole: TokenEntry) -> TokenEntry:
    """Any slice of the stream; an entry that reaches the last token may carry the end."""
    length = len(whole.tokens)
    start = draw(st.integers(0, length))
    stop = draw(st.integers(start, length))
    return entry(start, stop - start, end=stop == length and draw(st.booleans()))


@given(st.data())
def test_any_loss_repetition_and_reordering_then_a_resend_gives_exactly_the_original(data: st.DataObject) -> None:
    sent = data.draw(original())
    whole = joined(sent)
    arrivals = data.draw(st.lists(st.sampled_from(sent), max_size=30))
    arrivals += data.draw(st.lists(parts_of(whole), max_size=10))
    log = SentLog()
    for one in sent:
        log.record(one, now_s=0)

    assembler = Assembler()
    delivered: list[TokenEntry] = []
    for one in data.draw(st.permutations(arrivals)):
        delivered += assembler.accept(one)
    if not assembler.ended:
        again = log.since(ID, assembler.next_seq)
        assert again is not None
        delivered += assembler.accept(again)

    assert joined(delivered) == whole
    assert [one.end for one in delivered if one.end] == [END]
    assert delivered[-1].end == END
    assert assembler.tokens == list(whole.tokens)
    assert assembler.ended
    assert not assembler.gap


@given(st.data())
def test_a_gap_is_reported_exactly_while_something_is_missing_before_what_was_seen(data: st.DataObject) -> None:
    whole = joined(data.draw(original()))
    assembler = Assembler()
    furthest = 0
    for one in data.draw(st.lists(parts_of(whole), max_size=20)):
        assembler.accept(one)
        if one.tokens or one.end:
            furthest = max(furthest, one.seq + len(one.tokens))
        assert assembler.gap == (not assembler.ended and furthest > assembler.next_seq)


@given(original(logprobs=True), st.integers(0, 60))
def test_the_log_gives_back_exactly_what_was_sent_from_any_place(sent: list[TokenEntry], seq: int) -> None:
    log = SentLog()
    for one in sent:
        log.record(one, now_s=0)
    whole = joined(sent)
    again = log.since(ID, seq)
    if seq > len(whole.tokens):
        assert again is None
    else:
        assert again is not None
        assert again.seq == seq
        assert again.tokens == whole.tokens[seq:]
        assert again.pieces == whole.pieces[seq:]
        assert (again.logprobs or ()) == (whole.logprobs or ())[seq:]
        assert again.end == END


@given(st.lists(original(logprobs=True), min_size=1, max_size=3), st.integers(300, 2000))
def test_halving_until_it_fits_loses_nothing_and_keeps_the_order(streams: list[list[TokenEntry]], limit: int) -> None:
    def cut(frame: TokenFrame) -> list[TokenFrame]:
        if len(encode(frame)) <= limit or (parts := halves(frame)) is None:
            return [frame]
        return [piece for part in parts for piece in cut(part)]

    entries = tuple(joined(sent) for sent in streams)
    pieces = cut(TokenFrame("w", entries))
    assert all(len(piece.entries) == 1 or len(encode(piece)) <= limit for piece in pieces)
    flat = [one for piece in pieces for one in piece.entries]
    rebuilt = []
    for whole in entries:
        group = [flat.pop(0)]
        while group[-1].end is None:
            group.append(flat.pop(0))
        rebuilt.append(joined(group))
        assert rebuilt[-1] == whole
    assert not flat


def test_an_entry_in_order_is_passed_on_as_it_is() -> None:
    assembler = Assembler()
    first, second = entry(0, 1), entry(1, 3, end=True)
    assert assembler.accept(first)[0] is first
    assert assembler.accept(second)[0] is second


def test_an_entry_whose_first_tokens_are_known_is_cut() -> None:
    assembler = Assembler()
    assembler.accept(entry(0, 3))
    (rest,) = assembler.accept(entry(1, 4, logprobs=True))
    assert rest == entry(3, 2, logprobs=True)


def test_tokens_that_the_client_has_already_are_not_delivered() -> None:
    assembler = Assembler(tokens=(100, 101))
    assert not assembler.accept(entry(0, 2))
    assert joined(assembler.accept(entry(0, 3))) == entry(2, 1)


def test_an_end_waits_for_the_tokens_before_it() -> None:
    assembler = Assembler()
    assert not assembler.accept(entry(2, 0, end=True))
    assert assembler.gap
    assert joined(assembler.accept(entry(0, 2))) == entry(0, 2, end=True)
    assert assembler.ended


def test_an_end_that_someone_else_wrote_for_a_dead_sender_may_lie_behind() -> None:
    failed = TokenEntry(request_id=ID, seq=1, end=End(state="failed"))
    assembler = Assembler()
    assembler.accept(entry(0, 5))
    (last,) = assembler.accept(failed)
    assert (last.seq, last.tokens, last.end) == (5, (), failed.end)
    assert assembler.ended


def test_nothing_is_delivered_after_the_end() -> None:
    assembler = Assembler()
    assembler.accept(entry(0, 2, end=True))
    assert not assembler.accept(entry(2, 3))
    assert not assembler.accept(entry(2, 0, end=True))
    assert assembler.tokens == [100, 101]


def test_an_empty_entry_without_an_end_says_nothing() -> None:
    assembler = Assembler()
    assert not assembler.accept(entry(0, 0))
    assert not assembler.accept(entry(7, 0))
    assert not assembler.gap


def test_a_gap_is_asked_for_once_per_patience() -> None:
    assembler = Assembler()
    assert assembler.ask_again(0.0) is None
    assembler.accept(entry(0, 2))
    assembler.accept(entry(3, 1))
    assert assembler.ask_again(1.0, patience_s=0.5) == 2
    assert assembler.ask_again(1.4, patience_s=0.5) is None
    assert assembler.ask_again(1.6, patience_s=0.5) == 2
    assembler.accept(entry(2, 1))
    assert assembler.ask_again(9.0) is None


def test_what_is_held_for_a_gap_is_bounded_and_the_rest_comes_again() -> None:
    assembler = Assembler()
    for seq in range(1, 3 * HELD_ENTRIES):
        assembler.accept(entry(seq, 1))
    assert len(assembler.accept(entry(0, 1))) == 1 + HELD_ENTRIES
    assert assembler.gap
    assembler.accept(entry(assembler.next_seq, 3 * HELD_ENTRIES, end=True))
    assert assembler.ended
    assert not assembler.gap


def test_head_and_tail_make_up_the_entry() -> None:
    whole = entry(5, 4, end=True, logprobs=True)
    assert joined([head(whole, 1), tail(whole, 1)]) == whole


def test_ended_requests_are_remembered_for_a_bounded_time() -> None:
    log = SentLog(keep_s=10)
    log.record(entry(0, 2, end=True), now_s=0)
    log.prune(now_s=10)
    assert log.since(ID, 0) is not None
    log.prune(now_s=10.1)
    assert log.since(ID, 0) is None
    assert len(log) == 0


def test_ended_requests_are_bounded_in_number_and_bytes_and_the_oldest_go_first() -> None:
    log = SentLog(max_ended=3)
    for number in range(5):
        log.record(TokenEntry(str(number), 0, (1,), end=END), now_s=number)
    assert [number for number in range(5) if log.since(str(number), 0)] == [2, 3, 4]

    log = SentLog(max_bytes=100_000)
    for number in range(100):
        log.record(TokenEntry(str(number), 0, (1,), ("x" * 9_000,), end=END), now_s=0)
    assert 5 <= len(log) <= 11
    assert log.since("99", 0) is not None


def test_live_requests_are_never_dropped_but_can_be_forgotten() -> None:
    log = SentLog(max_ended=1, keep_s=1)
    log.record(entry(0, 2), now_s=0)
    log.prune(now_s=1e9)
    assert log.since(ID, 1) == entry(1, 1)
    log.forget(ID)
    assert log.since(ID, 0) is None


def test_another_attempt_in_the_same_process_continues_from_where_it_starts() -> None:
    log = SentLog()
    log.record(entry(0, 4), now_s=0)
    log.record(entry(2, 3), now_s=0)
    assert log.since(ID, 0) == entry(0, 5)
    log.record(entry(9, 1), now_s=0)
    assert log.since(ID, 0) == entry(9, 1)
    log.record(entry(10, 0, end=True), now_s=0)
    log.record(entry(10, 1), now_s=0)
    assert log.since(ID, 9) == entry(9, 2)
