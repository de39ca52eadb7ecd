"""The text side of one sequence: what a client may see of it, as a pure function of its tokens.

Two things are held back, because a later token could make them wrong: bytes that do not make a whole character yet,
and text that may turn out to be the beginning of a stop string. Everything else is given out with the token that made
it certain, so that concatenated pieces never have to be taken back, and a replayed sequence repeats its pieces.

A match is decided character by character, not token by token: of several stop strings the one that is complete first
wins (the longest, if several are complete at the same character). So the text does not depend on how the same
characters were cut into tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, Protocol
from weakref import WeakKeyDictionary, proxy

from msgspec import Struct

from pdq.core.messages import Sampling

REPLACEMENT: Final = "\ufffd"
UNFINISHED: Final = 3
"""Bytes that a character may lack its last one of; each may show as one replacement character."""
TRIM_AT: Final = 8
GIVE_UP_AT: Final = 32


class Detokenizer(Protocol):
    """What this module asks of a tokenizer (``pdq.ports.Tokenizer`` has it)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens are left out; the first word loses its leading space if this kind of tokenizer adds one."""


class Finish(Struct, frozen=True):
    """Why a sequence ended, and the text that was still held back then and belongs to the output."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    """The stop string, or the token id of ``stop_token_ids``; None for end of sequence."""
    tail: str = ""


class Output:
    """One sequence's output. ``push`` each token in order until it reports the end."""

    __slots__ = ("_ends", "_eos", "_matcher", "_max_tokens", "_min_tokens", "_text", "finish", "tokens")

    def __init__(self, tokenizer: Detokenizer, sampling: Sampling, max_new_tokens: int) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._eos = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._ends = self._eos.union(sampling.stop_token_ids)
        self._matcher = _Matcher(sampling.stop) if any(sampling.stop) else None
        self._min_tokens = sampling.min_tokens
        self._max_tokens = max_new_tokens
        self._text = _Text(tokenizer)

    def push(self, token: int) -> tuple[str, Finish | None]:
        """The text that became certain with ``token``, and the end if this was the last token.

        A token that ends the sequence counts as a token and has no text. Up to ``min_tokens`` nothing but the
        length ends it: such tokens are then like any other, and stop strings that become complete are passed over.
        """
        if self.finish is not None:
            raise ValueError(f"token {token} pushed to a sequence that has ended ({self.finish.reason})")
        self.tokens.append(token)
        count = len(self.tokens)
        if token in self._ends and count > self._min_tokens:
            return "", self._close("stop", None if token in self._eos else token)
        piece = self._text.push(token)
        if self._matcher is not None:
            piece, stop = self._matcher.push(piece, armed=count >= self._min_tokens)
            if stop is not None:
                self.finish = Finish("stop", stop)
                return piece, self.finish
        if count >= self._max_tokens:
            return piece, self._close("length", None)
        return piece, None

    def replay(self, tokens: Iterable[int]) -> Finish | None:
        """Push tokens whose text is known already (resume); the state is the same as after pushing them. Whatever comes
        after the end is left out."""
        for token in tokens:
            if self.finish is not None:
                break
            self.push(token)
        return self.finish

    def _close(self, reason: Literal["stop", "length"], stop_reason: str | int | None) -> Finish:
        tail = self._text.flush()
        if self._matcher is not None:
            tail, stop = self._matcher.push(tail, armed=len(self.tokens) >= self._min_tokens)
            if stop is not None:
                reason, stop_reason = "stop", stop
            else:
                tail += self._matcher.flush()
        self.finish = Finish(reason, stop_reason, tail)
        return self.finish


