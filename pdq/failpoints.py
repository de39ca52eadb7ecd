"""Failpoints: named places where a fault can be made to happen, to see that nothing comes of it.

Off, they cost one truth test of ``armed`` at each place. They can be set only in a process whose environment has
``PDQ_FAILPOINTS``, if need be empty: by its value, or later by a ``Failpoints`` control message to that process. So a
stray message cannot hurt a production system.

    PDQ_FAILPOINTS="prefill.before_ready=kill; decode.step=delay:200+5; bus.send=drop*3; ledger.change=error:unavailable%10"

An action is ``kill`` (SIGKILL to this process), ``stop`` (SIGSTOP), ``delay:MILLISECONDS``, ``error[:CODE]`` (an error of
``pdq.core.errors`` by its code, ``unavailable`` if none is given; ``error:bug`` is an exception that no one expects),
``drop`` (what follows is left out) or ``corrupt`` (bytes or a digest are damaged). After it, in any order: ``*N`` happens
N times, then no more; ``+N`` the first N times go by; ``%P`` happens in P of 100 cases; ``@TEXT`` only for requests
whose id contains TEXT.
"""

import asyncio
import logging
import os
import random
import re
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pdq.core import errors

log = logging.getLogger(__name__)

VARIABLE: Final = "PDQ_FAILPOINTS"

Left = Literal["drop", "corrupt"]
"""What a failpoint leaves to its place to do."""

WRONG_DIGEST: Final = "0" * 32


class Point(NamedTuple):
    """Where it is, and which of ``drop`` and ``corrupt`` mean something there."""

    where: str
    can: tuple[Left, ...] = ()


POINTS: Final[Mapping[str, Point]] = {
    "bridge.before_enqueue": Point("A request is valid, and has no record yet."),
    "bridge.before_publish": Point("The record is queued, its job is not published."),
    "bridge.after_publish": Point("Record and job are out."),
    "prefill.delivered": Point("A prefill worker has a job in its hands, and no lease."),
    "prefill.begun": Point("The source lease is taken, no KV block is."),
    "prefill.admitted": Point("The prompt has its blocks, nothing is computed."),
    "prefill.chunk": Point("A chunk of the prompt is computed and not offered. Once per chunk."),
    "prefill.offering": Point("A chunk is hashed and goes to the transports. Once per chunk.", ("corrupt",)),
    "prefill.offered": Point("A chunk is offered. Once per chunk."),
    "prefill.before_ready": Point("The prompt is computed and offered, the record does not say so."),
    "prefill.after_ready": Point("The record is ready, nobody has been told."),
    "prefill.after_first_token": Point("The first token is sent, the decode job is not published."),
    "prefill.before_announce": Point("The decode job is about to be published."),
    "prefill.after_announce": Point("The decode job is published."),
    "prefill.before_ack": Point("The prefill job is handled and not acknowledged.", ("drop",)),
    "decode.delivered": Point("A decode worker has a job in its hands, and no lease."),
    "decode.claimed": Point("The sink lease is taken, no KV block is."),
    "decode.reserved": Point("Blocks for prompt and output are reserved."),
    "decode.fetching": Point("One locator is about to be tried. Once per locator."),
    "transport.chunk": Point("A chunk has landed at the sink and is being verified. Once per chunk.", ("corrupt",)),
    "decode.landed": Point("All chunks have landed, the manifest is not compared with the record.", ("corrupt",)),
    "decode.before_fetched": Point("The KV is verified, the record does not say fetched."),
    "decode.after_fetched": Point("The record is fetched, the source has not been told."),
    "decode.release": Point("The source is about to be told to let go.", ("drop",)),
    "decode.joined": Point("The sequence is in the running batch."),
    "decode.step": Point("The batch has made a step, its tokens are not sent. Once per step."),
    "decode.before_ack": Point("The decode job is handled and not acknowledged.", ("drop",)),
    "local.delivered": Point("A worker has a job for both halves in its hands, and no lease."),
    "local.before_adopt": Point("The prompt is computed here, the record still says prefilling."),
    "local.after_adopt": Point("The record is fetched without a transfer, no token is sent."),
    "local.before_ack": Point("The job for both halves is handled and not acknowledged.", ("drop",)),
    "finish.before": Point("The last token is sent, the record is not done."),
    "finish.after": Point("The record is done, the end is not sent.", ("drop",)),
    "ending.before": Point("A request is about to end without success."),
    "ending.after": Point("The record says failed, cancelled or expired; nobody has been told.", ("drop",)),
    "recovery.before_requeue": Point("A request's KV is lost, its record does not say so."),
    "recovery.after_requeue": Point("The record is back in queued, its new prefill job is not published."),
    "reaper.round": Point("The reaper begins to look for what has run out."),
    "reaper.visit": Point("The reaper visits a record of which something has run out. Once per record."),
    "keepalive.renew": Point("Leases are about to be renewed.", ("drop",)),
    "keepalive.in_progress": Point("A job is about to be called in progress. Once per job.", ("drop",)),
    "keepalive.announce": Point("The worker is about to announce itself.", ("drop",)),
    "ledger.change": Point("A change of a record goes to the ledger. An error here: it never arrived."),
    "ledger.changed": Point("The ledger has made a change. An error here: its answer is lost."),
    "queue.pull": Point("Jobs are about to be pulled."),
    "queue.publish": Point("A job goes to the broker. An error here: it never arrived."),
    "queue.published": Point("The broker has stored a job. An error here: its answer is lost."),
    "bus.send": Point("A token frame goes to the broker.", ("drop",)),
    "bus.control": Point("A control message goes to the broker.", ("drop",)),
    "bus.ask": Point("The owner of a stream is about to be asked for its tokens.", ("drop",)),
}


