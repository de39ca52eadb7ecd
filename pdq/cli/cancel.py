"""``pdq cancel``: end one request, wherever it is, as if its client had gone away."""

from typing import Annotated, Final

import msgspec
import typer
from msgspec import Struct

from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, StateDir, System, talk
from pdq.core.errors import RecordNotFound, RequestCancelled
from pdq.core.handoff import State
from pdq.core.settings import Settings
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox

NAME: Final = "cli"


class Outcome(Struct, frozen=True):
    request_id: str
    cancelled: bool
    """By this command; False: it had ended already."""
    before: State
    state: State
    holders: tuple[str, ...]
    """Who held a lease of it, and was told."""
    emitted: int
    """Tokens that had been sent, as far as the record says."""
    ended_code: str


async def end(system: System, request_id: str) -> Outcome:
    """Cancel it, tell all workers, and send its terminal event.

    Raises:
        RecordNotFound: no such request, or it ended long ago.
    """
    before = await system.ledger.find(request_id)
    if before is None:
        raise RecordNotFound(
            f"no request {request_id!r}: never accepted, or it ended too long ago (PDQ_LEASE_ENDED_TTL_S)"
        )
    endings = Endings(system.ledger, system.bus, Outbox(system.bus, NAME), NAME)
    won = await endings.unhappy(before.key, RequestCancelled("cancelled by an operator"))
    after = await system.ledger.read(before.key) or before
    return Outcome(
        request_id=request_id,
        cancelled=won,
        before=before.state,
        state=after.state,
        holders=tuple(lease.worker for lease in (before.source, before.sink) if lease is not None),
        emitted=after.emitted,
        ended_code=after.ended_code,
    )


def cancel(
    request_id: Annotated[str, typer.Argument(help="As in `pdq leases`, or the header x-request-id.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Cancel a request. Its requester gets the terminal event, and whoever holds something of it lets go.

    Exit status 0 if this command has ended it, 1 if it had ended already, 4 if there is no such request.
    """

    async def work(system: System, settings: Settings) -> Outcome:
        return await end(system, request_id)

    outcome = talk(state_dir, work)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcome)))
    elif outcome.cancelled:
        told = f"; told {' and '.join(outcome.holders)}" if outcome.holders else "; nobody held anything of it"
        typer.echo(f"cancelled, was {outcome.before} with {outcome.emitted} tokens sent{told}")
    else:
        typer.echo(f"nothing to cancel: it is {outcome.state} ({outcome.ended_code}) already")
    if not outcome.cancelled:
        raise typer.Exit(1)
