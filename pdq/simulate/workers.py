"""Pretended workers: what each computes and holds, and when it came and went."""

import math
from dataclasses import dataclass, field

from pdq.simulate.profile import SMALL_BATCH, Profile
from pdq.simulate.traces import Arrival


@dataclass(slots=True, eq=False)
class Request:
    """One request of the trace, and what became of it."""

    arrival: Arrival
    reserved_tokens: int
    source: "PrefillWorker | None" = None
    """Who holds its KV until it is fetched."""
    first_s: float | None = None
    last_s: float | None = None
    refused: str = ""

    @property
    def prompt_tokens(self) -> int:
        return self.arrival.prompt_tokens

    @property
    def ttft_s(self) -> float:
        return math.inf if self.first_s is None else self.first_s - self.arrival.at_s

    @property
    def itl_s(self) -> float:
        """Mean time from token to token, the handoff before the second one included."""
        if self.last_s is None or self.first_s is None:
            return math.inf
        return (self.last_s - self.first_s) / max(1, self.arrival.output_tokens - 1)


@dataclass(slots=True, eq=False)
class Worker:
    profile: Profile
    asked_s: float
    ready_s: float
    draining: bool = False
    gone_s: float | None = None

    def alive_s(self, until_s: float) -> float:
        """From the order to start it until it has gone, at most until then."""
        gone_s = until_s if self.gone_s is None else min(self.gone_s, until_s)
        return max(0.0, gone_s - self.asked_s)


@dataclass(slots=True, eq=False)
class PrefillWorker(Worker):
    """Computes one prompt at a time, and holds what it has computed until somebody has fetched it."""

    name: str = ""
    computing: Request | None = None
    held: int = 0
    held_tokens: int = 0
    """Including those being computed."""
    tokens: int = 0
    busy_s: float = 0.0

    @property
    def state_held(self) -> int:
        return self.held_tokens

    @property
    def empty(self) -> bool:
        return self.computing is None and not self.held


@dataclass(slots=True, eq=False)
class DecodeWorker(Worker):
    """A continuous batch: every step gives every sequence one token; who comes or goes does so between two steps.

    While nobody does, steps need not happen one by one: how long so many of them take has a closed form.
    """

    running: int = 0
    transferring: int = 0
    reserved: int = 0
    joining: list[Request] = field(default_factory=list)
    ends: list[tuple[int, int, Request]] = field(default_factory=list)
    """Heap of (the step that gives the last token, tie-break, request)."""
    steps: int = 0
    """Done when the batch last changed, which was at ``since_s``."""
    since_s: float = 0.0
    context: int = 0
    """Tokens of the batch's sequences then."""
    planned: int = 0
    """Steps from then on after which something happens to the batch; 0: nothing is planned."""
    plan: int = 0
    """Tells the current plan from those that an earlier one has replaced."""

    @property
    def state_held(self) -> int:
        return self.reserved

    @property
    def empty(self) -> bool:
        return not self.reserved

    @property
    def sequences(self) -> int:
        return self.running + self.transferring + len(self.joining)

    def elapsed_s(self, steps: int) -> float:
        """How long so many steps take from ``since_s`` on: every one has ``running`` more tokens of context."""
        first_ms, more_ms = self._step_ms()
        return steps * (first_ms + more_ms * (steps - 1) / 2) / 1_000

    def steps_until(self, time_s: float) -> int:
        """Steps after which the first boundary at or after this time comes."""
        first_ms, more_ms = self._step_ms()
        elapsed_ms, half = (time_s - self.since_s) * 1_000, more_ms / 2
        linear = first_ms - half
        # The positive root of half * n^2 + linear * n = elapsed, in the form that does not divide by a small `half`.
        steps = 2 * elapsed_ms / (linear + math.sqrt(linear * linear + 4 * half * elapsed_ms))
        return max(1, math.ceil(steps - 1e-9))

    def _step_ms(self) -> tuple[float, float]:
        """(time of the next step, by how much each takes longer than the one before)."""
        a, b, c = self.profile.decode_small if self.running <= SMALL_BATCH else self.profile.decode_large
        return a + b * self.context + c * self.running, b * self.running
