"""What sink and source say to each other over an endpoint, besides the bytes themselves.

The sink posts its receives first and then *wants* them: pieces of one chunk, each under a tag of its own. The source
answers every ``Want`` with exactly its pieces and one ``Answer``. When there is nothing to send (unknown, released,
cancelled) the pieces are empty messages: so each posted receive ends, and once all have ended nothing can land any more.
"""

import struct
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from pdq.core.errors import InvalidMessage

VERSION: Final = 1
MAX_MESSAGE: Final = 64 * 1024
MAX_PIECES: Final = 512
TAGS: Final = 1 << 64

_FRAME: Final = struct.Struct("=4sHxxI")
"""Magic, version, length of the message that follows."""
_MAGIC: Final = b"pdqk"

Count = Annotated[int, Meta(ge=0)]


class Status(StrEnum):
    OK = "ok"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"


class Want(Struct, frozen=True, array_like=True, tag="want"):
    """Send me this range of a chunk, in pieces of these lengths, under tags counted up from ``first_tag``."""

    number: int
    model: str
    request_id: str
    epoch: int
    secret: str
    chunk: Count
    offset: Count
    pieces: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=MAX_PIECES)]
    first_tag: Annotated[int, Meta(ge=0)]


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop waiting for these: answer them now."""

    numbers: tuple[int, ...]


class Answer(Struct, frozen=True, array_like=True, tag="answer"):
    """The pieces of a ``Want`` are sent, or empty messages in their place. ``digest`` is the whole chunk's hash."""

    number: int
    status: Status
    digest: str = ""


Message = Want | Cancel | Answer
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def tag_of(first: int, piece: int) -> int:
    return (first + piece) % TAGS


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    if _FRAME.size + len(body) > MAX_MESSAGE:
        raise InvalidMessage(f"a transport message of {len(body)} bytes is over the limit of {MAX_MESSAGE}")
    return _FRAME.pack(_MAGIC, VERSION, len(body)) + body


def blank(buffer: bytearray) -> None:
    """Forget the last message's frame: a shorter one that follows must not pass for it."""
    buffer[: _FRAME.size] = bytes(_FRAME.size)


def decode(buffer: bytearray) -> Message:
    """The message at the start of a receive buffer.

    Raises:
        InvalidMessage: junk, another version, or not a message of this protocol.
    """
    magic, version, length = _FRAME.unpack_from(buffer)
    if magic != _MAGIC or version != VERSION:
        raise InvalidMessage(f"not a pdq transport message of version {VERSION}: {bytes(buffer[:8]).hex()}")
    if _FRAME.size + length > len(buffer):
        raise InvalidMessage(f"a transport message claims {length} bytes")
    try:
        return _decoder.decode(memoryview(buffer)[_FRAME.size : _FRAME.size + length])
    except msgspec.MsgspecError as error:
        raise InvalidMessage(f"a transport message does not parse: {error}") from error
