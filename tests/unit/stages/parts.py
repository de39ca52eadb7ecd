"""A worker's parts, all of them in memory, and records in the states that tests start from."""

from dataclasses import dataclass, field
from typing import Any

from pdq.adapters.memory.bus import MemoryBus
from pdq.adapters.memory.ledger import MemoryLedger
from pdq.adapters.memory.queue import MemoryQueue
from pdq.adapters.memory.registry import MemoryRegistry
from pdq.adapters.tokenizer import load_tokenizer
from pdq.core.handoff import Event
from pdq.core.lease import RecordKey
from pdq.core.messages import OutputAnswer, Policy, TokenEntry, TokenFrame
from pdq.core.settings import AdmissionSettings, LeaseSettings, QueueSettings, Settings
from pdq.ports import Changes, Locator, NewRecord, Record
from pdq.stages.census import Census
from pdq.stages.gate import Gate
from pdq.stages.outbox import Outbox
from pdq.stages.parts import Parts

MODEL = "sim"
REPLY_TO = "pdq.tokens.test"
TTL_MS = 1_000


@dataclass
class World:
    now_ms: int = 1_000_000
    limits: AdmissionSettings = field(default_factory=AdmissionSettings)
    got: list[TokenEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(LeaseSettings(), clock=lambda: self.now_ms)
        self.queue = MemoryQueue(QueueSettings())
        self.bus = MemoryBus()
        self.registry = MemoryRegistry()
        settings = Settings(admission=self.limits)
        self.parts = Parts(
            worker="decode-1",
            model=MODEL,
            settings=settings,
            jobs=self.queue,
            bus=self.bus,
            outbox=Outbox(self.bus, "decode-1"),
            ledger=self.ledger,
            gate=Gate(self.ledger, Census(self.registry), settings),
            tokenizer=load_tokenizer(None),
            transports={},
            max_context=1000,
        )

    async def listen(self, answer: OutputAnswer | None = None) -> None:
        """Be the requester: keep what comes, and say ``answer`` when asked."""

        def on_frame(frame: TokenFrame) -> None:
            self.got += frame.entries

        await self.bus.receive(REPLY_TO, on_frame, (lambda _: answer) if answer is not None else None)

    async def queued(self, policy: Policy | None = None, max_new_tokens: int = 20) -> RecordKey:
        key = RecordKey(MODEL, f"r{self.now_ms}")
        await self.ledger.enqueue(NewRecord(key, REPLY_TO, 10, max_new_tokens, 60_000, "secret", policy or Policy()))
        return key

    async def ready(self) -> Record:
        """Held by its source, wanted by nobody yet."""
        key = await self.queued()
        begun = await self.ledger.acquire(key, Event.BEGIN, "prefill-0", 10 * TTL_MS)
        return await self.ledger.apply(key, Event.READY, epoch=begun.epoch)

    async def fetched(
        self, policy: Policy | None = None, *, outlives: bool = False, first_token: int | None = 65
    ) -> Record:
        """Held by the sink ``decode-0``; the source's KV as the policy says, and in a tier if it ``outlives``."""
        key = await self.queued(policy)
        begun = await self.ledger.acquire(key, Event.BEGIN, "prefill-0", 10 * TTL_MS)
        changes: dict[str, Any] = {"first_token": first_token, "emitted": 1 if first_token is not None else 0}
        locators = (Locator("memory", {}, begun.epoch, outlives),)
        await self.ledger.apply(key, Event.READY, epoch=begun.epoch, changes=Changes(locators=locators, **changes))
        claimed = await self.ledger.acquire(key, Event.CLAIM, "decode-0", TTL_MS)
        return await self.ledger.apply(
            key, Event.FETCHED, epoch=claimed.epoch, changes=Changes(streaming=True, digest="d")
        )

    async def read(self, key: RecordKey) -> Record:
        record = await self.ledger.read(key)
        assert record is not None
        return record
