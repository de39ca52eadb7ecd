"""One request's tokens as a dense sequence: the receiver's side, the sender's memory, and cutting entries.

The bus may lose, repeat and reorder; a resumed request may repeat what was sent before. ``Assembler`` turns whatever
arrives into the original sequence: each token once, in order, the end once and after all of them. ``SentLog`` lets a
sender answer ``Resend``. Both handle whole entries; nothing here makes an object per token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from pdq.core.messages import End, TokenEntry, TokenFrame, TokenLogprobs

HELD_ENTRIES: Final = 256


class Assembler:
    """The receiver's side of one request's stream."""

    __slots__ = ("_asked_at", "_furthest", "_held", "ended", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """``tokens``: output that the client has already; the stream goes on after it."""
        self.tokens = list(tokens)
        """Every token delivered so far, from 0."""
        self.ended = False
        """The end has been delivered. Nothing is delivered after it."""
        self._furthest = len(self.tokens)
        self._held: list[TokenEntry] = []
        self._asked_at: float | None = None

    @property
    def next_seq(self) -> int:
        return len(self.tokens)

    @property
    def gap(self) -> bool:
        """Something after ``next_seq`` has been seen, but ``next_seq`` itself has not."""
        return self._furthest > len(self.tokens) and not self.ended

    def accept(self, entry: TokenEntry) -> Sequence[TokenEntry]:
        """What can be delivered now, in order: usually ``entry`` itself; parts of it, more, or nothing otherwise."""
        if self.ended or not (entry.tokens or entry.end):
            return ()
        if entry.end is not None and entry.end.state != "done" and entry.seq > len(self.tokens):
            # Nothing follows a bad end, and what is missing before it will not come: it must not wait for that.
            entry = replace(entry, seq=len(self.tokens), tokens=(), pieces=(), logprobs=None)
            self._held.clear()
        if entry.seq == len(self.tokens) and not self._held:
            self.tokens.extend(entry.tokens)
            self.ended = entry.end is not None
            return (entry,)
        if entry.seq > len(self.tokens):
            self._furthest = max(self._furthest, entry.seq + len(entry.tokens))
            self._hold(entry)
            return ()
        delivered: list[TokenEntry] = []
        self._deliver(entry, delivered)
        while self._held and not self.ended and self._held[0].seq <= len(self.tokens):
            self._deliver(self._held.pop(0), delivered)
        if self.ended:
            self._held.clear()
        return delivered

    def ask_again(self, now_s: float, patience_s: float = 0.5) -> int | None:
        """The sequence number from which to ask the sender again, if there is a gap and nothing was asked for it
        within ``patience_s``."""
        if not self.gap:
            self._asked_at = None
            return None
        if self._asked_at is not None and now_s - self._asked_at < patience_s:
            return None
        self._asked_at = now_s
        return len(self.tokens)

    def _deliver(self, entry: TokenEntry, delivered: list[TokenEntry]) -> None:
        known = len(self.tokens) - entry.seq
        if known:
            # An end whose place we have passed already is still the end; no tokens are left of its entry.
            entry = tail(entry, min(known, len(entry.tokens)))
            if entry.seq < len(self.tokens):
                entry = replace(entry, seq=len(self.tokens))
        if entry.tokens or entry.end:
            self.tokens.extend(entry.tokens)
            self.ended = entry.end is not None
            delivered.append(entry)

    def _hold(self, entry: TokenEntry) -> None:
        """Keep for later, sorted; of two that start alike the one that says more. Over the bound, the furthest goes."""
        held = self._held
        at = len(held)
        while at and held[at - 1].seq >= entry.seq:
            at -= 1
        if at < len(held) and held[at].seq == entry.seq:
            if _weight(entry) > _weight(held[at]):
                held[at] = entry
            return
        held.insert(at, entry)
        if len(held) > HELD_ENTRIES:
            held.pop()


def _weight(entry: TokenEntry) -> tuple[int, bool]:
    return len(entry.tokens), entry.end is not None


def head(entry: TokenEntry, count: int) -> TokenEntry:
    """The first ``count`` tokens of an entry, without its end."""
    logprobs = entry.logprobs[:count] if entry.logprobs is not None else None
    return replace(entry, tokens=entry.tokens[:count], pieces=entry.pieces[:count], logprobs=logprobs, end=None)


def tail(entry: TokenEntry, count: int) -> TokenEntry:
    """What is left of an entry after its first ``count`` tokens, with its end."""
    logprobs = entry.logprobs[count:] if entry.logprobs is not None else None
    return replace(
        entry, seq=entry.seq + count, tokens=entry.tokens[count:], pieces=entry.pieces[count:], logprobs=logprobs
    )


def halves(frame: TokenFrame) -> tuple[TokenFrame, TokenFrame] | None:
    """A frame as two, in order; None if there is nothing to cut: one token, or an end alone."""
    if len(frame.entries) > 1:
        middle = len(frame.entries) // 2
        return replace(frame, entries=frame.entries[:middle]), replace(frame, entries=frame.entries[middle:])
    for entry in frame.entries:
        if len(entry.tokens) > 1 or (entry.tokens and entry.end is not None):
            middle = max(1, len(entry.tokens) // 2)
            return replace(frame, entries=(head(entry, middle),)), replace(frame, entries=(tail(entry, middle),))
    return None


# --- The sender's memory ----------------------------------------------------------------------------------------------


class _Sent:
    """What was sent of one request: columns, not entries."""

    __slots__ = ("bytes", "client_id", "end", "ended_at", "logprobs", "pieces", "start", "tokens")

    def __init__(self, entry: TokenEntry) -> None:
        self.start = entry.seq
        self.client_id = entry.client_id
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = None if entry.logprobs is None else []
        self.end: End | None = None
        self.ended_at = 0.0
        self.bytes = _RECORD_BYTES

    def append(self, entry: TokenEntry) -> int:
        """Returns by how many bytes it grew, about."""
        self.tokens.extend(entry.tokens)
        self.pieces.extend(entry.pieces)
        grown = _TOKEN_BYTES * len(entry.tokens) + sum(map(len, entry.pieces))
        if self.logprobs is not None and entry.logprobs is not None:
            self.logprobs.extend(entry.logprobs)
            grown += sum(_LOGPROB_BYTES * (1 + len(position.top)) for position in entry.logprobs)
        self.bytes += grown
        return grown

    def cut(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self.tokens[count:], self.pieces[count:]
        if self.logprobs is not None:
            del self.logprobs[count:]


_RECORD_BYTES: Final = 500
_TOKEN_BYTES: Final = 100
_LOGPROB_BYTES: Final = 200


class SentLog:
    """What this process has sent, so that ``Resend`` can be answered: of every live request, and of ended ones for
    ``keep_s``, but never more than ``max_ended`` of them, nor more than ``max_bytes`` (estimated) of them.

    A live request's share is bounded by its output limit, and their number by the engine's seats.
    """

    def __init__(self, *, keep_s: float = 60.0, max_ended: int = 4096, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._keep_s = keep_s
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._live: dict[str, _Sent] = {}
        self._ended: OrderedDict[str, _Sent] = OrderedDict()
        self._ended_bytes = 0

    def record(self, entry: TokenEntry, now_s: float) -> None:
        """Remember an entry that was just sent.

        An entry that starts before the end of what is known (another attempt of the request in the same process) replaces
        what comes after its start; one that starts later begins anew there.
        """
        sent = self._live.get(entry.request_id)
        if sent is None:
            sent = self._live[entry.request_id] = self._revived(entry.request_id) or _Sent(entry)
        offset = entry.seq - sent.start
        if offset != len(sent.tokens):
            if 0 <= offset < len(sent.tokens):
                sent.cut(offset)
            else:
                sent = self._live[entry.request_id] = _Sent(entry)
        sent.append(entry)
        if entry.end is not None:
            sent.end = entry.end
            self._retire(entry.request_id, now_s)

    def since(self, request_id: str, seq: int) -> TokenEntry | None:
        """Everything known of the request from ``seq`` on as one entry; None if nothing is known there.

        What was sent before this process began with the request cannot be given: the entry then starts later.
        """
        sent = self._live.get(request_id) or self._ended.get(request_id)
        if sent is None:
            return None
        skip = max(seq - sent.start, 0)
        entry = TokenEntry(
            request_id=request_id,
            seq=sent.start + skip,
            tokens=tuple(sent.tokens[skip:]),
            pieces=tuple(sent.pieces[skip:]),
            logprobs=tuple(sent.logprobs[skip:]) if sent.logprobs is not None else None,
            end=sent.end,
            client_id=sent.client_id,
        )
        if skip > len(sent.tokens) or not (entry.tokens or entry.end):
            return None
        return entry

    def forget(self, request_id: str) -> None:
        """The request left this process without an end of its own (handed back, cancelled elsewhere)."""
        self._live.pop(request_id, None)

    def prune(self, now_s: float) -> None:
        """Drop ended requests that are over a bound."""
        while self._ended:
            oldest = next(iter(self._ended.values()))
            expired = now_s - oldest.ended_at > self._keep_s
            if not expired and len(self._ended) <= self._max_ended and self._ended_bytes <= self._max_bytes:
                return
            self._ended.popitem(last=False)
            self._ended_bytes -= oldest.bytes

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def _retire(self, request_id: str, now_s: float) -> None:
        sent = self._live.pop(request_id)
        sent.ended_at = now_s
        self._ended[request_id] = sent
        self._ended_bytes += sent.bytes
        self.prune(now_s)

    def _revived(self, request_id: str) -> _Sent | None:
        sent = self._ended.pop(request_id, None)
        if sent is not None:
            self._ended_bytes -= sent.bytes
            sent.end = None
        return sent
