"""What all stages of one worker share: its identity, its ports, and how it speaks to requesters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdq.core.settings import Settings
from pdq.ports import HandoffLedger, JobQueue, KvTransport, TokenBus, Tokenizer
from pdq.stages.account import Account
from pdq.stages.busy import Busy
from pdq.stages.gate import Gate
from pdq.stages.outbox import Outbox


@dataclass(frozen=True, kw_only=True)
class Parts:
    worker: str
    model: str
    settings: Settings
    jobs: JobQueue
    bus: TokenBus
    outbox: Outbox
    ledger: HandoffLedger
    gate: Gate
    tokenizer: Tokenizer
    transports: Mapping[str, KvTransport]
    max_context: int
    account: Account = field(default_factory=Account)
    busy: Busy = field(default_factory=Busy)
    """With prefill, in whichever pool."""
