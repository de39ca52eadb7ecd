"""The torch engine on a CUDA device: `pytest -m gpu tests/gpu`. Nothing here runs without one."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from pdq.core.messages import Sampling
from tests.tiny_models import FAMILIES, tiny_model
from tests.unit.torch.moves import SETTINGS, MakeEngine, decode, generate, handed_over_seat, ids, prompt, work
from workers.torch.engine import TorchEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ON_GPU = msgspec.structs.replace(SETTINGS, device="cuda", dtype="float32")
ON_CPU = msgspec.structs.replace(SETTINGS, device="cpu", dtype="float32")


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    made: list[TorchEngine] = []

    def make(family: str = "llama", settings: object = ON_GPU) -> TorchEngine:
        made.append(TorchEngine.load(tiny_model(family), settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_disaggregated_equals_aggregated_on_the_gpu(family: str, make_engine: MakeEngine) -> None:
    source, sink = make_engine(family), make_engine(family)
    for sampling in (Sampling(temperature=0), Sampling(temperature=1.2, seed=7)):
        for length in (1, 8, 33, 150):
            asked = work(prompt(length), sampling)
            seat = await handed_over_seat(source, sink, asked)
            assert ids((await decode(sink, [seat], 16))[0]) == ids(await generate(source, asked))
    for engine in (source, sink):
        assert engine.occupancy().free_blocks == engine.occupancy().total_blocks


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_output_of_gpu_and_cpu_agree(family: str, make_engine: MakeEngine) -> None:
    gpu, cpu = make_engine(family, ON_GPU), make_engine(family, ON_CPU)
    for length in (1, 31, 150):
        asked = work(prompt(length))
        assert ids(await generate(gpu, asked)) == ids(await generate(cpu, asked))
