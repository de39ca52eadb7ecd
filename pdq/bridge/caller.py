"""Who asks, and on what terms: the API key, the headers of pdq's own, and what the body says of the same things.

Where keys are configured, the key is the tenant, and the class up to which it may ask. Where none are, whoever asks says
so. Keys are kept and looked up as digests under a secret of this process, so that neither the time of a lookup nor a
dump of this table tells anything of a key.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from pdq.bridge import openai, refusal
from pdq.core.errors import InvalidRequest, InvalidSettings
from pdq.core.messages import Priority
from pdq.core.names import HEADER_PRIORITY, HEADER_TENANT, HEADER_TIMEOUT_MS, PRIORITIES
from pdq.core.settings import HandoffSettings, SecretLines

MIN_KEY_CHARS: Final = 16
TENANT_CHARS: Final = 256

Headers = Mapping[bytes, bytes]

_AUTHORIZATION: Final = b"authorization"


class Key(NamedTuple):
    """What a key stands for."""

    tenant: str
    best: Priority
    """The class up to which it may ask, and what it gets if it does not ask."""


class Keys:
    """The API keys of ``PDQ_BRIDGE_API_KEYS``: a line each, ``KEY TENANT [CLASS]``; ``#`` begins a comment line.

    Raises:
        InvalidSettings: a line is not like that. Its number is named, its text is not.
    """

    def __init__(self, lines: SecretLines) -> None:
        self._salt = secrets.token_bytes(32)
        self._keys: dict[bytes, Key] = {}
        for number, line in enumerate(lines.reveal().splitlines(), 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                self._add(words, f"PDQ_BRIDGE_API_KEYS, line {number}")
        if lines and not self._keys:
            raise InvalidSettings("PDQ_BRIDGE_API_KEYS is set and has no key in it: unset it to serve everybody")

    def _add(self, words: list[str], where: str) -> None:
        if len(words) not in (2, 3):
            raise InvalidSettings(f"{where} has {len(words)} words, and must be KEY TENANT [CLASS]")
        key, tenant, best = (*words, PRIORITIES[0])[:3]
        if len(key) < MIN_KEY_CHARS or not key.isascii():
            raise InvalidSettings(f"{where}: a key must have at least {MIN_KEY_CHARS} characters, all of them ASCII")
        if best not in PRIORITIES:
            raise InvalidSettings(f"{where}: the class must be one of {', '.join(PRIORITIES)}")
        digest = self._digest(key.encode())
        if digest in self._keys:
            raise InvalidSettings(f"{where}: this key stands there twice")
        self._keys[digest] = Key(tenant, cast(Priority, best))

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, headers: Headers) -> Key | None:
        """The caller's key; None if none are configured.

        Raises:
            InvalidApiKey: there is none in the headers, or nobody knows it.
        """
        if not self._keys:
            return None
        scheme, _, key = headers.get(_AUTHORIZATION, b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise refusal.InvalidApiKey("send an API key in the header Authorization, as 'Bearer KEY'")
        known = self._keys.get(self._digest(key.strip()))
        if known is None:
            raise refusal.InvalidApiKey("this API key is not known here")
        return known

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()


class Terms(NamedTuple):
    """How a request is to be treated."""

    tenant: str
    priority: Priority
    timeout_ms: int


def terms(headers: Headers, request: openai.Request, key: Key | None, handoff: HandoffSettings) -> Terms:
    """What key, headers and body say together.

    Raises:
        InvalidRequest: a header has no valid value, or contradicts the body or the key.
        ClassNotAllowed: the key does not allow the class that is asked for.
    """
    return Terms(_tenant(headers, request, key), _priority(headers, request, key), _timeout_ms(headers, handoff))


def _tenant(headers: Headers, request: openai.Request, key: Key | None) -> str:
    """The header wins over the body's ``user``, which many clients set for other ends."""
    tenant = _text(headers, HEADER_TENANT)
    if tenant is not None and not (0 < len(tenant) <= TENANT_CHARS and tenant.isprintable()):
        raise InvalidRequest(
            f"{HEADER_TENANT} must have 1 to {TENANT_CHARS} characters, all of them printable", field=HEADER_TENANT
        )
    if key is not None:
        if tenant not in (None, key.tenant):
            raise InvalidRequest(
                f"{HEADER_TENANT} is {tenant!r}, but the API key is of another tenant: leave it out",
                field=HEADER_TENANT,
            )
        return key.tenant
    return (request.user or "") if tenant is None else tenant


def _priority(headers: Headers, request: openai.Request, key: Key | None) -> Priority:
    asked = _text(headers, HEADER_PRIORITY)
    if asked is not None and asked not in PRIORITIES:
        raise InvalidRequest(
            f"{HEADER_PRIORITY} is {asked[:40]!r}, and must be one of {', '.join(PRIORITIES)}", field=HEADER_PRIORITY
        )
    if asked is not None and request.priority not in (None, asked):
        raise InvalidRequest(
            f"{HEADER_PRIORITY} is {asked!r} and the body's priority {request.priority!r}: they mean the same, send one",
            field=HEADER_PRIORITY,
        )
    best = key.best if key is not None else "interactive"
    priority = request.priority or cast("Priority | None", asked) or best
    if PRIORITIES.index(priority) < PRIORITIES.index(best):
        raise refusal.ClassNotAllowed(
            f"this API key is for {best} requests, and may not ask for {priority}",
            field=HEADER_PRIORITY if request.priority is None else "priority",
        )
    return priority


def _timeout_ms(headers: Headers, handoff: HandoffSettings) -> int:
    asked = _text(headers, HEADER_TIMEOUT_MS)
    if asked is None:
        return handoff.default_timeout_ms
    digits = asked.isascii() and asked.isdigit() and len(asked) <= 12
    if not digits or not 1 <= int(asked) <= handoff.max_timeout_ms:
        raise InvalidRequest(
            f"{HEADER_TIMEOUT_MS} is {asked[:40]!r}, and must be a whole number of milliseconds from 1 to "
            f"{handoff.max_timeout_ms}",
            field=HEADER_TIMEOUT_MS,
        )
    return int(asked)


def _text(headers: Headers, name: str) -> str | None:
    value = headers.get(name.encode())
    return None if value is None else value.decode("latin-1")
