"""The moves that tests of the torch engine make: prompts, prefill, handoff by hand, decode, and a reference."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings
from pdq.ports import DecodeSeat, Drawn, PromptWork
from tests.tiny_models import VOCABULARY, tiny_model
from workers.torch.decode import TorchSeat
from workers.torch.engine import TorchEngine
from workers.torch.prefill import TorchRun

GREEDY = Sampling(temperature=0, seed=0)
SETTINGS = EngineSettings(block_size=8, chunk_tokens=32, kv_tokens=4096)

MakeEngine = Callable[..., TorchEngine]


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(5, VOCABULARY) for _ in range(length)]


def work(
    tokens: Sequence[int], sampling: Sampling = GREEDY, output: int = 16, resumed: int = 0, name: str = "r"
) -> PromptWork:
    return PromptWork(name, tuple(tokens), resumed, sampling, output)


async def prefill(engine: TorchEngine, asked: PromptWork, *, output: bool = False) -> tuple[TorchRun, list[bytes]]:
    """The finished run, and each chunk's bytes."""
    run = engine.admit(asked, output=output)
    return run, [b"".join(bytes(part) for part in parts) async for _, parts in run.chunks()]


def first_of(run: TorchRun) -> Drawn:
    assert run.first is not None
    return run.first


async def aggregated_seat(engine: TorchEngine, asked: PromptWork) -> tuple[TorchSeat, Drawn]:
    run, _ = await prefill(engine, asked, output=True)
    return engine.adopt(run, asked), first_of(run)


async def handed_over_seat(source: TorchEngine, sink: TorchEngine, asked: PromptWork) -> tuple[TorchSeat, Drawn]:
    """Prefill at ``source``, the bytes copied over, decode at ``sink``; the source has let go."""
    run, chunks = await prefill(source, asked)
    seat = sink.reserve(asked, source.contract.layout)
    assert tuple(len(chunk) for chunk in chunks) == run.plan.lengths
    for chunk, parts in zip(chunks, seat.buffers, strict=True):
        at = 0
        for part in parts:
            part[:] = chunk[at : at + len(part)]
            at += len(part)
        assert at == len(chunk)
    seat.landed()
    run.release()
    return seat, first_of(run)


async def decode(engine: TorchEngine, seats: Sequence[tuple[TorchSeat, Drawn]], output: int) -> list[list[Drawn]]:
    """Decode all ``seats`` together to ``output`` tokens each (the first included), then leave."""
    got: dict[DecodeSeat, list[Drawn]] = {}
    for seat, first in seats:
        got[seat] = [first]
        if output > 1:
            seat.join(first)
    while any(len(drawn) < output for drawn in got.values()):
        step = await engine.step()
        assert not step.failed
        for stepped, drawn in step.drawn:
            got[stepped].append(drawn)
            if len(got[stepped]) == output:
                stepped.leave()
    for seat, _ in seats:
        seat.leave()
    return [got[seat] for seat, _ in seats]


async def generate(engine: TorchEngine, asked: PromptWork) -> list[Drawn]:
    """One request, aggregated and alone."""
    seat, first = await aggregated_seat(engine, asked)
    return (await decode(engine, [(seat, first)], asked.max_new_tokens))[0]


def ids(drawn: Sequence[Drawn]) -> list[int]:
    return [one.token for one in drawn]


_references: dict[str, Any] = {}


def reference(family: str, tokens: Sequence[int], output: int, **options: Any) -> list[int]:
    """What ``generate`` of transformers makes of it, greedily."""
    if family not in _references:
        _references[family] = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
    inputs = torch.tensor([list(tokens)])
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": output, **options}
    made = _references[family].generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    found: list[int] = made[0, len(tokens) :].tolist()
    return found
