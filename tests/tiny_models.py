"""Small random models of every family that the torch engine serves, with a real tokenizer, made from a fixed seed.

``tiny_model("llama")`` makes (once per process and machine user, in the temporary directory) a checkpoint of two layers
that loads like any other. The same seed gives the same bytes, so two processes that make one have the same model.
"""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

REVISION: Final = 1
"""Raise it when what is made changes."""
VOCABULARY: Final = 512
SPECIAL: Final = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
EOS: Final = (2, 4)
WINDOW: Final = 24
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: Final[dict[str, tuple[Any, Any, dict[str, Any]]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def tiny_model(family: str = "llama") -> Path:
    """The directory of the tiny model of ``family``, made if it is not there yet."""
    base = Path(tempfile.gettempdir()) / f"pdq-tiny-models-{os.getuid()}"
    directory = base / f"{family}-{REVISION}"
    if not directory.exists():
        base.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=base))
        make_tiny_model(family, made)
        try:
            made.rename(directory)
        except OSError:  # another process was first; its bytes are the same
            shutil.rmtree(made)
    return directory


def make_tiny_model(family: str, directory: Path) -> None:
    config_class, model_class, special = FAMILIES[family]
    _tokenizer().save_pretrained(directory)
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(list(FAMILIES).index(family))
        model = model_class(config_class(**{**COMMON, **special}))
        with torch.no_grad():  # biases start at zero: a forgotten one would not be noticed
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
    finally:
        torch.random.set_rng_state(state)
    logging.disable_progress_bar()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=list(EOS), pad_token_id=0)
    model.save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    tokenizer.train([str(library / name) for name in ("argparse.py", "heapq.py", "textwrap.py")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>", model_max_length=1024
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
