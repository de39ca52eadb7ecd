"""How fast a worker is and how much it holds: published linear fits, and sizes that follow from the model.

The fits are those of DistServe (github.com/LLMServe/DistServe, commit 82831f16, Apache-2.0; its simulator's
``fit_params`` for A100-80G), measured with prompts of up to 2,048 tokens, which is these models' context. Longer prompts,
as in newer traces, are extrapolated: the quadratic term keeps the shape, the figures are not measurements.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

GPU_BYTES: Final = 80e9
USABLE: Final = 0.9
"""Of a GPU's memory: the rest goes to activations and fragments."""
SMALL_BATCH: Final = 95
"""Up to this batch a decode step follows the first of its two fits."""


class Profile(NamedTuple):
    """One worker: ``gpus`` GPUs with one copy of the model. Times in ms."""

    gpus: int
    prefill: tuple[float, float, float]
    """a + b * tokens + c * tokens^2, for one prompt."""
    decode_small: tuple[float, float, float]
    """a + b * context tokens of the batch + c * batch, for one step."""
    decode_large: tuple[float, float, float]
    weight_bytes: float
    kv_bytes_per_token: int
    network_bytes_per_s: float = 25e9
    """What one KV transfer gets."""

    @property
    def kv_tokens(self) -> int:
        return int((self.gpus * GPU_BYTES * USABLE - self.weight_bytes) / self.kv_bytes_per_token)

    def prefill_s(self, tokens: int) -> float:
        a, b, c = self.prefill
        return (a + b * tokens + c * tokens * tokens) / 1_000

    def transfer_s(self, tokens: int) -> float:
        return 0.001 + tokens * self.kv_bytes_per_token / self.network_bytes_per_s


# Layers * 2 (keys and values) * hidden size * 2 bytes.
_KV_13B: Final = 40 * 2 * 5_120 * 2
_KV_66B: Final = 64 * 2 * 9_216 * 2

PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "opt-13b-1gpu": Profile(
            1,
            (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
            (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
            (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
            26e9,
            _KV_13B,
        ),
        "opt-13b-4gpu": Profile(
            4,
            (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
            (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
            (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
            26e9,
            _KV_13B,
        ),
        "opt-66b-4gpu": Profile(
            4,
            (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
            (30.760284619429587, 0.000451947603788462, 0.063284195750671),
            (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
            132e9,
            _KV_66B,
        ),
    }
)
