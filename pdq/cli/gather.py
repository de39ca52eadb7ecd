"""Reading what ``pdq.core.audit`` compares: ledger, tiers, queues, and every worker's own account."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from pdq.cli.find import System
from pdq.core.audit import Finding, JobSeen, KvObject, ModelSeen, RecordSeen, View, WorkerSeen, audit, confirmed
from pdq.core.handoff import Retain
from pdq.core.lease import RecordKey
from pdq.core.settings import LeaseSettings
from pdq.ports import KvStore, Queue, Record, StoredJob
from pdq.stages.stored import request_of

SECOND_LOOK_S: Final = 0.5
ANSWER_S: Final = 2.0
"""A worker that has not answered by then does not: its heartbeats are as late as its answer."""
SLACK_MS: Final = 1_000
JOBS_LIMIT: Final = 5_000
"""Jobs of one queue and model that are read one by one."""


async def audited(system: System, stores: Sequence[KvStore], lease: LeaseSettings) -> tuple[View, list[Finding]]:
    """The last reading, and what this one and an earlier one agree on to be wrong."""
    view = await reading(system, stores, lease)
    found = audit(view)
    if found:
        await asyncio.sleep(SECOND_LOOK_S)
        view = await reading(system, stores, lease)
        found = confirmed(found, audit(view))
    return view, found


async def reading(system: System, stores: Sequence[KvStore], lease: LeaseSettings) -> View:
    """Everything as it is now, one thing after the other."""
    registered = await system.registry.workers()
    known = sorted({info.model for info in registered} | set(await system.ledger.models()))
    models = [await _model(system, model) for model in known]
    holders = {each.worker for model in models for record in model.live for _, each in record.leases}
    workers = await _workers(system, [info.worker for info in registered], holders)
    objects = [item for store in stores for item in await store.objects()]
    mentioned = _mentioned(models, workers, objects)
    ended = [record for record in await system.ledger.read_many(mentioned) if record is not None]
    return View(
        now_ms=await system.ledger.now_ms(),
        grace_ms=2 * lease.reaper_period_ms + SLACK_MS,
        models=tuple(models),
        ended=tuple(map(_record, ended)),
        workers=tuple(workers),
        objects=tuple(objects),
    )


async def _model(system: System, model: str) -> ModelSeen:
    live = tuple(_record(record) for record in await system.ledger.live(model))
    salt = await system.ledger.salt()
    jobs: list[JobSeen] | None = []
    for queue in Queue:
        stored = await system.queue.stored(queue, model, JOBS_LIMIT)
        jobs = None if stored is None or jobs is None else jobs + _jobs(queue, model, stored, salt)
    return ModelSeen(
        model=model,
        live=live,
        books=await system.ledger.books(model),
        jobs=None if jobs is None else tuple(jobs),
        dead_letters=await system.queue.dead(model),
    )


async def _workers(system: System, registered: Sequence[str], holders: Iterable[str]) -> list[WorkerSeen]:
    """Who is registered, and who holds a lease: a worker that misses from the registry may be alive all the same."""
    everyone = sorted({*registered, *holders})
    accounts = await asyncio.gather(*(system.bus.ask_account(worker, ANSWER_S) for worker in everyone))
    return [WorkerSeen(name, name in registered, account) for name, account in zip(everyone, accounts, strict=True)]


def _mentioned(
    models: Sequence[ModelSeen], workers: Sequence[WorkerSeen], objects: Sequence[KvObject]
) -> list[RecordKey]:
    """Requests that somebody holds something for, or has a job for, and that are not live."""
    keys = {RecordKey(item.model, item.request_id) for item in objects if item.request_id}
    for worker in workers:
        if worker.account is not None:
            keys |= {RecordKey(worker.account.model, holding.request_id) for holding in worker.account.holdings}
    keys |= {RecordKey(model.model, job.request_id) for model in models for job in model.jobs or ()}
    return sorted(keys - {RecordKey(record.model, record.request_id) for model in models for record in model.live})


def _record(record: Record) -> RecordSeen:
    return RecordSeen(
        model=record.key.model,
        request_id=record.key.request_id,
        state=record.state,
        epoch=record.epoch,
        created_ms=record.created_ms,
        deadline_ms=record.deadline_ms,
        ended_ms=record.ended_ms,
        source=record.source,
        sink=record.sink,
        kv_epochs=tuple(locator.epoch for locator in record.locators),
        tier_epochs=tuple(locator.epoch for locator in record.locators if locator.outlives),
        retain=Retain(record.policy.retain),
    )


def _jobs(queue: Queue, model: str, stored: Iterable[StoredJob], salt: str) -> list[JobSeen]:
    named = ((job, request_of(queue, model, job, salt)) for job in stored)
    return [
        JobSeen(queue.value, job.sequence, job.published_ms, name.request_id, known=name.by_job)
        for job, name in named
        if name is not None
    ]
