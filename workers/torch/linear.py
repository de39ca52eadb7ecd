"""Linear layers for CPUs in float32: weights packed once, and rows that do not notice each other.

A plain ``torch.nn.Linear`` repacks its weight on every call, and its kernels round differently for 1, 2, 3 and more
rows, so that a sequence's logits would depend on the size of its batch. oneDNN keeps a weight in its own packed order
and sums every output in one order, whatever the number of rows. Measured on one core (AVX2), weights out of memory: the
same time as before for one row, half of it for 2 to 32 rows, two thirds for 256; equal bits for every number of rows,
with one thread and with two.

In bfloat16 torch uses oneDNN by itself; on other devices, and in builds without oneDNN, layers stay as they are.
"""

from typing import Any

import torch
from torch import nn


class PackedLinear(nn.Module):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)
        self.bias = None if plain.bias is None else plain.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return product


def pack_linear_layers(module: Any) -> None:
    """Replace every float32 linear layer below ``module``, which must be on the CPU, by its packed form."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))
