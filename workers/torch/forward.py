"""One forward pass over packed sequences, and the tokens sampled from it. Runs on the compute thread.

Nothing in a pass lets one sequence feel another: linear layers give every row the same bits in any batch (``linear``),
attention takes one sequence at a time (``attention``), and so does sampling (``sampler``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdq.ports import Drawn
from workers.torch.attention import PagedBatch, Scratch, Span
from workers.torch.model import LoadedModel
from workers.torch.pool import KvPool
from workers.torch.sampler import SamplingState, sample


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a pass: its next tokens, and, if its last one shall be continued, how to sample."""

    tokens: Sequence[int]
    span: Span
    sampling: SamplingState | None
    alone_from: int | None = None
    """From this position on each token attends by itself, as in a decode step of its own: output that goes through the
    model once more, several tokens at once, then gives the same bits as the first time."""

    def spans(self) -> list[Span]:
        begin, end, rows = self.span.begin, self.span.begin + self.span.count, self.span.rows
        alone = end if self.alone_from is None else min(max(begin, self.alone_from), end)
        together = [Span(begin, alone - begin, rows)] if alone > begin else []
        return together + [Span(position, 1, rows) for position in range(alone, end)]


class ForwardPass:
    """The model with its KV pool."""

    def __init__(self, model: LoadedModel, pool: KvPool) -> None:
        self._model, self._pool = model, pool
        self._scratch = Scratch(pool)

    @torch.inference_mode()
    def __call__(self, parts: Sequence[Part]) -> list[Drawn | None]:
        """Computes all ``parts``, writes their KV, and samples one token for each part that asks for one, in order;
        None for a part whose logits are not finite."""
        batch = PagedBatch(self._pool, [span for part in parts for span in part.spans()], self._scratch)
        device = self._pool.device
        tokens = [token for part in parts for token in part.tokens]
        ids = torch.tensor([tokens], device=device)
        wanted, states, end = [], [], 0
        for part in parts:
            end += len(part.tokens)
            if part.sampling is not None:
                wanted.append(end - 1)
                states.append(part.sampling)
        module, positions = self._model.module, batch.positions[None]
        hidden = module.model(input_ids=ids, position_ids=positions, use_cache=False, paged=batch).last_hidden_state
        if not wanted:
            return []
        return sample(module.lm_head(hidden[0, torch.tensor(wanted, device=device)]), states)
