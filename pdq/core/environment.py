"""Settings as they come from the environment: ``PDQ_<GROUP>_<NAME>``, so ``lease.ttl_ms`` is ``PDQ_LEASE_TTL_MS``.

A value that does not parse, or a ``PDQ_`` variable that nobody knows, is an error that names it: a typing error in a
manifest must not become a silent default.

What may hold a password can be read from a file instead, as Kubernetes mounts secrets: ``PDQ_REDIS_PASSWORD_FILE`` names
the file whose text is ``PDQ_REDIS_PASSWORD``. No message shows such a value.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq.core.errors import InvalidSettings
from pdq.core.settings import Secret, SecretLines, Settings, Transports, Url, Weights

# Variables that are not settings of a program but tell commands and tools where things are.
PLACES: Final[Mapping[str, str]] = {
    "PDQ_STATE_DIR": "Where ``pdq up`` keeps its state and commands look for a running system; ``.pdq`` if not set.",
    "PDQ_BRIDGE_URL": "Where the OpenAI API of a running system is.",
    "PDQ_CACHE_DIR": "Where converted model checkpoints are kept.",
    "PDQ_LOG_LEVEL": "``debug``, ``info`` (if not set), ``warning`` or ``error``.",
    "PDQ_FAILPOINTS": "Faults to make happen, and leave to set more by message. `pdq failpoints` lists the places.",
    "PDQ_LOG_FORMAT": "``json``: one JSON object a line instead of text.",
}


def variables() -> Iterator[tuple[str, str, str, Any]]:
    """(environment variable, group, field, default) of every setting."""
    for group in msgspec.structs.fields(Settings):
        for field in msgspec.structs.fields(group.type):
            default = {} if field.default is msgspec.NODEFAULT else field.default
            yield f"PDQ_{group.name}_{field.name}".upper(), group.name, field.name, default


def from_file(kind: Any) -> bool:
    """May a setting of this type be read from a file that ``<variable>_FILE`` names?"""
    return kind in (Secret, SecretLines, Url)


def variables_of(group: str) -> list[str]:
    """All variables that set something in ``group``, those that name a file included."""
    types = {known.name: known.type for known in msgspec.structs.fields(Settings)}
    found = []
    for field in msgspec.structs.fields(types[group]):
        variable = f"PDQ_{group}_{field.name}".upper()
        found += [variable, f"{variable}_FILE"] if from_file(field.type) else [variable]
    return found


def load(environ: Mapping[str, str], read: Callable[[Path], str] = Path.read_text) -> Settings:
    """Settings from environment variables; ``read`` gets the text of a file that one of them names.

    Raises:
        InvalidSettings: a value does not parse, a file cannot be read, or a ``PDQ_`` variable is unknown.
    """
    known = {variable: (group, field) for variable, group, field, _ in variables()}
    names = {*PLACES, *(variable for group in Settings.__struct_fields__ for variable in variables_of(group))}
    unknown = [name for name in environ if name.startswith("PDQ_") and name not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; `pdq settings` lists them"
        raise InvalidSettings(f"unknown setting {unknown[0]}{hint}")
    values: dict[str, dict[str, Any]] = {}
    for variable, (group, field) in known.items():
        text = _text(variable, environ, read)
        if text is not None:
            values.setdefault(group, {})[field] = _parse(variable, text, group, field)
    return msgspec.convert(values, Settings)


def _text(variable: str, environ: Mapping[str, str], read: Callable[[Path], str]) -> str | None:
    path = environ.get(f"{variable}_FILE")
    if path is None:
        return environ.get(variable)
    if variable in environ:
        raise InvalidSettings(f"{variable} and {variable}_FILE are both set: unset one of them")
    try:
        if text := read(Path(path)).rstrip("\r\n"):
            return text
        # As good as not set, which may leave a door open.
        raise InvalidSettings(f"{variable}_FILE={path!r} is empty")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidSettings(f"{variable}_FILE={path!r} cannot be read: {why}") from None


def _parse(variable: str, text: str, group: str, field: str) -> Any:
    group_type = next(f.type for f in msgspec.structs.fields(Settings) if f.name == group)
    kind = next(f.type for f in msgspec.structs.fields(group_type) if f.name == field)
    if kind is SecretLines:
        return SecretLines(text)
    if kind is Secret:
        if not text.isprintable():
            raise InvalidSettings(f"{variable} has a line break or another character that cannot be printed")
        return Secret(text)
    raw: Any = text.strip()
    if kind in (Transports, Weights):
        raw = [part.strip() for part in text.split(",") if part.strip()]
    if kind == Weights:
        raw = dict(part.rpartition("=")[::2] for part in raw)
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidSettings(f"{variable}={text!r} is not valid: {error}") from error
