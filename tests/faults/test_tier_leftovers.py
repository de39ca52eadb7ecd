"""What a cancelled write leaves in the Redis tier once its handoff is released: nothing."""

import asyncio
import random

from redis.asyncio import Redis

from pdq.adapters.processes import Server
from pdq.adapters.redis_tier import RedisTier
from pdq.core import names
from pdq.core.lease import RecordKey
from pdq.core.settings import RedisSettings, TransportSettings
from pdq.ports import ChunkPlan, HandoffRef


async def test_a_write_that_is_cut_off_does_not_land_after_its_keys_were_deleted(valkey: Server, model: str) -> None:
    tier = RedisTier(RedisSettings(url=valkey.url), TransportSettings())
    choose, chunk = random.Random(11), bytes(4 << 20)
    for number in range(60):
        ref = HandoffRef(RecordKey(model, f"r{number}"), 1, "secret")
        offering = asyncio.create_task(tier.offer(ref, ChunkPlan((len(chunk),)), 0, [chunk]))
        await asyncio.sleep(choose.uniform(0, 0.01))
        offering.cancel()
        await asyncio.wait({offering})
        await tier.release(ref)
    client = Redis.from_url(valkey.url)
    # Whatever the server still had to read, it has read before it answers to a connection made after.
    assert not [key async for key in client.scan_iter(names.tier_key(model, "*", 1, "*"))]
    await client.aclose()
    await tier.close()
