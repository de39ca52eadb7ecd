"""The torch engine next to transformers' ``generate``, in one run on one machine: tokens per second.

``python -m tests.perf.engine [DIRECTORY] [--dtype bfloat16] [--context 512] [--batches 1,8,32] [--repeat 3]``

Without a directory a random Llama of 21 million parameters is made. Every figure is the best of ``--repeat`` samples;
behind it stand tokens per second of CPU time, which neighbours on the machine disturb less. Threads: OMP_NUM_THREADS.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings
from pdq.ports import PromptWork
from workers.torch.engine import TorchEngine


@dataclass
class Rate:
    """Tokens per second of wall time and of CPU time, the best seen."""

    wall: float = 0.0
    cpu: float = 0.0

    def add(self, tokens: int, wall: float, cpu: float) -> None:
        self.wall, self.cpu = max(self.wall, tokens / wall), max(self.cpu, tokens / cpu)

    def __str__(self) -> str:
        return f"{self.wall:8.0f} /s {self.cpu:8.0f} /cpu-s"


class Clock:
    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def elapsed(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


class Bench:
    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory, self.options = directory, options
        self.rng = random.Random(0)
        self.vocabulary = 0

    def prompt(self) -> list[int]:
        return [self.rng.randrange(10, self.vocabulary) for _ in range(self.options.context)]

    # --- pdq ----------------------------------------------------------------------------------------------------------

    async def engine(self) -> None:
        options = self.options
        room = options.context + options.output * options.repeat + 2
        settings = EngineSettings(
            dtype=options.dtype,
            kv_tokens=(room + 16) * (max(options.batches) + 1),
            chunk_tokens=options.chunk,
            max_running=max(options.batches) + 1,
        )
        engine = TorchEngine.load(self.directory, settings)
        self.vocabulary = engine.model.vocab_size
        work = PromptWork("bench", tuple(self.prompt()), 0, Sampling(temperature=0), room - options.context)
        rate = Rate()
        run = engine.admit(work)
        for _ in range(options.repeat + 1):
            run.release()
            run = engine.admit(work)
            clock = Clock()
            chunks = [parts async for _, parts in run.chunks()]
            rate.add(options.context, *clock.elapsed())
        self.show("pdq", "prefill", rate)
        for batch in options.batches:
            seats = [engine.reserve(work, engine.contract.layout) for _ in range(batch)]
            for seat in seats:  # every sequence gets the same prompt's KV: it costs a copy
                for parts, chunk in zip(seat.buffers, chunks, strict=True):
                    for part, source in zip(parts, chunk, strict=True):
                        part[:] = source
                seat.landed()
                seat.join(run.first)
            await engine.step()
            rate = Rate()
            for _ in range(options.repeat):
                clock = Clock()
                for _ in range(options.output):
                    await engine.step()
                rate.add(batch * options.output, *clock.elapsed())
            self.show("pdq", f"decode {batch}", rate)
            for seat in seats:
                seat.leave()
        await engine.close()

    @staticmethod
    def show(who: str, row: str, rate: Rate) -> None:
        print(f"{who:12s} {row:10s} {rate}", flush=True)

    # --- transformers -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def reference(self) -> None:
        options = self.options
        model: Any = AutoModelForCausalLM.from_pretrained(self.directory, dtype=getattr(torch, options.dtype))
        model.generation_config.eos_token_id = None
        plain = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=options.output + 1)
        prefill = Rate()
        for _ in range(options.repeat + 1):
            ids = torch.tensor([self.prompt()])
            clock = Clock()
            model(ids, use_cache=True, logits_to_keep=1)
            prefill.add(options.context, *clock.elapsed())
        self.show("transformers", "prefill", prefill)
        for batch in options.batches:
            decode = Rate()
            ids = torch.tensor([self.prompt() for _ in range(batch)])
            for _ in range(options.repeat):
                clocks: list[Clock] = []

                def after_token(
                    ids: torch.Tensor, *_: object, clocks: list[Clock] = clocks, **__: object
                ) -> torch.Tensor:
                    clocks.append(Clock())
                    return torch.zeros(len(ids), dtype=torch.bool)

                model.generate(ids, generation_config=plain, stopping_criteria=[after_token])
                first, last = clocks[0], clocks[-1]
                decode.add(batch * (len(clocks) - 1), last.wall - first.wall, last.cpu - first.cpu)
            self.show("transformers", f"decode {batch}", decode)


def make_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the torch engine next to transformers.")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--skip-reference", action="store_true")
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        if options.directory is None:
            make_model(directory)
        bench = Bench(directory, options)
        print(f"# {options.dtype}, context {options.context}, {torch.get_num_threads()} threads, tokens per second")
        asyncio.run(bench.engine())
        if not options.skip_reference:
            bench.reference()


if __name__ == "__main__":
    main()