class _Matcher:
    """Finds the first stop string in a text that comes in pieces; ``held`` may become the beginning of one."""

    __slots__ = ("_firsts", "_held", "_lasts", "_stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._lasts = frozenset(stop[-1] for stop in self._stops)
        self._held = ""

    def push(self, piece: str, *, armed: bool) -> tuple[str, str | None]:
        """The text that is certain now and, if ``armed``, the stop string before which it was cut."""
        if not piece:
            return "", None
        text, old = self._held + piece, len(self._held)
        if armed and (match := self._first_match(text, old)) is not None:
            start, stop = match
            self._held = ""
            return text[:start], stop
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """Only matches that end in the new part: older ones were passed over, or were none."""
        if self._lasts.isdisjoint(text):
            return None
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _possible_start(self, text: str) -> int:
        """Where the longest suffix begins that is a proper beginning of a stop string."""
        if self._firsts.isdisjoint(text):
            return len(text)
        for index, char in enumerate(text):
            if char in self._firsts:
                suffix = text[index:]
                if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                    return index
        return len(text)


class _Text:
    """Tokens to text, never half a character, at a cost per token that does not grow.

    What a token reads as depends on the tokens before it in two ways only: whether anything stands before it at all
    (the leading space of a first word goes away), and on bytes of an unfinished character. So a token after a clean
    end reads as it does after any other text, here after the ``anchor``: one dictionary look-up per token. Only while
    a character is unfinished, the ``window`` of its tokens is decoded again.

    Byte-fallback tokenizers read a whole run of byte tokens as replacement characters once a single byte of it is
    wrong, also the characters before. Those have been given out by then, and stay.
    """

    __slots__ = ("_begun", "_given", "_tokenizer", "_vocabulary", "_window")

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary(tokenizer)
        self._window: list[int] = []
        self._given = 0
        """How much of the window's text is out already."""
        self._begun = False

    def push(self, token: int) -> str:
        if self._begun and not self._window:
            known = self._vocabulary.texts.get(token)
            if known is not None:
                return known
        if self._vocabulary.silent(token):
            return ""
        self._window.append(token)
        text = self._vocabulary.read(self._window, self._begun)
        if not text.endswith(REPLACEMENT):
            if self._begun and len(self._window) == 1:
                self._vocabulary.texts[token] = text
            return self._clear(text)
        certain = max(self._given, len(text) - min(UNFINISHED, len(text) - len(text.rstrip(REPLACEMENT))))
        piece, self._given = text[self._given : certain], certain
        if len(self._window) > TRIM_AT:
            piece += self._trim(text)
        return piece

    def flush(self) -> str:
        return self._clear(self._vocabulary.read(self._window, self._begun)) if self._window else ""

    def _clear(self, text: str) -> str:
        rest = text[self._given :]
        self._window.clear()
        self._given, self._begun = 0, True
        return rest

    def _trim(self, text: str) -> str:
        """An unfinished character begins in the last three tokens; forget what lies before them."""
        held = text[self._given :]
        tokens = self._window[-UNFINISHED - 1 :]
        tail = self._vocabulary.read(tokens, True)
        if tail.endswith(held):
            self._window, self._given, self._begun = tokens, len(tail) - len(held), True
            return ""
        return self._clear(text) if len(self._window) > GIVE_UP_AT else ""


class _Vocabulary:
    """What is known of a tokenizer's tokens, shared by all its sequences."""

    __slots__ = ("_anchor", "_anchor_length", "_silent", "_tokenizer", "texts")

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer: Detokenizer = proxy(tokenizer)  # kept alive by its sequences, not by what is known of it
        self._anchor = _find_anchor(tokenizer)
        self._anchor_length = len(tokenizer.decode(self._anchor))
        self._silent: dict[int, bool] = {}
        self.texts: dict[int, str] = {}
        """Token after the anchor -> its text, for tokens with a clean end."""

    def read(self, window: Sequence[int], begun: bool) -> str:
        if begun:
            return self._tokenizer.decode([*self._anchor, *window])[self._anchor_length :]
        return self._tokenizer.decode(window)

    def silent(self, token: int) -> bool:
        """No text wherever it stands (special tokens). Alone, a mere leading space would look the same."""
        known = self._silent.get(token)
        if known is None:
            known = self._silent[token] = self._tokenizer.decode([token, token]) == ""
        return known


def _find_anchor(tokenizer: Detokenizer) -> list[int]:
    """A token with plain text: one of several letters, so that it is no byte token, if there is one."""
    fallback: list[int] = []
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if len(text) > 1 and text.isascii() and text.isalnum():
            return [token]
        if text and REPLACEMENT not in text and not fallback:
            fallback = [token]
    return fallback


_vocabularies: "WeakKeyDictionary[Detokenizer, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary(tokenizer: Detokenizer) -> _Vocabulary:
    known = _vocabularies.get(tokenizer)
    if known is None:
        known = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return known
