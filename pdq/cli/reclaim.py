"""Carrying out what an audit's findings call for, by the means that the system's own programs have: events in the ledger,
a reaper's round, messages to workers, the deletion of what nobody will ever fetch. No record is edited."""

import contextlib
from collections.abc import Sequence
from typing import Final

from pdq.cli.find import System
from pdq.core import names
from pdq.core.audit import Finding, Remedy
from pdq.core.errors import JobLost, LedgerRefusal
from pdq.core.lease import RecordKey
from pdq.core.messages import Cancel, Control, Release
from pdq.core.settings import LeaseSettings
from pdq.ports import KvStore
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox
from pdq.stages.reaper import Reaper

NAME: Final = "audit"


class Reclaimer:
    def __init__(self, system: System, stores: Sequence[KvStore], lease: LeaseSettings) -> None:
        self._system = system
        self._stores = {store.name: store for store in stores}
        self._endings = Endings(system.ledger, system.bus, Outbox(system.bus, NAME), NAME)
        self._reaper = Reaper(system.ledger, system.queue, system.bus, self._endings, lease)

    async def carry_out(self, findings: Sequence[Finding]) -> list[Finding]:
        """Do what can be done; the findings for which something was."""
        return [finding for finding in findings if await self._one(finding)]

    async def _one(self, finding: Finding) -> bool:
        key = RecordKey(finding.model, finding.request_id)
        match finding.remedy:
            case Remedy.WAIT | Remedy.RESTART:
                return False
            case Remedy.REAP:
                with contextlib.suppress(LedgerRefusal):  # no record: off the list it is
                    await self._system.ledger.reap(key)
            case Remedy.ROUND:
                await self._reaper.round()
            case Remedy.FAIL:
                return await self._endings.unhappy(key, JobLost("no queue has a job for it"))
            case Remedy.RECOUNT:
                await self._system.ledger.books(finding.model, mend=True)
            case Remedy.CANCEL:
                await self._tell(finding.worker, Cancel((finding.request_id,)))
            case Remedy.RELEASE:
                await self._tell(finding.worker, Release((finding.request_id,)))
            case Remedy.DISCARD:
                return sum([await self._stores[item.tier].discard([item]) for item in finding.objects]) > 0
        return True

    async def _tell(self, worker: str, message: Control) -> None:
        await self._system.bus.control(names.worker_subject(worker), message)
