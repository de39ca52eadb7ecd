import os
import signal
import subprocess
import sys
from pathlib import Path

import redis.asyncio

from pdq.adapters.processes import Child, Server, valkey_server


def test_real_servers_answer_on_loopback(nats: Server, valkey: Server) -> None:
    assert nats.url.startswith("nats://127.0.0.1:")
    assert valkey.url.startswith("redis://127.0.0.1:")


async def test_a_server_restarts_on_the_same_port(tmp_path: Path) -> None:
    server = await valkey_server(tmp_path).start()
    await server.stop()
    await server.start()
    assert server.child.returncode is None
    await server.stop()
    assert server.child.returncode is not None


async def test_a_valkey_server_that_started_has_read_its_data(tmp_path: Path) -> None:
    server = await valkey_server(tmp_path).start()
    client = redis.asyncio.Redis.from_url(server.url)
    await client.eval("for i = 1, 5000 do redis.call('SET', i, i) end", 0)
    await client.aclose()
    await server.stop()
    server.child.argv += ["--key-load-delay", "100"]  # microseconds
    await server.start()
    assert await client.dbsize() == 5000
    await client.aclose()
    await server.stop()


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    child = Child("stubborn", [sys.executable, "-c", program], tmp_path / "log").start()
    while "up" not in child.log_tail():
        assert child.returncode is None
    await child.stop(grace_s=0.1)
    assert child.returncode == -signal.SIGKILL


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pdq.adapters.processes import Child;"
        f"print(Child('c', ['sleep', '600'], Path({str(tmp_path / 'log')!r})).start().pid, flush=True);"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.communicate()
    while Path(f"/proc/{pid}/stat").exists():
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
