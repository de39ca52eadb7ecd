"""NATS: the job queues (JetStream), the token and control bus (core NATS), and the one connection both share."""

from pdq.adapters.nats.bus import NatsBus
from pdq.adapters.nats.connection import Connection, connect
from pdq.adapters.nats.queue import NatsQueue

__all__ = ["Connection", "NatsBus", "NatsQueue", "connect"]
