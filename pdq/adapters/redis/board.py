"""What operators ask for and what the autoscaler decided, on Redis: plain values that ``valkey-cli`` shows as they are."""

from collections.abc import Mapping

import msgspec
from redis.asyncio import Redis

from pdq.adapters.redis.link import Link, Script, client_for, source
from pdq.core import names
from pdq.core.errors import Unavailable
from pdq.core.settings import RedisSettings
from pdq.ports import Pool, ScalingReport

_encode = msgspec.json.Encoder().encode
_report = msgspec.json.Decoder(ScalingReport)


class RedisBoard:
    """``Board`` on one Redis or Valkey. ``close`` closes the client only if the board was given a URL."""

    def __init__(self, client_or_url: Redis | str) -> None:
        self._owned = client_for(RedisSettings(url=client_or_url)) if isinstance(client_or_url, str) else None
        self._link = Link(self._owned or client_or_url)  # type: ignore[arg-type]
        self._lead = Script(source("lead"))
        self._resign = Script(source("resign"))

    async def close(self) -> None:
        await self._link.close()
        if self._owned is not None:
            await self._owned.aclose()

    async def fix(self, model: str, pool: Pool, replicas: int | None) -> None:
        key = names.board_key(model, "fixed")
        if replicas is None:
            await self._link.call("HDEL", key, pool.value)
        else:
            await self._link.call("HSET", key, pool.value, replicas)

    async def fixed(self, model: str) -> Mapping[Pool, int]:
        key = names.board_key(model, "fixed")
        flat = await self._link.call("HGETALL", key)
        try:
            return {Pool(name.decode()): int(size) for name, size in zip(flat[::2], flat[1::2], strict=True)}
        except ValueError as error:  # written by hand; whoever decides leaves the pools as they are
            raise Unavailable(f"{key} holds no pool's size ({error}): set or release it with `pdq scale`") from error

    async def send_away(self, model: str, worker: str) -> None:
        await self._link.call("SADD", names.board_key(model, "away"), worker)

    async def call_back(self, model: str, worker: str) -> bool:
        return bool(await self._link.call("SREM", names.board_key(model, "away"), worker))

    async def away(self, model: str) -> frozenset[str]:
        listed = await self._link.call("SMEMBERS", names.board_key(model, "away"))
        return frozenset(name.decode() for name in listed)

    async def lead(self, model: str, who: str, ttl_ms: int) -> bool:
        return bool(await self._link.run(self._lead, [names.board_key(model, "leader")], who, ttl_ms))

    async def resign(self, model: str, who: str) -> None:
        await self._link.run(self._resign, [names.board_key(model, "leader")], who)

    async def report(self, model: str, report: ScalingReport, ttl_ms: int) -> None:
        await self._link.call("SET", names.board_key(model, "report"), _encode(report), "PX", ttl_ms)

    async def last_report(self, model: str) -> ScalingReport | None:
        stored = await self._link.call("GET", names.board_key(model, "report"))
        return None if stored is None else _report.decode(stored)
