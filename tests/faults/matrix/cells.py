"""The table: which part is hurt, how, and at which step of a request's life.

A step is a failpoint. For ``kill`` and ``stop`` the failpoint does it to its own process; for all else it holds the
request at that step for a moment, and the fault is done from outside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["prefill", "decode", "bridge", "reaper", "nats", "valkey"]
Fault = Literal["kill", "stop", "restart", "cut", "slow", "error", "drop", "corrupt"]
PLANTS: Final[Mapping[str, Mapping[str, str]]] = {
    "direct": {},
    # What a dead writer left in the tier ends by its TTL, and by nothing else.
    "tier": {"PDQ_TRANSPORT_WRITE_THROUGH": "redis", "PDQ_TRANSPORT_TIER_TTL_S": "8"},
    "overlap": {"PDQ_HANDOFF_ORDER": "on_start"},
    "whole": {"PDQ_HANDOFF_MODE": "auto", "PDQ_HANDOFF_AUTO_LOCAL_TOKENS": "30000"},
}
"""Kinds of plants: KV from worker to worker, late; with a copy in the Redis tier; fetched while it is computed; and
requests over HTTP served whole by one worker."""
FAULTS: Final[tuple[Fault, ...]] = ("kill", "stop", "restart", "cut", "slow", "error", "drop", "corrupt")

PREFILL_STEPS: Final = (
    "prefill.delivered",
    "prefill.begun",
    "prefill.chunk",
    "prefill.chunk+2",
    "prefill.offered+3",
    "prefill.before_ready",
    "prefill.after_ready",
    "prefill.after_first_token",
    "prefill.after_announce",
    "prefill.before_ack",
)
DECODE_STEPS: Final = (
    "decode.delivered",
    "decode.claimed",
    "decode.reserved",
    "decode.fetching",
    "transport.chunk+1",
    "decode.landed",
    "decode.before_fetched",
    "decode.after_fetched",
    "decode.joined",
    "decode.step",
    "decode.step+12",
    "finish.before",
    "finish.after",
    "decode.before_ack",
)
BRIDGE_STEPS: Final = ("bridge.before_enqueue", "bridge.before_publish", "bridge.after_publish")

OUTSIDE: Final[dict[Fault, dict[Role, tuple[str, ...]]]] = {
    "restart": {
        "prefill": ("prefill.chunk+2", "prefill.after_ready"),
        "decode": ("decode.fetching", "decode.step+12"),
        "bridge": ("decode.step+12",),
        "reaper": ("prefill.chunk+2",),
        "nats": ("prefill.chunk+2", "prefill.after_ready", "decode.claimed", "decode.step+12", "finish.before"),
        "valkey": ("prefill.chunk+2", "prefill.after_ready", "decode.claimed", "decode.step+12", "finish.before"),
    },
    "cut": {
        "prefill": ("prefill.chunk+2", "prefill.before_ready", "prefill.after_ready", "prefill.after_announce"),
        "decode": ("decode.claimed", "decode.before_fetched", "decode.step+12", "finish.before"),
        "bridge": ("decode.step+12",),
        "reaper": ("prefill.chunk+2",),
        "nats": ("prefill.after_ready", "decode.step+12"),
        "valkey": ("prefill.after_ready", "decode.step+12"),
    },
    "slow": {
        "prefill": ("prefill.begun",),
        "decode": ("decode.claimed",),
        "bridge": ("bridge.before_enqueue",),
        "nats": ("prefill.begun",),
        "valkey": ("prefill.begun",),
    },
    "stop": {
        "bridge": ("decode.step+12",),
        "reaper": ("prefill.chunk+2",),
        "nats": ("prefill.chunk+2", "decode.step+12"),
        "valkey": ("prefill.chunk+2", "decode.step+12"),
    },
    "kill": {
        "bridge": ("prefill.chunk+2", "decode.step+12"),
    },
}


SOFT: Final[tuple[tuple[Role, Fault, str, str], ...]] = (
    ("prefill", "error", "ledger.change", "error*1"),
    ("prefill", "error", "ledger.changed", "error*1"),
    ("prefill", "error", "ledger.changed+1", "error*1"),
    ("prefill", "error", "queue.publish", "error*1"),
    ("prefill", "error", "queue.published", "error*1"),
    ("prefill", "error", "prefill.chunk+2", "error:engine_failed*1"),
    ("prefill", "error", "keepalive.renew", "error*6"),
    ("prefill", "drop", "bus.send", "drop*1"),
    ("prefill", "drop", "prefill.before_ack", "drop*1"),
    ("prefill", "drop", "keepalive.in_progress", "drop*6"),
    ("prefill", "corrupt", "prefill.offering+2", "corrupt*1"),
    ("decode", "error", "ledger.change", "error*1"),
    ("decode", "error", "ledger.changed", "error*1"),
    ("decode", "error", "ledger.changed+1", "error*1"),
    ("decode", "error", "ledger.changed+2", "error*1"),
    ("decode", "error", "decode.fetching", "error:peer_lost*1"),
    ("decode", "error", "decode.joined", "error:engine_failed*1"),
    ("decode", "error", "decode.step+12", "error:engine_failed*1"),
    ("decode", "error", "keepalive.renew", "error*6"),
    ("decode", "drop", "bus.send+3", "drop%40"),
    ("decode", "drop", "finish.after", "drop*1"),
    ("decode", "drop", "decode.release", "drop*4"),
    ("decode", "drop", "decode.before_ack", "drop*1"),
    ("decode", "drop", "keepalive.in_progress", "drop*6"),
    ("decode", "corrupt", "transport.chunk+1", "corrupt*1"),
    ("decode", "corrupt", "decode.landed", "corrupt*1"),
    ("bridge", "error", "queue.publish", "error*1"),
    ("bridge", "error", "queue.published", "error*1"),
)
"""Failures that a process meets instead of dying: what is armed, after the step."""
OTHER_PLANTS: Final[tuple[tuple[str, Role, Fault, tuple[str, ...]], ...]] = (
    ("tier", "prefill", "kill", ("prefill.after_ready", "prefill.after_announce")),
    ("tier", "prefill", "stop", ("prefill.after_announce",)),
    ("tier", "decode", "kill", ("transport.chunk+1", "decode.step+12")),
    ("tier", "decode", "stop", ("decode.before_fetched",)),
    ("overlap", "prefill", "kill", ("prefill.begun", "prefill.chunk+2", "prefill.before_ready", "prefill.after_ready")),
    ("overlap", "prefill", "stop", ("prefill.chunk+2",)),
    ("overlap", "decode", "kill", ("decode.claimed", "transport.chunk+1", "decode.landed", "decode.joined")),
    ("overlap", "decode", "stop", ("transport.chunk+1",)),
    ("whole", "decode", "kill", ("local.delivered", "local.before_adopt", "local.after_adopt", "decode.step+12")),
    ("whole", "decode", "kill", ("finish.after", "local.before_ack")),
    ("whole", "decode", "stop", ("local.before_adopt", "local.after_adopt", "decode.step+12")),
)


@dataclass(frozen=True)
class Cell:
    role: Role
    fault: Fault
    step: str
    inside: bool
    """The process does it to itself."""
    plant: str = "direct"
    action: str = ""
    """What is armed, if it is not the fault itself."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.fault}-{self.step}" + (f"-{self.plant}" if self.plant != "direct" else "")

    @property
    def point(self) -> str:
        return self.step.partition("+")[0]

    @property
    def skip(self) -> str:
        """As it is written in ``PDQ_FAILPOINTS``."""
        return self.step[len(self.point) :]

    @property
    def ends(self) -> frozenset[str]:
        """How requests may end. Only who loses the bridge, or comes while nobody can be admitted, is not served."""
        if self.role == "bridge" and self.fault in ("kill", "restart"):
            return frozenset({"done", "broken", "refused", "cancelled", "failed"})
        if self.role in ("nats", "valkey") or self.role == "bridge":
            return frozenset({"done", "refused"})
        return frozenset({"done"})


def table() -> list[Cell]:
    """All cells, by fault."""
    stepwise: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("prefill", PREFILL_STEPS),
        ("decode", DECODE_STEPS),
        ("bridge", BRIDGE_STEPS),
        ("reaper", ("reaper.visit",)),
    )
    faults: tuple[Fault, ...] = ("kill", "stop")
    cells = [
        Cell(role, fault, step, inside=True)
        for fault in faults
        for role, steps in stepwise
        for step in steps
        if (role, fault) != ("bridge", "stop")
    ]
    cells += [
        Cell(role, fault, step, inside=False)
        for fault, roles in OUTSIDE.items()
        for role, steps in roles.items()
        for step in steps
    ]
    cells += [Cell(role, fault, step, True, action=action) for role, fault, step, action in SOFT]
    cells.sort(key=lambda cell: FAULTS.index(cell.fault))
    return cells + [
        Cell(role, fault, step, inside=True, plant=plant)
        for plant, role, fault, steps in OTHER_PLANTS
        for step in steps
    ]
