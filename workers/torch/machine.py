"""What runs and seats share: the model, its KV pool, and the one thread that computes."""

import os

import torch

from pdq.core.layout import KvLayout
from pdq.core.settings import EngineSettings
from pdq.ports import PromptWork
from workers.torch.forward import ForwardPass
from workers.torch.model import LoadedModel
from workers.torch.pool import KvPool
from workers.torch.sampler import SamplingState
from workers.torch.turns import ComputeThread


class Machine:
    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self.model = model
        self.layout: KvLayout = model.layout
        self.pool = KvPool(model.layout, max(1, settings.kv_tokens // settings.block_size), model.device)
        self.forward = ForwardPass(model, self.pool)
        self.compute = ComputeThread(use_configured_threads)
        self.tokens = 0
        """Prompt tokens prefilled and output tokens decoded since the start."""

    def sampling_state(self, work: PromptWork) -> SamplingState:
        """The state before the next token: resumed tokens are output."""
        split = len(work.tokens) - work.resumed
        state = SamplingState(work.sampling, self.model.eos_token_ids, work.tokens[:split])
        for token in work.tokens[split:]:
            state.append(token)
        return state


def use_configured_threads() -> None:
    """Torch keeps its thread count per thread: the compute thread is told the one that the environment names."""
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if configured.isdigit() and int(configured):
        torch.set_num_threads(int(configured))


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
