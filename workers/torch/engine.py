"""The torch engine: one model, one block pool, both sides of the handoff.

``TorchEngine`` is a ``PrefillEngine`` and a ``DecodeEngine`` over the same blocks; a worker uses one side, or both when
it serves requests aggregated. All bookkeeping happens on the event loop, all tensor work on one compute thread
(``turns``), and what a running pass reads or writes stays allocated until that pass has ended, whoever left meanwhile.
"""

from pathlib import Path

import torch
import transformers

from pdq.core.errors import CapacityExhausted, ContextTooLong, EngineFailed, InvalidRequest
from pdq.core.layout import Direct, KvLayout, map_layout
from pdq.core.settings import EngineSettings
from pdq.ports import BackendContract, Occupancy, PrefillRun, PromptWork, Step
from workers.torch.decode import Batch, TorchSeat
from workers.torch.machine import Machine, use_configured_threads
from workers.torch.model import LoadedModel, load_model
from workers.torch.pool import InPlace, Staged
from workers.torch.prefill import TorchRun


class TorchEngine:
    """Create with ``load``, on any thread; every other method belongs to the event loop's thread."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self.model = model
        self._settings = settings
        self._machine = Machine(model, settings)
        self._allocator = self._machine.pool.allocator
        self._limit = min(model.max_context, self._allocator.total * model.layout.block_size)
        self._batch = Batch(self._machine)
        self._runs: set[TorchRun] = set()
        self._admitted = 0

    @classmethod
    def load(cls, directory: Path, settings: EngineSettings) -> "TorchEngine":
        """Load the checkpoint in ``directory`` (blocking: call it from a thread).

        Raises:
            IncompatibleContract: not a model that this engine can serve.
            InvalidSettings: no such directory, or no such device.
        """
        use_configured_threads()
        return cls(load_model(directory, settings), settings)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.model.eos_token_ids

    @property
    def contract(self) -> BackendContract:
        return BackendContract(
            name="torch",
            version=f"torch {torch.__version__}, transformers {transformers.__version__}",
            first_token="prefill",
            order=("on_start", "on_first_chunk", "on_complete"),
            direction="pull",
            chunked=True,
            reentry=True,
            resume=True,
            layout=self.model.layout,
            fingerprint=self.model.fingerprint,
            # What does not fit into the blocks is refused before anything is computed, as with any other limit.
            max_context=self._limit,
            features=("logprobs",),
        )

    def occupancy(self) -> Occupancy:
        held = sum(run.finished for run in self._runs)
        return Occupancy(
            total_blocks=self._allocator.total,
            free_blocks=self._allocator.free,
            running=len(self._runs) - held + len(self._batch.seats),
            held=held,
            served=self._admitted,
            steps=self._batch.steps,
            tokens=self._machine.tokens,
            peak_batch=self._batch.peak,
            quarantined_blocks=self._allocator.quarantined,
        )

    async def close(self) -> None:
        """Returns when the pass that runs, if any, has ended. Runs and seats are of no use afterwards."""
        await self._machine.compute.close()

    # --- Prefill ------------------------------------------------------------------------------------------------------

    def admit(self, work: PromptWork, *, output: bool = False) -> "TorchRun":
        blocks = self._allocate(work, work.max_new_tokens if output else 0)
        run = TorchRun(self._machine, work, blocks, self._admitted, self._runs.discard)
        self._admitted += 1
        self._runs.add(run)
        return run

    # --- Decode -------------------------------------------------------------------------------------------------------

    def reserve(self, work: PromptWork, source: KvLayout) -> "TorchSeat":
        mapping = map_layout(source, self.model.layout)
        blocks = self._allocate(work, work.max_new_tokens)
        in_place = isinstance(mapping, Direct) and self.model.device.type == "cpu"
        landing = (InPlace if in_place else Staged)(self._machine.pool, blocks, len(work.tokens), source)
        self._admitted += 1
        return TorchSeat(self._machine, self._batch, work, blocks, landing)

    def adopt(self, run: PrefillRun, work: PromptWork) -> "TorchSeat":
        if not (isinstance(run, TorchRun) and run in self._runs and run.finished):
            raise EngineFailed("only a run of this engine that has computed its whole prompt can be adopted")
        if len(run.blocks) < self.model.layout.blocks_for(len(work.tokens) + work.max_new_tokens):
            raise EngineFailed("the run was admitted without room for its output: it cannot be adopted")
        return TorchSeat(self._machine, self._batch, work, run.surrender(), None)

    async def step(self) -> Step:
        return await self._batch.step()

    # --- Room ---------------------------------------------------------------------------------------------------------

    def _allocate(self, work: PromptWork, output: int) -> list[int]:
        """Blocks for the prompt and ``output`` more tokens."""
        if not work.tokens:
            raise InvalidRequest("the prompt has no tokens: give at least one", field="prompt")
        strange = next((token for token in work.tokens if not 0 <= token < self.model.vocab_size), None)
        if strange is not None:
            raise InvalidRequest(
                f"token {strange} is not in the vocabulary of {self.model.vocab_size} tokens", field="prompt"
            )
        if work.sampling.temperature > 0 and work.sampling.seed is None:
            raise InvalidRequest("no seed: whoever accepts a request must choose one", field="seed")
        layout, allocator = self.model.layout, self._allocator
        tokens = len(work.tokens) + output
        if tokens > self._limit:
            raise ContextTooLong(
                f"{len(work.tokens)} prompt and up to {output} output tokens make {tokens}; at most {self._limit} fit "
                f"(model context {self.model.max_context}, {allocator.total} KV blocks of {layout.block_size} tokens)",
                field="prompt",
            )
        if len(self._runs) + len(self._batch.seats) >= self._settings.max_running:
            raise CapacityExhausted(f"{self._settings.max_running} requests are running or held; try again later")
        return allocator.allocate(layout.blocks_for(tokens))
