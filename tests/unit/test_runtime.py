"""How programs are told to leave, and to stay after all; and how they tell of what fails for a while."""

import asyncio
import logging

import pytest

from pdq.core.errors import Overloaded, Unavailable
from pdq.runtime import Lifecycle, Trouble


def state(lifecycle: Lifecycle) -> str:
    if lifecycle.stopped.is_set():
        return "stopped"
    assert lifecycle.draining.is_set() != lifecycle.serving.is_set()
    return "draining" if lifecycle.draining.is_set() else "serving"


async def stops(lifecycle: Lifecycle) -> None:
    async with asyncio.timeout(20):
        await lifecycle.stopped.wait()


async def test_the_first_signal_drains_and_the_second_stops() -> None:
    lifecycle = Lifecycle()
    assert state(lifecycle) == "serving"
    lifecycle.signal()
    assert state(lifecycle) == "draining"
    lifecycle.signal()
    assert state(lifecycle) == "stopped"


async def test_a_drain_ends_at_its_deadline() -> None:
    lifecycle = Lifecycle(deadline_s=0.01)
    lifecycle.drain()
    assert state(lifecycle) == "draining"
    await stops(lifecycle)


async def test_being_told_to_drain_again_moves_the_deadline_and_does_not_stop() -> None:
    lifecycle = Lifecycle()
    lifecycle.drain(0.01)
    lifecycle.drain(600)
    await asyncio.sleep(0.03)
    assert state(lifecycle) == "draining"
    lifecycle.drain(0.01)
    await stops(lifecycle)


async def test_the_first_signal_after_being_told_to_drain_does_not_stop() -> None:
    lifecycle = Lifecycle()
    lifecycle.drain()
    lifecycle.signal()
    assert state(lifecycle) == "draining"
    lifecycle.signal()
    assert state(lifecycle) == "stopped"


async def test_a_signal_ends_a_longer_drain_at_its_own_deadline_and_nobody_can_put_that_off() -> None:
    lifecycle = Lifecycle(deadline_s=0.01)
    lifecycle.drain(600)
    lifecycle.signal()
    lifecycle.drain(600)
    await stops(lifecycle)


async def test_who_is_cancelled_while_its_work_winds_up_ends_cancelled() -> None:
    lifecycle, winding_up, go_on = Lifecycle(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            winding_up.set()
            await go_on.wait()

    waiting = asyncio.create_task(lifecycle.until(lifecycle.draining, work()))
    await asyncio.sleep(0)
    lifecycle.drain()
    await winding_up.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


async def test_who_was_told_to_drain_can_be_told_to_serve_again() -> None:
    lifecycle = Lifecycle()
    assert not lifecycle.undrain()
    lifecycle.drain(0.01)
    assert lifecycle.undrain()
    await asyncio.sleep(0.03)
    assert state(lifecycle) == "serving"


async def test_who_was_sent_a_signal_leaves() -> None:
    lifecycle = Lifecycle()
    lifecycle.signal()
    assert not lifecycle.undrain()
    assert state(lifecycle) == "draining"
    lifecycle.stop()
    assert not lifecycle.undrain()
    assert state(lifecycle) == "stopped"


def test_a_trouble_that_lasts_is_told_once_for_each_reason_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    trouble = Trouble(logging.getLogger("test"), "asking")
    trouble.works()
    for error in (Unavailable("refused"), Unavailable("silent"), Overloaded("full"), Overloaded("full")):
        trouble.fails(error)
    trouble.works()
    trouble.works()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "asking fails (unavailable), trying again: refused"),
        ("WARNING", "asking fails (overloaded), trying again: full"),
        ("INFO", "asking works again"),
    ]
