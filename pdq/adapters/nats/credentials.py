"""A credentials file of NATS, as ``nsc`` writes it: a user's JWT, and the seed of the key to which that was made out.

nats-py reads the file at every connect, so a renewed one is taken up by itself. But it looks for ever for a JWT that is not
in it, and stops reconnecting over a seed that is none; so whoever connects checks the file first, each time.
"""

import base64
import re
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from pdq.core.errors import InvalidSettings

_BLOCK: Final = re.compile(rb"^-+BEGIN (NATS USER JWT|USER NKEY SEED)-+\n(\S+)\n", re.MULTILINE)


class _Claims(Struct, frozen=True):
    sub: str
    """The public key of the user."""


def check(file: str) -> None:
    """Raises:
    InvalidSettings: nobody could connect with this file; or the package that signs with it is missing.
    """
    try:
        import nkeys  # here: it loads a library that nobody else needs
    except ImportError as error:
        raise InvalidSettings("PDQ_NATS_CREDENTIALS needs the package nkeys: `pip install 'nats-py[nkeys]'`") from error
    where = f"PDQ_NATS_CREDENTIALS={file!r}"
    try:
        found = dict(_BLOCK.findall(Path(file).read_bytes()))
    except OSError as error:
        raise InvalidSettings(f"{where} cannot be read: {error.strerror}") from error
    if len(found) < 2:
        raise InvalidSettings(f"{where} does not hold a user's JWT and NKey seed, as `nsc generate creds` writes them")
    try:
        payload = found[b"NATS USER JWT"].split(b".")[1]
        user = msgspec.json.decode(base64.urlsafe_b64decode(payload + b"=="), type=_Claims).sub
        key = nkeys.from_seed(bytearray(found[b"USER NKEY SEED"])).public_key.decode()
    # Without the cause: it may quote what it could not understand.
    except (IndexError, ValueError, msgspec.MsgspecError, nkeys.NkeysError):
        raise InvalidSettings(f"{where}: its JWT or its seed is damaged; write the file anew") from None
    if key != user:
        raise InvalidSettings(f"{where}: its seed is of {key}, its JWT of {user}; both must be of one user")
