"""How the pools are steered: what operators have asked for, what the autoscaler decided last, and who carries it out."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from pdq.core.load import Rates
from pdq.core.pacing import Cause
from pdq.ports.workers import Pool


class PoolReport(Struct, frozen=True):
    """One pool in one decision."""

    replicas: int | None
    """Workers that were asked for when it was decided; None: that could not be read."""
    ready: int | None
    decided: int | None
    """None: nothing was decided, because nothing was known."""
    cause: Cause
    why: str
    inputs: Mapping[str, float] = {}
    """The figures from which it was decided."""
    manual: int | None = None
    """What an operator has fixed."""
    changed_ms: int | None = None
    """When the size was last changed, Unix milliseconds."""
    trouble: str = ""
    """Why the decision could not be carried out."""


class ScalingReport(Struct, frozen=True):
    """One decision for both pools, as it was carried out."""

    at_ms: int
    by: str
    """The process that decided."""
    actuator: str
    """``local``, ``kubernetes`` or ``advise``: who carries it out."""
    automatic: bool
    """False: sizes follow operators only."""
    period_ms: int
    pools: Mapping[Pool, PoolReport]
    rates: Rates = Rates()


class Board(Protocol):
    """What operators ask for and what came of it, per model. It outlives every process that reads or writes it."""

    async def fix(self, model: str, pool: Pool, replicas: int | None) -> None:
        """An operator wants so many workers, whatever the load; None: no longer."""

    async def fixed(self, model: str) -> Mapping[Pool, int]: ...

    async def send_away(self, model: str, worker: str) -> None:
        """An operator drains this worker, and nobody is to start it again."""

    async def call_back(self, model: str, worker: str) -> bool:
        """It may serve again. False: it was not sent away."""

    async def away(self, model: str) -> frozenset[str]:
        """The workers that operators have sent away and not called back."""

    async def lead(self, model: str, who: str, ttl_ms: int) -> bool:
        """Is ``who`` the one that decides for this model, now and for ``ttl_ms``? At most one is."""

    async def resign(self, model: str, who: str) -> None:
        """Let another one lead at once. Nothing happens if ``who`` does not."""

    async def report(self, model: str, report: ScalingReport, ttl_ms: int) -> None: ...

    async def last_report(self, model: str) -> ScalingReport | None:
        """None: nobody has reported for ``ttl_ms``."""


class Actuator(Protocol):
    """Starts and stops the workers of one model."""

    @property
    def name(self) -> str: ...

    async def sizes(self) -> Mapping[Pool, int]:
        """Workers that shall run, in each pool: those that still start included, those that were told to leave not.

        Raises:
            Unavailable: it cannot be asked now.
        """

    async def scale(self, pool: Pool, replicas: int, leaving_first: Sequence[str]) -> None:
        """From now on ``replicas`` workers shall run. Those that have to go drain; ``leaving_first`` are all workers of
        the pool, in the order in which they are missed least.

        Raises:
            Unavailable: it cannot be done now.
        """

    async def trouble(self, pool: Pool) -> str:
        """Why workers that shall run do not run, in words; empty if nothing is known to be wrong.

        Raises:
            Unavailable: it cannot be asked now.
        """
