"""Checkpoints: what is accepted, how it is loaded, and which hash names it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import xxhash

from pdq.core.errors import IncompatibleContract, InvalidSettings
from pdq.core.layout import Fingerprint, KvLayout
from pdq.core.settings import EngineSettings
from workers.torch import attention
from workers.torch.linear import pack_linear_layers
from workers.torch.pool import TORCH_DTYPES

hugging_face: Any = transformers
"""The same package: its annotations cover half of it, and call the rest untyped."""

ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WHOLE_BATCH_ROPE: Final = ("dynamic", "longrope")
"""RoPE scalings that change all positions once the longest sequence passes a bound: cached keys would turn wrong."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: Any
    """A ``transformers`` causal language model, in evaluation mode, with paged attention."""
    device: torch.device
    layout: KvLayout
    fingerprint: Fingerprint
    max_context: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_model(directory: Path, settings: EngineSettings) -> LoadedModel:
    """Load the Hugging Face checkpoint in ``directory`` (blocking, seconds).

    Raises:
        IncompatibleContract: not a model that this engine can serve.
        InvalidSettings: no such directory, or no such device.
    """
    described = _config(directory)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, described, device)
    hugging_face.utils.logging.disable_progress_bar()
    try:
        module, report = hugging_face.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=attention.NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # files of strangers: several libraries read them, each with errors of its own
        raise IncompatibleContract(f"the checkpoint in {directory} does not load: {error}") from error
    if report["missing_keys"] or report["mismatched_keys"]:  # they would be filled with random numbers
        raise IncompatibleContract(
            f"the checkpoint in {directory} lacks weights, or has some of another shape: "
            f"{sorted(report['missing_keys'])[:5]} {sorted(report['mismatched_keys'])[:5]}"
        )
    module = module.eval().requires_grad_(False).to(device)
    if device.type == "cpu":
        pack_linear_layers(module)
    config: Any = module.config
    heads = config.num_attention_heads
    layout = KvLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        block_size=settings.block_size,
        chunk_tokens=settings.chunk_tokens,
    )
    fingerprint = Fingerprint(
        model=config.architectures[0],
        weights=_hash(_weight_files(directory)),
        tokenizer=_hash([directory / "tokenizer.json"]),
        dtype=dtype,
    )
    return LoadedModel(
        module=module,
        device=device,
        layout=layout,
        fingerprint=fingerprint,
        max_context=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids(module.generation_config, config),
    )


def eos_token_ids(*configs: Any) -> frozenset[int]:
    """Every end-of-sequence id that the generation configuration names, else the model's own configuration."""
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()


def _config(directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        raise InvalidSettings(f"{directory} holds no config.json: give the directory of a Hugging Face checkpoint")
    try:
        named = json.loads((directory / "config.json").read_bytes()).get("architectures") or ["nothing"]
    except (ValueError, AttributeError) as error:
        raise IncompatibleContract(f"{directory / 'config.json'} is not a model configuration: {error}") from error
    if named[0] not in ARCHITECTURES:
        raise IncompatibleContract(f"{directory} is a {named[0]}; the torch engine serves {', '.join(ARCHITECTURES)}")
    try:
        config = hugging_face.AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # as above
        raise IncompatibleContract(f"{directory / 'config.json'} is not a model configuration: {error}") from error
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in WHOLE_BATCH_ROPE:
        raise IncompatibleContract(f"{directory} uses RoPE scaling {rope!r}, which cannot be cached per token")
    return config


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidSettings(f"device {name!r} cannot be used: {error}") from error
    return device


def _dtype(name: str, config: Any, device: torch.device) -> str:
    if name != "auto":
        return name
    own = str(config.dtype or "float32").removeprefix("torch.")
    return own if device.type != "cpu" and own in TORCH_DTYPES else "float32"


def _weight_files(directory: Path) -> list[Path]:
    weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    return [directory / "config.json", *weights]


def _hash(files: Iterable[Path]) -> str:
    """XXH3-128 over all bytes of ``files``, hex: gigabytes per second, so nothing is sampled or skipped."""
    state = xxhash.xxh3_128()
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                while piece := file.read(1 << 24):
                    state.update(piece)
    return state.hexdigest()
