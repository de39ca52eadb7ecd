"""The uniform number behind one sampled token: a pure function of (seed, output position).

A counter-based generator has no state to hand over. The prefill worker, the decode worker, and a worker that resumes
after a crash all draw the same number at the same position, whatever else is in their batch. Anyone can recompute it:
XXH3-64 over the sixteen bytes ``seed`` (signed) and ``position`` (unsigned), both little-endian 64-bit; the top 53 bits
of the digest are the numerator over 2**53.
"""

import struct
from typing import Final

import xxhash

_KEY: Final = struct.Struct("<qQ")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at output ``position`` (0 is the first) of a request with this ``seed``."""
    bits: int = xxhash.xxh3_64_intdigest(_KEY.pack(seed, position)) >> 11
    return bits / float(1 << 53)
