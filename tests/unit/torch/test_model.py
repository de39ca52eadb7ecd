"""Which checkpoints are served, and how they are named."""

import json
import shutil
from pathlib import Path

import pytest
import xxhash

from pdq.core.errors import IncompatibleContract, IncompatibleLayout, InvalidSettings
from pdq.core.settings import EngineSettings
from tests.tiny_models import make_tiny_model, tiny_model
from tests.unit.torch.moves import SETTINGS
from workers.torch.model import load_model


def changed(tmp_path: Path, **fields: object) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return directory


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleContract, match="GPT2LMHeadModel; the torch engine serves LlamaForCausalLM"):
        load_model(changed(tmp_path, architectures=["GPT2LMHeadModel"]), SETTINGS)


def test_rope_that_depends_on_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(IncompatibleContract, match="dynamic"):
        load_model(changed(tmp_path, rope_parameters=rope), SETTINGS)


def test_weights_that_do_not_load_are_refused(tmp_path: Path) -> None:
    directory = changed(tmp_path)
    (directory / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(IncompatibleContract, match="does not load"):
        load_model(directory, SETTINGS)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleContract, match=r"lacks weights.*layers\.2\."):
        load_model(changed(tmp_path, num_hidden_layers=3), SETTINGS)


def test_a_directory_without_a_model_is_a_setting_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"config\.json"):
        load_model(tmp_path, SETTINGS)
    with pytest.raises(InvalidSettings, match="nowhere"):
        load_model(tiny_model(), EngineSettings(device="nowhere"))
    with pytest.raises(IncompatibleLayout, match="multiple"):
        load_model(tiny_model(), EngineSettings(block_size=16, chunk_tokens=24))


def test_the_fingerprint_is_of_the_bytes_and_not_of_the_place(tmp_path: Path) -> None:
    here, there = load_model(tiny_model(), SETTINGS), load_model(changed(tmp_path, rope_theta=1.0), SETTINGS)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model(), copy)
    assert load_model(copy, SETTINGS).fingerprint == here.fingerprint
    assert there.fingerprint.weights != here.fingerprint.weights
    assert here.fingerprint.tokenizer == xxhash.xxh3_128_hexdigest((copy / "tokenizer.json").read_bytes())


def test_tiny_models_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    assert load_model(tmp_path, SETTINGS).fingerprint == load_model(tiny_model(), SETTINGS).fingerprint
