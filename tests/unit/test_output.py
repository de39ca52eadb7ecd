"""Text from tokens: whatever the tokens, the pieces add up to the decoded whole, cut at the first stop string."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdq.core.messages import Sampling
from pdq.core.output import Finish, Output
from tests.unit import tiny_tokenizers as tiny


class Text:
    """A tokenizer as ``Output`` wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.eos_token_ids = frozenset({tokenizer.token_to_id(tiny.EOS)})
        self.eos = tokenizer.token_to_id(tiny.EOS)
        self.decodings = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decodings += len(tokens)
        return str(self.tokenizer.decode(tokens))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


BYTE_LEVEL, STRADDLING = Text(tiny.byte_level()), Text(tiny.straddling())
LLAMA, METASPACE = Text(tiny.llama()), Text(tiny.metaspace())
ANY = st.sampled_from([BYTE_LEVEL, STRADDLING, LLAMA, METASPACE])
LONG = 10_000


def run(text: Text, tokens: Sequence[int], sampling: Sampling, limit: int = LONG) -> tuple[list[str], Finish | None]:
    output = Output(text, sampling, limit)
    pieces: list[str] = []
    for token in tokens:
        piece, finish = output.push(token)
        pieces.append(piece)
        if finish is not None:
            return pieces, finish
    return pieces, None


def whole(text: Text, tokens: Sequence[int], stops: Sequence[str] = (), limit: int | None = None) -> str:
    """Everything up to the end, which is forced after the last token."""
    limit = len(tokens) if limit is None else limit
    pieces, finish = run(text, tokens, Sampling(ignore_eos=True, stop=tuple(stops)), limit)
    assert finish is not None
    return "".join(pieces) + finish.tail


def cut(text: str, stops: Sequence[str]) -> str:
    """Before the stop string that is complete first; the longest, of those that are complete at the same place."""
    for end in range(len(text) + 1):
        hits = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: min(hits)]
    return text


def sequences(text: Text) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, text.vocab_size - 1), min_size=1, max_size=60)


@given(st.data())
def test_pieces_and_tail_are_the_decoded_text_for_any_tokens_of_a_byte_level_tokenizer(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([BYTE_LEVEL, STRADDLING]))
    tokens = data.draw(sequences(text))
    assert whole(text, tokens) == text.decode(tokens)


