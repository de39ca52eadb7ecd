"""The default model, prepared as a user prepares it. What is marked needs it: minutes, once."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdq.cli.models import DEFAULT, cache
from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings
from tests.unit.torch.moves import aggregated_seat, decode, generate, ids, work
from workers.torch.engine import TorchEngine
from workers.torch.prepare import main, prepare


def test_a_directory_that_exists_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "models" / DEFAULT["torch"]
    directory.mkdir(parents=True)
    assert main(["--cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{directory}\n"
    assert not any(directory.iterdir())


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_default_model_answers_and_its_batches_do_not_change_its_bits() -> None:
    directory = prepare(DEFAULT["torch"], cache())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    engine = TorchEngine.load(directory, EngineSettings(chunk_tokens=32))

    def ask(question: str) -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    france = ask("What is the capital of France?")
    answer = ids(await generate(engine, work(france, output=8)))
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] in engine.eos_token_ids
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inputs = torch.tensor([france])
    made = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=8)
    assert answer == made[0, len(france) :].tolist()

    asked = [
        work(ask(question), Sampling(temperature=1, seed=i, logprobs=1), output=6)
        for i, question in enumerate(("Why is the sky blue?", "Count to ten.", "Hello!"))
    ]
    alone = [await generate(engine, one) for one in asked]
    assert await decode(engine, [await aggregated_seat(engine, one) for one in asked], 6) == alone
    await engine.close()
