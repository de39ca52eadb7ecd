"""Answers as bytes. What is the same in every chunk of a stream is rendered once per request; per token only its text is.

One class per shape of answer (``Chunks``: a stream of server-sent events, ``Whole``: one JSON document), over one
``Dialect`` per endpoint. A stream that fails after it began ends with an ``error`` event and ``[DONE]``: clients
that look for errors raise, and clients that only wait for the end do not hang.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from pdq.core.messages import End, Logprob, TokenEntry, TokenLogprobs, Usage

json_bytes: Final = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
LEAST_LOGPROB: Final = -9999.0
"""JSON has no minus infinity."""


class Dialect(NamedTuple):
    """What differs between the two endpoints."""

    id_prefix: str
    object: str
    chunk_object: str
    opening: bytes | None
    """The part of a chunk that comes before the first text."""
    chunk: tuple[bytes, bytes]
    """Around a chunk's text."""
    last: bytes
    """In place of text in the chunk with the finish reason."""
    whole: tuple[bytes, bytes]
    """Around the whole text."""


CHAT: Final = Dialect(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    b'"delta":{"role":"assistant","content":""}',
    (b'"delta":{"content":', b"}"),
    b'"delta":{}',
    (b'"message":{"role":"assistant","content":', b',"refusal":null}'),
)
COMPLETION: Final = Dialect(
    "cmpl-", "text_completion", "text_completion", None, (b'"text":', b""), b'"text":""', (b'"text":', b"")
)


def _opening(dialect: Dialect, kind: str, request_id: str, model: str, created: int) -> bytes:
    """A document up to the member after ``model``."""
    head = {"id": dialect.id_prefix + request_id, "object": kind, "created": created, "model": model}
    return json_bytes(head)[:-1] + b","


def _usage(usage: Usage) -> bytes:
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        % (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            usage.cached_tokens,
        )
    )


def _ending(end: End) -> bytes:
    """The members of a choice that say why it ended."""
    reason = b'"finish_reason":%s' % json_bytes(end.finish_reason)
    return reason if end.stop_reason is None else reason + b',"stop_reason":%s' % json_bytes(end.stop_reason)


class Chunks:
    """The server-sent events of one request."""

    def __init__(self, dialect: Dialect, request_id: str, model: str, created: int, *, include_usage: bool) -> None:
        self._head = b"data: " + _opening(dialect, dialect.chunk_object, request_id, model, created)
        self._choice = self._head + b'"choices":[{"index":0,'
        self._foot = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._dialect = dialect
        self._include_usage = include_usage
        self._logprobs = _Logprobs(dialect)
        self._before = self._choice + dialect.chunk[0]
        self._after = dialect.chunk[1] + b',"logprobs":null,"finish_reason":null}]' + self._foot

    def opening(self) -> bytes:
        """What comes before the first text."""
        if self._dialect.opening is None:
            return b""
        return self._choice + self._dialect.opening + b',"logprobs":null,"finish_reason":null}]' + self._foot

    def text(self, entry: TokenEntry) -> bytes:
        """An entry's text; nothing if all of it is held back."""
        pieces = entry.pieces
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if entry.logprobs is not None:
            logprobs = json_bytes(self._logprobs.add(entry.logprobs, pieces))
            after = self._dialect.chunk[1] + b',"logprobs":%s,"finish_reason":null}]' % logprobs + self._foot
            return self._before + json_bytes(text) + after
        return self._before + json_bytes(text) + self._after if text else b""

    def end(self, end: End) -> bytes:
        """Everything after the last token of a request that ended well."""
        tail = self._before + json_bytes(end.tail) + self._after if end.tail else b""
        last = self._choice + self._dialect.last + b',"logprobs":null,' + _ending(end) + b"}]" + self._foot
        usage = b""
        if self._include_usage and end.usage is not None:
            usage = self._head + b'"choices":[],"usage":' + _usage(end.usage) + b"}\n\n"
        return tail + last + usage + DONE


def error_event(body: bytes) -> bytes:
    """Ends a stream that has begun."""
    return b"data: " + body + b"\n\n" + DONE


class Whole:
    """The one document of a request that is not streamed."""

    def __init__(self, dialect: Dialect, request_id: str, model: str, created: int) -> None:
        self._head = _opening(dialect, dialect.object, request_id, model, created) + b'"choices":[{"index":0,'
        self._dialect = dialect
        self._pieces: list[str] = []
        self._logprobs = _Logprobs(dialect)

    def add(self, entry: TokenEntry) -> None:
        self._pieces += entry.pieces
        if entry.logprobs is not None:
            self._logprobs.add(entry.logprobs, entry.pieces)

    def end(self, end: End) -> bytes:
        before, after = self._dialect.whole
        text = json_bytes("".join(self._pieces) + end.tail)
        logprobs = json_bytes(self._logprobs.all)
        choice = self._head + before + text + after + b',"logprobs":' + logprobs + b"," + _ending(end) + b"}]"
        return choice + b',"usage":' + (_usage(end.usage) if end.usage is not None else b"null") + b"}"


class _Logprobs:
    """Log-probabilities in an endpoint's own form, collected over a request."""

    def __init__(self, dialect: Dialect) -> None:
        self._chat = dialect is CHAT
        self._offset = 0
        self.all: dict[str, Any] | None = None

    def add(self, positions: Sequence[TokenLogprobs], pieces: Sequence[str]) -> Mapping[str, Any]:
        """The form of these positions alone; they are added to ``all`` as well."""
        form: dict[str, Any]
        if self._chat:
            form = {"content": [_chat_position(position) for position in positions], "refusal": None}
        else:
            form = self._columns(positions, pieces)
        if self.all is None:
            self.all = {name: value if value is None else list(value) for name, value in form.items()}
        else:
            for name, value in form.items():
                if value is not None:
                    self.all[name] += value
        return form

    def _columns(self, positions: Sequence[TokenLogprobs], pieces: Sequence[str]) -> dict[str, Any]:
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece)
        return {
            "tokens": [position.text for position in positions],
            "token_logprobs": [_finite(position.logprob) for position in positions],
            "top_logprobs": [{top.text: _finite(top.logprob) for top in position.top} for position in positions],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _chat_position(position: TokenLogprobs) -> dict[str, Any]:
    return {**_chat_token(position), "top_logprobs": [_chat_token(top) for top in position.top]}


def _chat_token(token: TokenLogprobs | Logprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.text.encode())}
