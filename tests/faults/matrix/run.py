"""One cell: arm, send, hurt, wait, and look whether anything came of it."""

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pdq.core import names
from pdq.core.ids import mint_request_id, mint_secret
from pdq.core.lease import RecordKey
from pdq.ports import NewRecord
from tests.e2e.audits import until_clean
from tests.faults.matrix.cells import Cell
from tests.faults.matrix.plant import DECODE, LEASE_S, MODEL, PREFILL, REAPER_S, Plant, until
from tests.faults.matrix.proxy import Network
from tests.faults.matrix.traffic import RAW, VOLLEY, Asked, Outcome, Producer, Tap, faults_of, over_http

HELD_AT_STEP_MS: Final = 700
"""How long a request waits at its step for a fault that is done from outside."""
SLOW_PLACE: Final = {"prefill": "prefill.begun", "decode": "decode.joined"}
LONGER_THAN_A_LEASE_S: Final = LEASE_S + 1.0
LAG_S: Final = 0.04
SLOW_S: Final = 3.0
VOLLEYS: Final = 8
TIMEOUT_MS: Final = 45_000
SETTLE_S: Final = LEASE_S + REAPER_S + 5.0
"""A lease and a reaper period are what is promised; the rest is for looking, twice where something is found."""

Texts = Mapping[Asked, str]


@dataclass
class Row:
    """What is told of one cell."""

    cell: Cell
    ends: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    hurt: str = ""
    """The request that was at the step, if one was."""
    attempts_of_hurt: int = 0
    seconds: float = 0.0
    settled_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """As a line of the table."""
        cell = self.cell
        step = cell.step if cell.plant == "direct" else f"{cell.step} ({cell.plant})"
        ends = ", ".join(f"{number} {how}" for how, number in sorted(self.ends.items()))
        seconds = f"{self.settled_s:.1f} | {self.seconds:.1f}"
        verdict = "; ".join(self.wrong)[:120].replace("\n", " ").replace("|", "/") or "ok"
        return f"| {cell.role} | {cell.fault} | {step} | {ends} | {self.attempts} | {seconds} | {verdict} |"


async def undisturbed(plant: Plant) -> Texts:
    """What every request of a volley is answered when nothing is wrong."""
    outcomes = [await over_http(plant.url, asked, TIMEOUT_MS) for asked in (*VOLLEY, RAW)]
    assert all(it.how == "done" and len(it.text) == it.asked.max_tokens for it in outcomes), outcomes
    return {it.asked: it.text for it in outcomes}


