"""Who is alive, on Redis: one string with a TTL per worker, and a set of names as the index.

The index may name workers whose string has run out: whoever lists them takes those off. A worker that announces itself
in the very moment between is missing from lists until its next announcement, a third of a TTL later.
"""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from pdq.adapters.redis.link import Link, client_for
from pdq.core import names
from pdq.core.settings import RedisSettings
from pdq.ports import WorkerInfo

_encode = msgspec.json.Encoder().encode
_worker_info = msgspec.json.Decoder(WorkerInfo)


class RedisRegistry:
    """``WorkerRegistry`` on one Redis or Valkey. ``close`` closes the client only if the registry was given a URL."""

    def __init__(self, client_or_url: Redis | str) -> None:
        self._owned = client_for(RedisSettings(url=client_or_url)) if isinstance(client_or_url, str) else None
        self._link = Link(self._owned or client_or_url)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._link.close()
        if self._owned is not None:
            await self._owned.aclose()

    async def announce(self, info: WorkerInfo, ttl_ms: int) -> None:
        said = _encode(info)
        await self._link.many(
            [
                ("SET", names.worker_key(info.worker), said, "PX", ttl_ms),
                ("SET", names.last_worker_key(info.model), said),
                ("SADD", names.WORKERS_KEY, info.worker),
            ]
        )

    async def withdraw(self, worker: str) -> None:
        await self._link.many([("DEL", names.worker_key(worker)), ("SREM", names.WORKERS_KEY, worker)])

    async def workers(self, model: str | None = None) -> Sequence[WorkerInfo]:
        listed = sorted(name.decode() for name in await self._link.call("SMEMBERS", names.WORKERS_KEY))
        stored = await self._link.many([("GET", names.worker_key(worker)) for worker in listed])
        if gone := [worker for worker, said in zip(listed, stored, strict=True) if said is None]:
            await self._link.call("SREM", names.WORKERS_KEY, *gone)
        alive = [_worker_info.decode(said) for said in stored if said is not None]
        return [info for info in alive if model is None or info.model == model]

    async def last(self, model: str) -> WorkerInfo | None:
        said = await self._link.call("GET", names.last_worker_key(model))
        return None if said is None else _worker_info.decode(said)
