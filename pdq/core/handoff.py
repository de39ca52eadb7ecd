"""The life of one request's handoff: states, events, and the only copy of the rules between them.

A ledger (``pdq.ports.HandoffLedger``) keeps one record per request and changes it only by *events*. ``TRANSITIONS``
says which event leads from which state to which; ``RULES`` says who may cause the event and what it does to the two
leases. Ledgers are generic executors of these two tables: the Redis one passes the rows to its Lua script as
arguments, so that there is no second copy to fall out of step.

    queued ──begin──▶ prefilling ──ready──▶ ready ──fetched──▶ fetched ──finish──▶ done
                        │  ▲ claim            │ ▲ claim, yield    │  │
                        │  └──┐               │ └──────yield──────┘  │
                        ├─adopt (aggregated) ─┼──────────────────▶   │
                        └──────────── requeue ┴──────────────────────┘──▶ queued

    fail, cancel, expire: from every state above to failed, cancelled, expired.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple


class State(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    READY = "ready"
    FETCHED = "fetched"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


class Event(StrEnum):
    BEGIN = "begin"
    """A prefill worker takes the request: next attempt, source lease."""
    CLAIM = "claim"
    """A decode worker takes it: sink lease. From ``prefilling`` on (overlap) or from ``ready`` on (late binding)."""
    READY = "ready"
    """The whole prompt is computed and offered; digest and locators are written with it."""
    ADOPT = "adopt"
    """Aggregated: the source becomes the sink, nothing is transferred."""
    FETCHED = "fetched"
    """Every byte has landed at the sink and the digest agrees."""
    FINISH = "finish"
    """The last token is out."""
    REQUEUE = "requeue"
    """The KV is lost (or never came to be): prefill again."""
    YIELD = "yield"
    """The sink is lost or gives up, the KV is still there: another sink may claim."""
    FAIL = "fail"
    """An error that nothing repairs, or that the request's policy does not let anyone repair."""
    CANCEL = "cancel"
    """Whoever asked does not want the output any more."""
    EXPIRE = "expire"
    """The deadline has passed."""


TERMINAL: Final = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED})
LIVE: Final = frozenset(State) - TERMINAL


class Side(StrEnum):
    SOURCE = "source"
    SINK = "sink"


class Author(StrEnum):
    """Who may cause an event. A *holder* proves it with the epoch of its lease."""

    CLAIMANT = "claimant"
    """Whoever comes, if the lease in question is free or has run out."""
    SOURCE = "source"
    """The holder of the source lease."""
    SINK = "sink"
    """The holder of the sink lease."""
    HOLDER_OF_STATE = "holder_of_state"
    """The holder of the lease on which the state rests (``RESTS_ON``), or anyone once that lease has run out."""
    ANYONE = "anyone"
    """No lease needed; if the author names an epoch, it must be a current one."""
    CLOCK = "clock"
    """Anyone, once the record's deadline has passed on the ledger's clock."""


class Rule(NamedTuple):
    """What one event demands and does, whatever the state it starts from."""

    author: Author
    claims: Side | None = None
    """This lease is given to the author, with the record's epoch raised by one."""
    releases: tuple[Side, ...] = ()
    """These leases are cleared."""
    moves_source_to_sink: bool = False
    voids_kv: bool = False
    """What the record says of the KV (``KV_FIELDS``) is of an attempt that is over, and is cleared."""

    @property
    def counts_attempt(self) -> bool:
        """An attempt is one claim of the source's side."""
        return self.claims is Side.SOURCE


KV_FIELDS: Final = ("layout", "locators", "digest")

RULES: Final[Mapping[Event, Rule]] = MappingProxyType(
    {
        Event.BEGIN: Rule(Author.CLAIMANT, claims=Side.SOURCE, releases=(Side.SINK,), voids_kv=True),
        Event.CLAIM: Rule(Author.CLAIMANT, claims=Side.SINK),
        Event.READY: Rule(Author.SOURCE),
        Event.ADOPT: Rule(Author.SOURCE, moves_source_to_sink=True),
        # Releases the source too, unless the record's policy retains the KV longer: see `releases_on`.
        Event.FETCHED: Rule(Author.SINK, releases=(Side.SOURCE,)),
        Event.FINISH: Rule(Author.HOLDER_OF_STATE, releases=(Side.SOURCE, Side.SINK)),
        Event.REQUEUE: Rule(Author.HOLDER_OF_STATE, releases=(Side.SOURCE, Side.SINK), voids_kv=True),
        Event.YIELD: Rule(Author.HOLDER_OF_STATE, releases=(Side.SINK,)),
        Event.FAIL: Rule(Author.ANYONE, releases=(Side.SOURCE, Side.SINK)),
        Event.CANCEL: Rule(Author.ANYONE, releases=(Side.SOURCE, Side.SINK)),
        Event.EXPIRE: Rule(Author.CLOCK, releases=(Side.SOURCE, Side.SINK)),
    }
)

RESTS_ON: Final[Mapping[State, Side]] = MappingProxyType(
    {State.PREFILLING: Side.SOURCE, State.READY: Side.SINK, State.FETCHED: Side.SINK}
)
"""The lease whose end puts the state in question. In ``ready`` that is the sink's: the KV itself may outlive the
source in a tier, and only a sink that tried every locator knows that it is gone."""

TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.QUEUED, Event.BEGIN): State.PREFILLING,
        # The holder is lost and its job was delivered again before anyone noticed: one step instead of two.
        (State.PREFILLING, Event.BEGIN): State.PREFILLING,
        (State.PREFILLING, Event.CLAIM): State.PREFILLING,
        (State.PREFILLING, Event.READY): State.READY,
        (State.PREFILLING, Event.ADOPT): State.FETCHED,
        # The first token already ends the request, and the prefill side owns it.
        (State.PREFILLING, Event.FINISH): State.DONE,
        (State.PREFILLING, Event.REQUEUE): State.QUEUED,
        (State.READY, Event.CLAIM): State.READY,
        (State.READY, Event.FETCHED): State.FETCHED,
        (State.READY, Event.YIELD): State.READY,
        (State.READY, Event.REQUEUE): State.QUEUED,
        (State.FETCHED, Event.FINISH): State.DONE,
        (State.FETCHED, Event.YIELD): State.READY,
        (State.FETCHED, Event.REQUEUE): State.QUEUED,
        **{(state, Event.FAIL): State.FAILED for state in LIVE},
        **{(state, Event.CANCEL): State.CANCELLED for state in LIVE},
        **{(state, Event.EXPIRE): State.EXPIRED for state in LIVE},
    }
)


class Retain(StrEnum):
    """How long the source (or a tier) keeps the KV."""

    FETCHED = "fetched"
    FIRST_TOKEN = "first_token"
    DONE = "done"


def predecessors(event: Event) -> dict[State, State]:
    """The states in which ``event`` is legal, each with the state it leads to."""
    return {start: end for (start, what), end in TRANSITIONS.items() if what is event}


def releases_on(event: Event, retain: Retain) -> tuple[Side, ...]:
    """The leases that ``event`` clears in a record whose policy is ``retain``."""
    if event is Event.FETCHED and retain is not Retain.FETCHED:
        return ()
    return RULES[event].releases
