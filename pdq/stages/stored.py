"""Jobs as they lie in their queues, delivered or not, and the requests that they are for."""

from typing import NamedTuple

import msgspec

from pdq.core.ids import derive_request_id
from pdq.ports import JobQueue, Queue, StoredJob


class _Prefill(msgspec.Struct):
    request_id: str | None = None


class _Decode(msgspec.Struct):
    job: _Prefill


class Named(NamedTuple):
    request_id: str
    by_job: bool
    """The job says so: whoever published it has written the record first. A producer's job gets its record, under this
    id, from the first worker that takes it."""


def request_of(queue: Queue, model: str, job: StoredJob, salt: str) -> Named | None:
    """None: it cannot be read, and whoever is delivered it rejects it."""
    try:
        if queue is Queue.DECODE:
            name = msgspec.json.decode(job.data, type=_Decode).job.request_id
        else:
            name = msgspec.json.decode(job.data, type=_Prefill).request_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if name is not None:
        return Named(name, by_job=True)
    derived = derive_request_id(job.published_ms, salt, queue.value, model, job.sequence)
    return Named(derived, by_job=False)


async def requests_with_jobs(jobs: JobQueue, model: str, salt: str, limit: int) -> set[str] | None:
    """The requests for which a queue has a job. None: one has more than ``limit``.

    The decode queue comes first: a request on its way back to prefill has its next job published before its last one is
    acknowledged, and so is seen in one of the two.
    """
    found: set[str] = set()
    for queue in (Queue.DECODE, Queue.PREFILL, Queue.LOCAL):
        stored = await jobs.stored(queue, model, limit)
        if stored is None:
            return None
        named = (request_of(queue, model, job, salt) for job in stored)
        found |= {name.request_id for name in named if name is not None}
    return found
