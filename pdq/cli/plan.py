"""What ``pdq up`` and ``pdq demo`` shall start. Apart from what starts it, which takes half a second to be imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdq.cli.models import Engine, Model

Mode = Literal["disaggregated", "aggregated", "auto"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    state_dir: Path
    model: Model
    engine: Engine
    mode: Mode
    prefill: int
    decode: int
    port: int
    host: str = "127.0.0.1"
    autoscale: bool = False
