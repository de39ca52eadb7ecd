"""Identifiers. Request ids are UUIDv7 (RFC 9562, section 5.7): they sort by time and are minted here only."""

import hashlib
import secrets
import uuid


def mint_request_id(unix_ms: int) -> str:
    """A fresh UUIDv7 for a request that was accepted at ``unix_ms``."""
    return _uuid7(unix_ms, secrets.randbits(74))


def derive_request_id(unix_ms: int, salt: str, queue: str, model: str, sequence: int) -> str:
    """The UUIDv7 of a job that its producer published without an id, and the broker stored at ``unix_ms``.

    It is a function of the message's place in its stream and of the ledger's ``salt``, so every redelivery of one message
    maps to one record, and no producer can choose an id, or guess another's.
    """
    digest = hashlib.sha256(f"{salt}\x00{queue}\x00{model}\x00{sequence}".encode()).digest()
    return _uuid7(unix_ms, int.from_bytes(digest[:10], "big") & ((1 << 74) - 1))


def minted_ms(request_id: str) -> int:
    """The Unix milliseconds in an id of ours."""
    return uuid.UUID(request_id).int >> 80


def mint_secret() -> str:
    """128 random bits, hex: what a transport asks for before it serves a handoff's bytes."""
    return secrets.token_hex(16)


def mint_worker_id(pool: str) -> str:
    """A name for one process of a pool, unique for its lifetime and safe in subjects and keys."""
    return f"{pool}-{secrets.token_hex(4)}"


def _uuid7(unix_ms: int, random_bits: int) -> str:
    rand_a, rand_b = random_bits >> 62, random_bits & ((1 << 62) - 1)
    value = (unix_ms & ((1 << 48) - 1)) << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b
    return str(uuid.UUID(int=value))
