"""One forward pass over packed sequences, and the tokens sampled from it. Runs on the compute thread.

Matrix kernels on CPUs take another path for very few rows than for many, and another rounding with it: with MKL in
float32, 1 to 3 rows (with several threads: any number that 4 does not divide) give other last bits than more rows do.
So the rows of a pass, and the rows of which logits are wanted, are padded to a multiple of ``ROW_MULTIPLE``: then a
sequence's logits are the same bits alone and in any batch. The price is nothing that can be measured, since such small
products wait for the weights anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pdq.ports import Drawn
from workers.torch.attention import PagedBatch, Scratch, Span
from workers.torch.model import LoadedModel
from workers.torch.pool import KvPool
from workers.torch.sampler import SamplingState, sample

ROW_MULTIPLE: Final = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a pass: its next tokens, and, if its last one shall be continued, how to sample."""

    tokens: Sequence[int]
    span: Span
    sampling: SamplingState | None


class ForwardPass:
    """The model with its KV pool."""

    def __init__(self, model: LoadedModel, pool: KvPool) -> None:
        self._model, self._pool = model, pool
        self._scratch = Scratch(pool)

    @torch.inference_mode()
    def __call__(self, parts: Sequence[Part]) -> list[Drawn | None]:
        """Computes all ``parts``, writes their KV, and samples one token for each part that asks for one, in order;
        None for a part whose logits are not finite."""
        batch = PagedBatch(self._pool, [part.span for part in parts], self._scratch)
        device = self._pool.device
        tokens = [token for part in parts for token in part.tokens]
        padding = -len(tokens) % ROW_MULTIPLE
        ids = torch.tensor([tokens + [0] * padding], device=device)
        positions = torch.cat([batch.positions, batch.positions.new_zeros(padding)])[None]
        wanted, states, end = [], [], 0
        for part in parts:
            end += len(part.tokens)
            if part.sampling is not None:
                wanted.append(end - 1)
                states.append(part.sampling)
        rows = wanted + [0] * (-len(wanted) % ROW_MULTIPLE)
        base = self._model.module
        hidden = base.model(input_ids=ids, position_ids=positions, use_cache=False, paged=batch).last_hidden_state
        if not wanted:
            return []
        logits = base.lm_head(hidden[0, torch.tensor(rows, device=device)])
        return sample(logits[: len(wanted)], states)