class Trial:
    def __init__(self, plant: Plant, cell: Cell, texts: Texts, turn: int) -> None:
        self._plant = plant
        self._cell = cell
        self._texts = texts
        self._turn = turn
        self._taps: list[Tap] = []
        self.row = Row(cell)

    async def run(self) -> Row:
        started = time.monotonic()
        plant, row = self._plant, self.row
        tap = Tap()
        subscription = await plant.system.bus.receive("pdq.tokens.*", tap.on_frame)
        try:
            outcomes = await self._volleys()
        finally:
            await self._mend()
            await subscription.close()
        await plant.whole()
        await self._settle()
        for outcome in outcomes:
            await self._judge(outcome, tap)
        after = await over_http(plant.url, RAW, TIMEOUT_MS)
        if after.how != "done" or after.text != self._texts[RAW]:
            row.wrong.append(f"the next request: {after.how} {after.detail}")
        row.seconds = time.monotonic() - started
        return row

    # --- Hurt ---------------------------------------------------------------------------------------------------------

    @property
    def _armed(self) -> tuple[str, ...]:
        """The programs at which the step is watched: exactly one, if it is that one which shall be hurt."""
        pools = {"prefill": PREFILL, "decode": DECODE, "finish": DECODE}
        if pool := pools.get(self._cell.role):
            return (pool[self._turn % len(pool)],)
        return pools.get(self._cell.point.split(".")[0]) or (self._cell.role,)

    async def _volleys(self) -> list[Outcome]:
        """Requests until the step has been reached, and what came of all of them."""
        cell, plant = self._cell, self._plant
        action = cell.action or (f"{cell.fault}*1" if cell.inside else f"delay:{HELD_AT_STEP_MS}*1")
        sizes = {name: plant.programs[name].log_size() for name in self._armed}
        # A heartbeat comes only to who works for longer than its period.
        longer = f";{SLOW_PLACE[cell.role]}=delay:{HELD_AT_STEP_MS}" if cell.point.startswith("keepalive.") else ""
        for name in self._armed:
            await plant.arm(name, f"{cell.point}={action}{cell.skip}{longer}")
        outcomes: list[Outcome] = []
        for _ in range(VOLLEYS):
            if cell.point == "reaper.visit":
                await self._orphan()
            volley = asyncio.ensure_future(self._volley())
            while not volley.done():
                if hit := self._hit(sizes):
                    await self._hurt(hit)
                    return outcomes + await volley
                await asyncio.sleep(0.005)
            outcomes += await volley
            if hit := self._hit(sizes):
                await self._hurt(hit)
                return outcomes
        self.row.wrong.append(f"{cell.step} was never reached")
        return outcomes

    async def _volley(self) -> list[Outcome]:
        asked = [over_http(self._plant.url, it, TIMEOUT_MS) for it in VOLLEY]
        return list(await asyncio.gather(*asked, Producer(self._plant.system, RAW).run()))

    async def _orphan(self) -> None:
        """A request that only the reaper can end: its deadline passes, and nobody has a job for it."""
        system = self._plant.system
        request_id = mint_request_id(await system.ledger.now_ms())
        await system.ledger.enqueue(
            NewRecord(
                key=RecordKey(MODEL, request_id),
                reply_to=names.reply_subject("nobody"),
                prompt_tokens=1,
                max_new_tokens=1,
                timeout_ms=100,
                secret=mint_secret(),
            )
        )

    def _hit(self, sizes: Mapping[str, int]) -> str:
        """The program that has reached the step."""
        said = f"failpoint {self._cell.point}:"
        for name, size in sizes.items():
            lines = self._plant.programs[name].log_since(size).splitlines()
            if line := next((it for it in lines if said in it), ""):
                self.row.hurt = line.rpartition(" at ")[2]
                return name
        return ""

    async def _hurt(self, hit: str) -> None:
        """The fault, from when its step is reached until it is over."""
        plant, cell = self._plant, self._cell
        victim = hit if cell.role in ("prefill", "decode") else cell.role
        program = plant.programs.get(victim)
        match cell.fault:
            case "kill" if not cell.inside:
                plant.signal(victim, signal.SIGKILL)
            case "stop":
                if not cell.inside:
                    plant.signal(victim, signal.SIGSTOP)
                await asyncio.sleep(LONGER_THAN_A_LEASE_S)
                plant.signal(victim, signal.SIGCONT)
            case "restart" if program is not None:
                child = program.child
                child.signal(signal.SIGTERM)
                await child.wait()
            case "restart":
                await plant.restart_server(victim)
            case "cut":
                for network in self._networks():
                    network.cut()
                await asyncio.sleep(LONGER_THAN_A_LEASE_S)
            case "slow":
                for network in self._networks():
                    network.slow(LAG_S)
                await asyncio.sleep(SLOW_S)
        await self._mend()

    def _networks(self) -> list[Network]:
        plant, role = self._plant, self._cell.role
        if role in ("nats", "valkey"):
            return [it.nats if role == "nats" else it.redis for it in plant.programs.values()]
        name = self._armed[0] if role in ("prefill", "decode") else role
        return [plant.programs[name].nats, plant.programs[name].redis]

    async def _mend(self) -> None:
        for program in self._plant.programs.values():
            program.mend()
            if program.child.returncode is None and program.stopped:
                program.child.signal(signal.SIGCONT)

    # --- Look ---------------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Nothing is held any more, and the operators' own tool finds nothing either."""
        plant = self._plant
        for name in self._armed:
            await plant.arm(name, "")
        since_ms, started = await plant.system.ledger.now_ms(), time.monotonic()
        left: list[str] = []

        async def free() -> bool:
            nonlocal left
            left = await plant.held(since_ms)
            return not left

        try:
            await until(free, lambda: "\n".join(left), SETTLE_S)
            await until_clean(plant.system, plant.settings, SETTLE_S)
        except AssertionError as error:
            self.row.wrong.append(str(error))
        self.row.settled_s = time.monotonic() - started

    async def _judge(self, outcome: Outcome, tap: Tap) -> None:
        row, cell = self.row, self._cell
        row.ends[outcome.how] = row.ends.get(outcome.how, 0) + 1
        about = f"{outcome.request_id} ({outcome.asked.prompt[:8].strip()})"
        expected = self._texts[outcome.asked]
        if outcome.how not in cell.ends:
            row.wrong.append(f"{about} is {outcome.how}: {outcome.detail}")
        if outcome.how == "done" and (outcome.text, outcome.reason) != (expected, "length"):
            row.wrong.append(f"{about} is {outcome.text!r} ({outcome.reason}) instead of {expected!r}")
        if not expected.startswith(outcome.text):
            row.wrong.append(f"{about} was sent {outcome.text!r}, which does not begin {expected!r}")
        row.wrong += [f"{about}: {what}" for what in faults_of(tap.frames.get(outcome.request_id, []))]
        if outcome.request_id:
            await self._judge_record(outcome, about)

    async def _judge_record(self, outcome: Outcome, about: str) -> None:
        key = RecordKey(MODEL, outcome.request_id)
        history = await self._plant.system.ledger.history(key)
        record = await self._plant.system.ledger.read(key)
        ended = [entry for entry in history if entry.state.terminal]
        if record is None and outcome.how == "refused":
            return
        if record is None or len(ended) != 1 or not history[-1].state.terminal:
            self.row.wrong.append(f"{about} has ends {[it.event for it in ended]} in {[it.event for it in history]}")
        elif outcome.how in ("done", "failed", "cancelled", "expired") and record.state != outcome.how:
            self.row.wrong.append(f"{about} was told {outcome.how}, its record is {record.state}")
        if record is not None:
            self.row.attempts = max(self.row.attempts, record.attempt)
            if outcome.request_id == self.row.hurt:
                self.row.attempts_of_hurt = record.attempt
