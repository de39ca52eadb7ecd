"""Redis or Valkey: handoff records, leases, load counters, who is alive, and what steers the pools.

``connect`` opens a client; ``RedisLedger``, ``RedisRegistry``, ``RedisBoard`` and ``RedisTierObjects`` take one.
What the scripts do stands at the head of each ``.lua`` file; the state rules they execute stand in ``pdq.core.handoff``
only.
"""

from pdq.adapters.redis.board import RedisBoard
from pdq.adapters.redis.ledger import RedisLedger
from pdq.adapters.redis.link import connect
from pdq.adapters.redis.registry import RedisRegistry
from pdq.adapters.redis.tier_objects import RedisTierObjects

__all__ = ["RedisBoard", "RedisLedger", "RedisRegistry", "RedisTierObjects", "connect"]
