"""The Redis tier as an operator sees it: whose KV lies there, how much, and for how long still.

``RedisTier`` writes and reads the bytes; this looks at all of them from outside, whoever wrote them.
"""

from collections.abc import Sequence
from typing import Final

from redis.asyncio import Redis

from pdq.adapters.redis.link import Link, literally
from pdq.core import names
from pdq.core.audit import KvObject

HEAD: Final = "head"


class RedisTierObjects:
    """``KvStore`` on one Redis or Valkey: one object for each attempt that has keys there."""

    name = "redis"

    def __init__(self, client: Redis) -> None:
        self._link = Link(client)

    async def close(self) -> None:
        await self._link.close()

    async def objects(self) -> Sequence[KvObject]:
        found: dict[str, KvObject] = {}
        for keys in await self._pages(names.TIER_KEYS):
            facts = await self._link.many(
                command
                for key in keys
                for command in (("PTTL", key), ("EXISTS", key) if _part(key) == HEAD else ("STRLEN", key))
            )
            for key, ttl_ms, size in zip(keys, facts[::2], facts[1::2], strict=True):
                if ttl_ms != _GONE:
                    seen = _object(key, None if ttl_ms == _FOREVER else ttl_ms, 0 if _part(key) == HEAD else size)
                    found[seen.name] = _both(found[seen.name], seen) if seen.name in found else seen
        return list(found.values())

    async def discard(self, found: Sequence[KvObject]) -> int:
        gone = 0
        for item in found:
            for keys in await self._pages(literally(item.name) + ":*"):
                gone += bool(await self._link.call("UNLINK", *keys))
        return gone

    async def _pages(self, pattern: str) -> list[list[str]]:
        return [[key.decode() for key in page] async for page in self._link.scan(pattern)]


_GONE: Final = -2
_FOREVER: Final = -1


def _part(key: str) -> str:
    return key.rpartition(":")[2]


def _object(key: str, ttl_ms: int | None, size: int) -> KvObject:
    model, request_id, epoch = names.of_tier_key(key)
    return KvObject("redis", key.rpartition(":")[0], size, model, request_id, epoch, ttl_ms)


def _both(one: KvObject, other: KvObject) -> KvObject:
    """Two keys of one object: it is gone when the last of them is."""
    ttl_ms = None if one.ttl_ms is None or other.ttl_ms is None else max(one.ttl_ms, other.ttl_ms)
    return KvObject(one.tier, one.name, one.bytes + other.bytes, one.model, one.request_id, one.epoch, ttl_ms)
