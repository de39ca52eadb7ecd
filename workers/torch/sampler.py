"""From logits to tokens: a pure function of (logits, sampling parameters, tokens so far, seed, position).

Order of operations, per sequence: repetition penalty over prompt and output, presence and frequency penalty over output,
EOS and stop tokens masked below ``min_tokens``; then, at temperature 0, the largest; else temperature, top-k, top-p,
min-p, and an inverse-CDF draw in float64 over the kept tokens in order of their ids. That order, and not the order of
probability, keeps a draw stable when two nearly equal logits swap places. Nothing depends on other rows.

Log-probabilities are those of the model's own distribution, before any of this.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from pdq.core.draw import uniform
from pdq.core.messages import Sampling
from pdq.ports import Drawn


class SamplingState:
    """What sampling must remember of one sequence: its parameters and the tokens that penalties look at."""

    def __init__(self, sampling: Sampling, eos_token_ids: frozenset[int], prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self.seed = sampling.seed or 0
        self.position = 0
        """Output tokens so far, which is the output position of the next one."""
        self._barred = sorted(eos_token_ids.union(sampling.stop_token_ids)) if sampling.min_tokens else []
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._seen = dict.fromkeys(prompt) if self._repeats else {}
        self._output: Counter[int] = Counter()

    def append(self, token: int) -> None:
        self.position += 1
        if self._repeats:
            self._seen[token] = None
        if self._counts:
            self._output[token] += 1

    @property
    def shapes_logits(self) -> bool:
        return self._repeats or self._counts or self.position < self.sampling.min_tokens

    def shape(self, logits: torch.Tensor) -> None:
        """Apply penalties and masks to one row, in place."""
        sampling, device = self.sampling, logits.device
        if self._repeats and self._seen:
            seen = torch.tensor(list(self._seen), device=device)
            scores = logits[seen]
            penalty = sampling.repetition_penalty
            logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
        if self._output:
            drawn = torch.tensor(list(self._output), device=device)
            counts = torch.tensor(list(self._output.values()), dtype=logits.dtype, device=device)
            logits[drawn] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if self.position < sampling.min_tokens:
            barred = [token for token in self._barred if token < len(logits)]
            logits[barred] = -torch.inf


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Drawn | None]:
    """One token per row of ``logits`` (``[rows, vocabulary]``); None where the row holds a number that is not finite."""
    logits = logits.float()
    finite: list[bool] = torch.isfinite(logits).all(-1).tolist()
    shaped = logits
    if any(state.shapes_logits for state in states):
        shaped = logits.clone()
        for row, state in zip(shaped, states, strict=True):
            state.shape(row)
    tokens: list[int] = shaped.argmax(-1).tolist()
    drawn = [i for i, state in enumerate(states) if state.sampling.temperature > 0 and finite[i]]
    if drawn:
        chosen = _draw(shaped[drawn].double(), [states[i] for i in drawn])
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    return [
        _described(token, row, state.sampling.logprobs) if whole else None
        for token, row, state, whole in zip(tokens, logits, states, finite, strict=True)
    ]


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Tokens drawn from float64 ``logits`` of sequences with a temperature."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    params = [state.sampling for state in states]
    # The largest becomes 0 first, so that a tiny temperature cannot overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([p.temperature for p in params])
    weights = logits.exp()
    if any(p.top_k or p.top_p < 1 for p in params):
        weights = _keep_most_likely(weights, params)
    if any(p.min_p > 0 for p in params):
        weights = weights.where(weights >= column([p.min_p for p in params]) * weights.amax(-1, keepdim=True), 0.0)
    cdf = weights.cumsum(-1)
    target = column([uniform(state.seed, state.position) for state in states]) * cdf[:, -1:]
    # The first token whose cumulated weight exceeds the target: one of weight 0 never does so first.
    found = torch.searchsorted(cdf, target, right=True)
    # A product rounded up to the total itself exceeds nothing: then the last token with weight is meant.
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    tokens: list[int] = torch.minimum(found, last)[:, 0].tolist()
    return tokens


def _keep_most_likely(weights: torch.Tensor, params: Sequence[Sampling]) -> torch.Tensor:
    """Zero all but the ``top_k`` largest, then all but the smallest set that has ``top_p`` of what is left."""
    vocabulary = weights.shape[-1]
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k or vocabulary for p in params], device=weights.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=weights.dtype, device=weights.device)[:, None]
    ordered = ordered.where(torch.arange(vocabulary, device=weights.device) < top_k, 0.0)
    before = ordered.cumsum(-1) - ordered
    # A top_p of 1 keeps everything, whatever the rounding of the sum.
    kept = (before < top_p * ordered.sum(-1, keepdim=True)) | (top_p >= 1)
    return torch.zeros_like(weights).scatter_(-1, ids, ordered.where(kept, 0.0))


def _described(token: int, logits: torch.Tensor, logprobs: int | None) -> Drawn:
    if logprobs is None:
        return Drawn(token)
    scores = logits.log_softmax(-1)
    top = scores.topk(min(logprobs, len(scores)))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Drawn(token, float(scores[token]), pairs)
