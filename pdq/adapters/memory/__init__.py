"""Every port in one process, without servers: verified fakes, held to the same conformance suites as the real adapters."""

from pdq.adapters.memory.board import MemoryBoard
from pdq.adapters.memory.ledger import MemoryLedger
from pdq.adapters.memory.registry import MemoryRegistry

__all__ = ["MemoryBoard", "MemoryLedger", "MemoryRegistry"]
