"""What an operator reads of a broker that was away: when it went and why, and when it was back, each once."""

import re
from pathlib import Path

import pytest

from pdq.adapters import nats
from pdq.adapters.processes import nats_server
from pdq.core.settings import NatsSettings
from tests.conformance.brokers import eventually


async def test_a_restart_of_the_broker_is_one_warning_and_one_word_that_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = await nats_server(tmp_path / "nats").start()
    connection = await nats.connect(NatsSettings(server.url), "patient")
    await server.stop()
    await server.start()

    async def told() -> bool:
        return "is back" in caplog.text

    await eventually(told)
    await connection.close()
    await server.stop()
    lost, back = [record for record in caplog.records if record.name.startswith("pdq.")]
    assert (lost.levelname, back.levelname) == ("WARNING", "INFO")
    assert re.search(r"lost NATS at .* \(.*EOF.*\); reconnecting", lost.getMessage())
