"""May these two workers hand requests to each other? Asked when a worker registers, not found out by a hanging client."""

from collections.abc import Iterable

from pdq.core.errors import IncompatibleContract, IncompatibleLayout
from pdq.core.layout import map_layout
from pdq.core.settings import HandoffSettings
from pdq.ports import BackendContract, Pool, WorkerInfo


def check(ours: WorkerInfo, others: Iterable[WorkerInfo], settings: HandoffSettings) -> None:
    """Compare with every live worker of the other pool of the same model.

    Raises:
        IncompatibleContract: with which worker we cannot pair, and why.
    """
    if settings.order not in ours.contract.order:
        raise IncompatibleContract(
            f"engine {ours.contract.name} does not support PDQ_HANDOFF_ORDER={settings.order}; "
            f"it supports {', '.join(ours.contract.order)}"
        )
    for other in others:
        if other.model == ours.model and other.pool is not ours.pool:
            source, sink = (ours, other) if ours.pool is Pool.PREFILL else (other, ours)
            if reason := _obstacle(source.contract, sink.contract):
                raise IncompatibleContract(
                    f"{ours.worker} cannot pair with {other.worker} ({other.pool}, pid {other.pid} on {other.host}): "
                    f"{reason}"
                )


def _obstacle(source: BackendContract, sink: BackendContract) -> str:
    if source.fingerprint != sink.fingerprint:
        return f"other weights, tokenizer or dtype ({source.fingerprint} against {sink.fingerprint})"
    if source.first_token != sink.first_token:
        return f"the first token belongs to {source.first_token} for one and to {sink.first_token} for the other"
    if source.direction != sink.direction:
        return f"one side expects to {source.direction}, the other to {sink.direction}"
    try:
        map_layout(source.layout, sink.layout)
    except IncompatibleLayout as error:
        return str(error)
    return ""
