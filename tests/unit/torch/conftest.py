from collections.abc import AsyncIterator

import pytest

from pdq.core.settings import EngineSettings
from tests.tiny_models import tiny_model
from tests.unit.torch.moves import SETTINGS, MakeEngine
from workers.torch.engine import TorchEngine


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    made: list[TorchEngine] = []

    def make(family: str = "llama", settings: EngineSettings = SETTINGS) -> TorchEngine:
        made.append(TorchEngine.load(tiny_model(family), settings))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()