@dataclass
class Armed:
    """One fault that is set at a point."""

    action: Literal["kill", "stop", "delay", "error", "drop", "corrupt"]
    argument: str
    times: int | None
    skip: int
    percent: float
    only: str

    def happens(self, request_id: str) -> bool:
        """Whether this hit is one of those; counts it."""
        if self.only not in request_id or random.random() * 100 >= self.percent:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0


armed: Final[dict[str, list[Armed]]] = {}
"""By point. Places ask ``if failpoints.armed`` before anything else."""


def arm(setting: str) -> None:
    """Replace all that is armed by what ``setting`` says.

    Raises:
        InvalidSettings: it says something else.
    """
    faults: dict[str, list[Armed]] = {}
    for part in setting.split(";"):
        if part.strip() not in ("", "on"):
            name, fault = parse(part)
            faults.setdefault(name, []).append(fault)
    armed.clear()
    armed.update(faults)
    log.warning("failpoints of process %d: %s", os.getpid(), setting.strip() or "none")


async def hit(name: str, request_id: str = "") -> Left | None:
    """The process is at point ``name``: what is armed there happens; ``drop`` and ``corrupt`` are the caller's to do.

    Raises:
        PdqError: the error that is armed.
    """
    for fault in armed.get(name, ()):
        if fault.happens(request_id):
            log.warning("failpoint %s: %s %s at %s", name, fault.action, fault.argument, request_id or "no request")
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "delay":
                    await asyncio.sleep(float(fault.argument) / 1000)
                case "error":
                    raise _ERRORS[fault.argument](f"failpoint {name}")
                case "drop" | "corrupt":
                    return fault.action
    return None


def damage(parts: object) -> None:
    """Flip the first byte of the first part that can be written to."""
    assert isinstance(parts, (list, tuple))
    for part in parts:
        view = memoryview(part).cast("B")
        if not view.readonly and len(view):
            view[0] ^= 0xFF
            return


_ONE: Final = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>[a-z]+)(?::(?P<argument>[a-z0-9_.]+))?"
    r"(?P<rest>(?:\*[0-9]+|\+[0-9]+|%[0-9.]+|@[0-9A-Za-z-]+)*)"
)


def parse(text: str) -> tuple[str, Armed]:
    """``NAME=ACTION…``, one of the parts of ``PDQ_FAILPOINTS``.

    Raises:
        InvalidSettings: names the part and what is wrong with it.
    """
    found = _ONE.fullmatch("".join(text.split()))
    if found is None:
        raise _wrong(text, "it must be NAME=ACTION[:ARGUMENT][*TIMES][+SKIP][%PERCENT][@REQUEST]")
    point = POINTS.get(found["name"])
    if point is None:
        raise _wrong(text, f"there is no point {found['name']}; `pdq failpoints` lists them")
    action, argument = found["action"], found["argument"] or ""
    match action:
        case "kill" | "stop":
            fits = not argument
        case "delay":
            fits = argument.replace(".", "", 1).isdigit()
        case "error":
            argument = argument or errors.Unavailable.code
            fits = argument in _ERRORS
        case "drop" | "corrupt":
            fits = not argument and action in point.can
        case _:
            raise _wrong(text, "an action is kill, stop, delay:MS, error[:CODE], drop or corrupt")
    if not fits:
        raise _wrong(text, f"{action}{':' if argument else ''}{argument} cannot be done at {found['name']}")
    given = {part[0]: part[1:] for part in re.findall(r"[*+%@][^*+%@]+", found["rest"])}
    times = int(given["*"]) if "*" in given else None
    return found["name"], Armed(
        action, argument, times, int(given.get("+", 0)), float(given.get("%", 100)), given.get("@", "")
    )


def _wrong(text: str, why: str) -> errors.InvalidSettings:
    return errors.InvalidSettings(f"{VARIABLE}: {text.strip()!r} is not valid: {why}")


_ERRORS: Final[Mapping[str, Callable[[str], Exception]]] = {
    # Those that are made of a message alone.
    **{code: kind for code, kind in errors.BY_CODE.items() if kind not in (errors.RecordEnded, errors.LeaseHeld)},
    "bug": RuntimeError,
}

Listen = Callable[[Callable[[str], None]], Awaitable[object]]


async def open_to(subject: str, listen: Listen, environ: Mapping[str, str] = os.environ) -> None:
    """Arm what the environment says, and let ``listen`` bring what is sent to ``subject``; nothing without
    ``PDQ_FAILPOINTS``.

    Raises:
        InvalidSettings: the variable cannot be understood.
    """
    if VARIABLE in environ:
        arm(environ[VARIABLE])
        await listen(_heard)
        log.warning("failpoints of process %d can be set at %s", os.getpid(), subject)


def _heard(setting: str) -> None:
    try:
        arm(setting)
    except errors.InvalidSettings as error:
        log.warning("%s", error)
