"""The strongest test: the same bytes however a request is served.

Every prompt, greedy and seeded, through the bridge: disaggregated over each transport, aggregated, and (greedy) plain
``generate`` of the same checkpoint.
"""

import asyncio
import json
import random
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdq.adapters.tokenizer import load_tokenizer
from tests.e2e.stack import Stack, running, wait_for
from tests.tiny_models import tiny_model

LENGTHS: Final = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 255, 257, 600, 1200, 2000)
NEW_TOKENS: Final = 24
WAYS: Final = {
    "ucx": {"PDQ_TRANSPORT_ORDER": "ucx"},
    "shm": {"PDQ_TRANSPORT_ORDER": "shm"},
    "redis": {"PDQ_TRANSPORT_ORDER": "redis"},
    "aggregated": {},
}
SAMPLINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 1234, "top_p": 0.95, "top_k": 50},
    "penalised": {"temperature": 0.8, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.02},
}


@dataclass(frozen=True)
class Suite:
    """One checkpoint and what is asked of it."""

    directory: Path
    prompts: list[list[int]]
    new_tokens: int
    env: dict[str, str]
    workers: int = 1
    """Those that compute prompts, which is most of the work with a real model."""


def prompts(directory: Path, lengths: tuple[int, ...]) -> list[list[int]]:
    tokenizer = load_tokenizer(directory)
    choose = random.Random(3)
    text = tokenizer.encode(Path(random.__file__).read_text(), add_special_tokens=False)
    return [text[(start := choose.randrange(len(text) - length)) : start + length] for length in lengths]


def start(stack: ExitStack, suite: Suite, way: str, state_dir: Path) -> Stack:
    workers = str(suite.workers)
    aggregated = ("--mode", "aggregated", "--prefill", "0", "--decode", workers)
    sizes = aggregated if way == "aggregated" else ("--prefill", workers)
    options = ("--model", str(suite.directory), *sizes)
    return stack.enter_context(running(state_dir, *options, env={**suite.env, **WAYS[way]}))


async def answers(url: str, model: str, suite: Suite, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """All prompts, a few at a time, so that sequences join and leave the batch."""
    gate = asyncio.Semaphore(5)
    async with httpx.AsyncClient(timeout=300) as client:

        async def one(prompt: list[int]) -> dict[str, Any]:
            body = {"model": model, "prompt": prompt, "max_tokens": suite.new_tokens, "ignore_eos": True, **sampling}
            async with gate:
                answer = await client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return {
                    "text": answer.json()["choices"][0]["text"],
                    "usage": answer.json()["usage"],
                    "request_id": answer.headers["x-request-id"],
                }

        return await asyncio.gather(*(one(prompt) for prompt in suite.prompts))


def generated(suite: Suite) -> list[str]:
    """What plain ``generate`` gives for every prompt, greedily."""
    model = AutoModelForCausalLM.from_pretrained(suite.directory, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(suite.directory)
    texts = []
    for prompt in suite.prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=suite.new_tokens,
                min_new_tokens=suite.new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens = out[0, len(prompt) :].tolist()
        texts.append(tokenizer.decode(tokens))
    return texts


def compare(suite: Suite, tmp_path: Path) -> None:
    expected: dict[str, list[dict[str, Any]]] = {}
    for way in WAYS:
        with ExitStack() as stack:
            pdq = start(stack, suite, way, tmp_path / way)
            for name, sampling in SAMPLINGS.items():
                got = asyncio.run(answers(pdq.url, pdq.model, suite, sampling))
                reference = expected.setdefault(name, got)
                for prompt, ours, theirs in zip(suite.prompts, got, reference, strict=True):
                    assert ours["text"] == theirs["text"], (way, name, len(prompt))
                    assert ours["usage"] == theirs["usage"], (way, name, len(prompt))
            assert_went(pdq, way, got[-1]["request_id"])
    assert [answer["text"] for answer in expected["greedy"]] == generated(suite)


def assert_went(stack: Stack, way: str, request_id: str) -> None:
    """The request really took the way that was asked for."""
    told = wait_for(lambda: stack.cli("trace", request_id), "a trace")
    (decoding,) = told["attempts"][-1]["decodings"]
    assert told["state"] == "done"
    assert decoding["transport"] == ("" if way == "aggregated" else way)


@pytest.fixture
def tiny(tmp_path: Path) -> Suite:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "tiny-llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    env = {"PDQ_ENGINE_CHUNK_TOKENS": "128", "PDQ_ENGINE_KV_TOKENS": "16384"}
    return Suite(directory, prompts(directory, LENGTHS), NEW_TOKENS, env)


@pytest.mark.timeout(600)
def test_twenty_prompts_give_the_same_text_over_every_way_and_plain_generate(tiny: Suite, tmp_path: Path) -> None:
    compare(tiny, tmp_path)


@pytest.mark.model
@pytest.mark.timeout(3000)
def test_the_default_model_gives_the_same_text_over_every_way_and_plain_generate(tmp_path: Path) -> None:
    from pdq.cli.models import prepare, resolve

    directory = prepare(resolve(None, "torch")).directory
    assert directory is not None
    env = {"PDQ_ENGINE_KV_TOKENS": "16384"}
    compare(Suite(directory, prompts(directory, LENGTHS), 12, env, workers=2), tmp_path)
