"""From drawn tokens to what requesters read: pieces of text and log-probabilities, as wire types."""

import time
from collections.abc import Sequence

from pdq.core.messages import End, Logprob, Sampling, TokenEntry, TokenLogprobs, Usage
from pdq.core.output import Finish, Output
from pdq.ports import Drawn, Grant, Record, Tokenizer


def logprobs_of(tokenizer: Tokenizer, sampling: Sampling, drawn: Drawn) -> TokenLogprobs | None:
    """None unless the request asked for them."""
    if sampling.logprobs is None or drawn.logprob is None:
        return None
    top = tuple(Logprob(token, tokenizer.piece(token), value) for token, value in drawn.top[: sampling.logprobs])
    return TokenLogprobs(drawn.token, tokenizer.piece(drawn.token), drawn.logprob, top)


def entry(record: Record, seq: int, token: int, piece: str, logprobs: TokenLogprobs | None) -> TokenEntry:
    """One token of ``record``'s request, at output position ``seq``."""
    return TokenEntry(
        request_id=record.key.request_id,
        seq=seq,
        tokens=(token,),
        pieces=(piece,),
        logprobs=(logprobs,) if logprobs is not None else None,
        client_id=record.client_id,
    )


def done(record: Record, finish: Finish, output: Output) -> End:
    return End(
        state="done",
        finish_reason=finish.reason,
        stop_reason=finish.stop_reason,
        tail=finish.tail,
        usage=Usage(prompt_tokens=record.prompt_tokens, completion_tokens=len(output.tokens)),
    )


def end_alone(record: Record, output: Output) -> TokenEntry:
    """The end of an output of which every token is out already."""
    assert output.finish is not None
    return TokenEntry(
        request_id=record.key.request_id,
        seq=len(output.tokens),
        end=done(record, output.finish, output),
        client_id=record.client_id,
    )


def first_token_ms(grant: Grant, granted: float) -> float:
    """From the request's acceptance until now; ``granted`` is ``time.monotonic`` at the grant."""
    return round(grant.now_ms - grant.record.created_ms + (time.monotonic() - granted) * 1000, 3)


def output_of(tokenizer: Tokenizer, sampling: Sampling, record: Record, tokens: Sequence[int]) -> Output:
    """The text state after ``tokens`` of the output."""
    output = Output(tokenizer, sampling, record.max_new_tokens)
    output.replay(tokens)
    return output