def _to_bytes(name: str) -> bytes:
    """GPT-2's printable stand-ins back to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + index): byte for index, byte in enumerate(b for b in range(256) if b not in printable)}
    return bytes(table[char] for char in name)


BYTES_OF = {
    token: _to_bytes(name) for name, token in STRADDLING.tokenizer.get_vocab().items() if not name.startswith("<")
}


@given(st.text("語日é語日éaß😀", min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_characters_in_tokens_that_straddle_them_come_out_whole(source: str, random: Random) -> None:
    rest, tokens = source.encode(), []
    while rest:
        tokens.append(random.choice([token for token, value in BYTES_OF.items() if rest.startswith(value)]))
        rest = rest[len(BYTES_OF[tokens[-1]]) :]
    assert whole(STRADDLING, tokens) == source


@given(st.data())
def test_pieces_and_tail_are_the_decoded_text_for_sentencepiece_tokenizers(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([LLAMA, METASPACE]))
    pieces = st.sampled_from([token for token in range(text.vocab_size) if not 3 <= token < 259])
    characters = st.sampled_from(["é", "語", "😀", "a"]).map(lambda char: [byte + 3 for byte in char.encode()])
    parts = pieces.map(lambda token: [token]) | characters
    tokens = [token for part in data.draw(st.lists(parts, min_size=1, max_size=30)) for token in part]
    if text is METASPACE:  # this decoder knows no byte tokens: they are plain text to it
        tokens = [token for token in tokens if not 3 <= token < 259] or [text.vocab_size - 1]
    assert whole(text, tokens) == text.decode(tokens)


@given(st.lists(st.integers(0, LLAMA.vocab_size - 1), min_size=1, max_size=200))
def test_any_junk_of_byte_tokens_ends_with_text_and_bounded_work(tokens: list[int]) -> None:
    before = LLAMA.decodings
    whole(LLAMA, tokens)
    assert LLAMA.decodings - before <= 50 * len(tokens) + 2_000


@given(st.data())
def test_text_ends_before_the_first_stop_string_however_it_is_cut_into_tokens(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([BYTE_LEVEL, STRADDLING]))
    tokens = data.draw(sequences(text))
    decoded = text.decode(tokens)
    starts = st.integers(0, max(0, len(decoded) - 1))
    inside = starts.flatmap(lambda at: st.integers(1, 6).map(lambda size: decoded[at : at + size])).filter(bool)
    stops = (
        data.draw(st.lists(inside | st.text("ab h", min_size=1, max_size=3), min_size=1, max_size=4))
        if decoded
        else ["x"]
    )
    assert whole(text, tokens, stops) == cut(decoded, stops)


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=40).map("".join),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_overlapping_stop_strings_are_found_where_they_are_complete_first(source: str, stops: list[str]) -> None:
    assert whole(BYTE_LEVEL, BYTE_LEVEL.encode(source), stops) == cut(source, stops)


@given(st.data())
def test_no_piece_has_to_be_taken_back(data: st.DataObject) -> None:
    text = data.draw(ANY)
    tokens = data.draw(sequences(text))
    stops = data.draw(st.lists(st.text("he lo", min_size=1, max_size=4), max_size=3))
    pieces, _ = run(text, tokens, Sampling(ignore_eos=True, stop=tuple(stops)), LONG)
    for end in range(1, len(pieces) + 1):
        assert whole(text, tokens[:end], stops).startswith("".join(pieces[:end]))


@given(st.data())
def test_a_replayed_sequence_goes_on_like_one_that_was_pushed(data: st.DataObject) -> None:
    text = data.draw(ANY)
    tokens = data.draw(sequences(text))
    at = data.draw(st.integers(0, len(tokens)))
    sampling = Sampling(ignore_eos=True, stop=("the", "lo w"))
    pushed, finish = run(text, tokens, sampling)
    replayed = Output(text, sampling, LONG)
    if replayed.replay(tokens[: min(at, len(pushed))]) is None:
        rest = [replayed.push(token) for token in tokens[at : len(pushed)]]
        assert [piece for piece, _ in rest] == pushed[at:]
    assert replayed.finish == finish
    assert replayed.tokens == tokens[: len(pushed)]


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    tokens = [byte + 3 for byte in "語".encode()]
    pieces, _ = run(LLAMA, tokens, Sampling())
    assert pieces == ["", "", "語"]


def test_a_character_that_never_becomes_whole_is_the_tail() -> None:
    tokens = BYTE_LEVEL.encode("ab")
    half = BYTE_LEVEL.tokenizer.token_to_id("ð")
    pieces, finish = run(BYTE_LEVEL, [*tokens, half], Sampling(), len(tokens) + 1)
    assert "".join(pieces) == "ab"
    assert finish == Finish("length", None, "\ufffd")


def test_the_first_word_loses_its_leading_space_and_later_ones_keep_it() -> None:
    hello, eos = LLAMA.tokenizer.token_to_id("▁hello"), LLAMA.eos
    pieces, _ = run(LLAMA, [hello, hello, eos, hello], Sampling(ignore_eos=True))
    assert pieces == ["hello", " hello", "", " hello"]


def test_special_tokens_before_the_first_word_leave_it_the_first_word() -> None:
    hello, eos = LLAMA.tokenizer.token_to_id("▁hello"), LLAMA.eos
    pieces, _ = run(LLAMA, [eos, eos, hello, hello], Sampling(ignore_eos=True))
    assert pieces == ["", "", "hello", " hello"]


def test_end_of_sequence_counts_as_a_token_and_has_no_text() -> None:
    output = Output(BYTE_LEVEL, Sampling(), LONG)
    for token in BYTE_LEVEL.encode("hello"):
        output.push(token)
    assert output.push(BYTE_LEVEL.eos) == ("", Finish("stop"))
    assert output.tokens == [*BYTE_LEVEL.encode("hello"), BYTE_LEVEL.eos]


def test_end_of_sequence_as_the_first_token_gives_empty_text() -> None:
    assert run(BYTE_LEVEL, [BYTE_LEVEL.eos], Sampling()) == ([""], Finish("stop"))


def test_end_of_sequence_gives_out_what_was_held_back_for_a_stop_string() -> None:
    pieces, finish = run(BYTE_LEVEL, [*BYTE_LEVEL.encode("so ST"), BYTE_LEVEL.eos], Sampling(stop=("STOP",)))
    assert "".join(pieces) == "so "
    assert finish == Finish("stop", None, "ST")


def test_a_stop_token_is_named_and_has_no_text() -> None:
    stop = BYTE_LEVEL.encode("h")[0]
    pieces, finish = run(BYTE_LEVEL, [*BYTE_LEVEL.encode("ab"), stop], Sampling(stop_token_ids=(stop,)))
    assert "".join(pieces) == "ab"
    assert finish == Finish("stop", stop)


def test_ignored_end_of_sequence_is_a_token_like_any_other() -> None:
    pieces, finish = run(BYTE_LEVEL, [BYTE_LEVEL.eos] * 5, Sampling(ignore_eos=True), 5)
    assert pieces == [""] * 5
    assert finish == Finish("length")


def test_one_token_at_most_is_exactly_one_token() -> None:
    pieces, finish = run(BYTE_LEVEL, BYTE_LEVEL.encode("hello world"), Sampling(), 1)
    assert len(pieces) == 1
    assert finish is not None
    assert finish.reason == "length"


def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop() -> None:
    tokens = BYTE_LEVEL.encode("a STOP")
    pieces, finish = run(BYTE_LEVEL, tokens, Sampling(stop=("STOP",)), len(tokens))
    assert "".join(pieces) == "a "
    assert finish == Finish("stop", "STOP")


def test_stop_strings_and_end_of_sequence_within_the_minimum_are_passed_over() -> None:
    word = BYTE_LEVEL.encode("h")
    tokens = [*word, BYTE_LEVEL.eos, *word, *word]
    pieces, finish = run(BYTE_LEVEL, tokens, Sampling(stop=("h",), min_tokens=4))
    assert pieces == ["h", "", "h", ""]
    assert finish == Finish("stop", "h")


def test_end_of_sequence_ends_after_the_minimum() -> None:
    word = BYTE_LEVEL.encode("h")
    pieces, finish = run(BYTE_LEVEL, [*word, BYTE_LEVEL.eos, BYTE_LEVEL.eos], Sampling(min_tokens=2))
    assert pieces == ["h", "", ""]
    assert finish == Finish("stop")


def test_a_passed_over_stop_string_does_not_count_later() -> None:
    tokens = [token for char in "abq" for token in BYTE_LEVEL.encode(char)]
    pieces, finish = run(BYTE_LEVEL, tokens, Sampling(stop=("ab", "abxyz"), min_tokens=3))
    assert "".join(pieces) == "abq"
    assert finish is None


def test_a_token_after_the_end_is_refused() -> None:
    output = Output(BYTE_LEVEL, Sampling(), 1)
    output.push(5)
    with pytest.raises(ValueError, match="has ended"):
        output.push(5)


def test_text_of_many_tokens_costs_no_decoding_once_each_token_is_known() -> None:
    tokens = BYTE_LEVEL.encode("the quick brown fox ") * 50
    run(BYTE_LEVEL, tokens, Sampling())
    before = BYTE_LEVEL.decodings
    run(BYTE_LEVEL, tokens, Sampling())
    assert BYTE_LEVEL.decodings - before <= 4
