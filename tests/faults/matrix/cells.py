"""The table: which part is hurt, how, and at which step of a request's life.

A step is a failpoint. For ``kill`` and ``stop`` the failpoint does it to its own process; for all else it holds the
request at that step for a moment, and the fault is done from outside.
"""

from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["prefill", "decode", "bridge", "reaper", "nats", "valkey"]
Fault = Literal["kill", "stop", "restart", "cut", "slow"]
FAULTS: Final[tuple[Fault, ...]] = ("kill", "stop", "restart", "cut", "slow")

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


@dataclass(frozen=True)
class Cell:
    role: Role
    fault: Fault
    step: str
    inside: bool
    """The process does it to itself."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.fault}-{self.step}"

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
    inside = [
        Cell(role, fault, step, inside=True)
        for fault in ("kill", "stop")
        for role, steps in (("prefill", PREFILL_STEPS), ("decode", DECODE_STEPS), ("bridge", BRIDGE_STEPS))
        for step in steps
        if (role, fault) != ("bridge", "stop")
    ]
    inside += [Cell("reaper", fault, "reaper.visit", inside=True) for fault in ("kill", "stop")]
    outside = [
        Cell(role, fault, step, inside=False)
        for fault, roles in OUTSIDE.items()
        for role, steps in roles.items()
        for step in steps
    ]
    return sorted(inside + outside, key=lambda cell: FAULTS.index(cell.fault))
