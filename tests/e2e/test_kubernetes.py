"""``pdq`` in front of a Kubernetes API server: a stand-in (``tests/kubernetes_api.py``) whose pods are real workers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdq.adapters.processes import Child, Server
from pdq.connect import Connected, connect
from pdq.core import names
from pdq.core.environment import load
from pdq.core.ids import mint_worker_id
from pdq.core.messages import PrefillJob, Sampling, TokenFrame, encode
from pdq.ports import Occupancy, Queue
from tests.conformance.test_registry import info
from tests.kubernetes_api import KubernetesApi, kubeconfig

REQUESTS = 30
PDQ = (sys.executable, "-m", "pdq.cli")


@dataclass
class Done:
    status: int
    out: str
    err: str


async def pdq(*arguments: str, **environ: str) -> Done:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PDQ_", "KUBE"))}
    process = await asyncio.create_subprocess_exec(
        *PDQ, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=clean | environ
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return Done(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        api.deploy("pdq-prefill", 3)
        api.deploy("pdq-decode", 2)
        yield api


@pytest.fixture
def environ(api: KubernetesApi, tmp_path: Path) -> dict[str, str]:
    config = kubeconfig(api, tmp_path / "config", namespace="llm")
    return {"KUBECONFIG": config, "PDQ_STATE_DIR": str(tmp_path / "nothing-runs-here")}


# --- Commands that go to the API server directly ----------------------------------------------------------------------


async def test_pools_are_scaled_without_anything_else_running(api: KubernetesApi, environ: dict[str, str]) -> None:
    done = await pdq("scale", "--kubernetes", "prefill=4", "decode=1", **environ)
    assert done.status == 0, done.err
    assert (api.size("pdq-prefill"), api.size("pdq-decode")) == (4, 1)
    assert "Kubernetes chooses by itself" in done.err
    shown = await pdq("scale", "--kubernetes", "--json", **environ)
    assert json.loads(shown.out) == {"prefill": 4, "decode": 1}


async def test_those_go_first_of_which_a_running_system_says_that_they_hold_least(
    api: KubernetesApi, environ: dict[str, str], nats: Server, valkey: Server, model: str
) -> None:
    oldest, middle, newest = api.running("pdq-prefill")
    servers = {"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url}
    async with connect(load(servers), "test") as system:
        for worker, held in ((oldest, 2), (middle, 0), (newest, 1)):
            told = replace(info(worker, model), occupancy=Occupancy(8, 8 - held, 0, held))
            await system.registry.announce(told, 60_000)
        done = await pdq("scale", "--kubernetes", "prefill=1", **(environ | servers))
        for worker in (oldest, middle, newest):
            await system.registry.withdraw(worker)
    assert (done.status, done.err) == (0, "")
    assert api.running("pdq-prefill") == [oldest]


async def test_a_dry_run_shows_what_a_real_one_sends(api: KubernetesApi, environ: dict[str, str]) -> None:
    rehearsed = await pdq("scale", "--kubernetes", "--dry-run", "--json", "prefill=2", "decode=5", **environ)
    assert not api.writes
    real = await pdq("scale", "--kubernetes", "--json", "prefill=2", "decode=5", **environ)
    shown, sent = json.loads(rehearsed.out), json.loads(real.out)
    assert shown["requests"] == sent["requests"]
    assert (shown["dry_run"], sent["dry_run"]) == (True, False)
    recorded = [(it.method, it.path, it.content_type, it.body) for it in api.writes]
    assert recorded == [(it["method"], it["path"], it["content_type"], it["body"]) for it in shown["requests"]]


async def test_a_dry_run_in_words_is_http(api: KubernetesApi, environ: dict[str, str]) -> None:
    done = await pdq("scale", "--kubernetes", "--dry-run", "decode=5", **environ)
    path, content_type, _, body = done.out.splitlines()
    assert path == "PATCH /apis/apps/v1/namespaces/llm/deployments/pdq-decode/scale"
    assert content_type == "Content-Type: application/merge-patch+json"
    version = api.deployments["pdq-decode"]["metadata"]["resourceVersion"]
    assert json.loads(body) == {"metadata": {"resourceVersion": version}, "spec": {"replicas": 5}}


async def test_a_dry_run_without_a_cluster_is_an_outline(tmp_path: Path) -> None:
    where = {"KUBECONFIG": str(tmp_path / "none"), "PDQ_STATE_DIR": str(tmp_path)}
    options = ("--namespace", "llm", "--prefill-deployment", "qwen-prefill")
    done = await pdq("scale", "--kubernetes", "--dry-run", *options, "prefill=3", **where)
    assert done.status == 0
    path = "/apis/apps/v1/namespaces/llm/deployments/qwen-prefill/scale"
    assert [line for line in done.out.splitlines() if path in line] == [f"GET {path}", f"PATCH {path}"]
    assert "outline only" in done.err
    assert (await pdq("scale", "--kubernetes", *options, "prefill=3", **where)).status == 2


async def test_a_drained_worker_goes_for_good(api: KubernetesApi, environ: dict[str, str]) -> None:
    first, second = api.running("pdq-decode")
    rehearsed = await pdq("drain", first, "--kubernetes", "--dry-run", "--json", **environ)
    assert not api.writes
    done = await pdq("drain", first, "--kubernetes", "--json", **environ)
    assert done.status == 0, done.err
    assert json.loads(done.out)["requests"] == json.loads(rehearsed.out)["requests"]
    assert (api.running("pdq-decode"), api.leaving("pdq-decode")) == ([second], [first])
    again = await pdq("drain", first, "--kubernetes", **environ)
    assert again.status == 4


async def test_a_drained_pool_goes_to_zero(api: KubernetesApi, environ: dict[str, str]) -> None:
    assert (await pdq("drain", "prefill", "--kubernetes", **environ)).status == 0
    assert (api.size("pdq-prefill"), api.size("pdq-decode")) == (0, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("scale", "--dry-run", "prefill=1"),
        ("scale", "--namespace", "llm", "prefill=1"),
        ("drain", "--context", "here", "worker"),
        ("drain", "--kubernetes", "--spill", "worker"),
    ],
)
async def test_options_that_do_not_go_together_are_refused(
    api: KubernetesApi, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    assert (await pdq(*arguments, **environ)).status == 2
    assert not api.requests


async def test_auto_is_not_for_kubernetes_to_say(environ: dict[str, str]) -> None:
    done = await pdq("scale", "--kubernetes", "prefill=auto", **environ)
    assert done.status == 2
    assert "autoscaler" in done.err


async def test_what_the_api_server_refuses_is_said(api: KubernetesApi, environ: dict[str, str]) -> None:
    api.rules = []
    done = await pdq("scale", "--kubernetes", "prefill=1", **environ)
    assert (done.status, done.out) == (3, "")
    assert "forbidden" in done.err


# --- The autoscaler, with real workers as pods ------------------------------------------------------------------------


@dataclass
class Kubelet:
    """Runs a real worker for every pod, and starts it again in its place when it has ended; SIGTERM when the pod is told to
    go, and gone when the worker has ended then."""

    api: KubernetesApi
    system: Connected
    model: str
    directory: Path
    environ: Mapping[str, str]
    containers: dict[str, Child] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    exits: dict[str, list[int]] = field(default_factory=dict)
    served: set[str] = field(default_factory=set)
    """Those that have been ready. One that is told to go while it starts has nothing to finish, and ends at once."""

    working: asyncio.Task[None] = field(init=False)

    async def run(self) -> None:
        while True:
            registered = {it.worker for it in await self.system.registry.workers(self.model)}
            for name, pod in list(self.api.pods.items()):
                self.look_at(name, pod, name in registered)
            await asyncio.sleep(0.1)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert not self.working.done(), self.working
            await asyncio.sleep(0.05)

    def look_at(self, name: str, pod: Mapping[str, Any], registered: bool) -> None:
        container = self.containers.get(name)
        terminating = "deletionTimestamp" in pod["metadata"]
        if container is None:
            self.containers[name] = self.container(name, pod).start()
            self.api.start(name)
        elif container.returncode is not None:
            self.exits.setdefault(name, []).append(container.returncode)
            if terminating:
                self.api.gone(name)
            else:
                container.start()
        elif terminating and name not in self.stopping:
            container.signal(signal.SIGTERM)
            self.stopping.add(name)
        elif registered is not self.is_ready(name):
            (self.api.ready if registered else self.api.unready)(name)
            self.served.add(name)

    def container(self, name: str, pod: Mapping[str, Any]) -> Child:
        pool = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        arguments = ("worker", pool, "--engine", "sim", "--model", self.model, "--id", name)
        return Child(name, (*PDQ, *arguments), self.directory / f"{name}.log", self.environ)

    def is_ready(self, name: str) -> bool:
        return {"type": "Ready", "status": "True"} in self.api.pods[name]["status"]["conditions"]


@asynccontextmanager
async def running(kubelet: Kubelet) -> AsyncIterator[Kubelet]:
    kubelet.working = asyncio.create_task(kubelet.run())
    try:
        yield kubelet
    finally:
        kubelet.working.cancel()
        await asyncio.gather(*(child.stop() for child in kubelet.containers.values()))


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_autoscaler_grows_and_shrinks_a_pool_whose_pods_are_workers(
    tmp_path: Path, nats: Server, valkey: Server
) -> None:
    model = "sim-on-kubernetes"
    async with KubernetesApi(kubelet=False) as api:
        api.deploy("pdq-prefill", 1)
        api.deploy("pdq-decode", 1)
        environ = {
            **os.environ,
            "PDQ_NATS_URL": nats.url,
            "PDQ_REDIS_URL": valkey.url,
            "PDQ_TRANSPORT_ORDER": "redis",
            "PDQ_SIM_PREFILL_MS_PER_TOKEN": "2",
            "PDQ_KUBERNETES_KUBECONFIG": kubeconfig(api, tmp_path / "config", namespace="llm"),
            "PDQ_SCALING_PERIOD_S": "0.5",
            "PDQ_SCALING_PREFILL_MAX": "3",
            "PDQ_SCALING_DECODE_MAX": "1",
            "PDQ_SCALING_OUT_WINDOW_S": "0",
            "PDQ_SCALING_OUT_COOLDOWN_S": "0.5",
            "PDQ_SCALING_IN_WINDOW_S": "3",
            "PDQ_SCALING_IN_COOLDOWN_S": "1",
            "PDQ_SCALING_STARTUP_S": "1",
        }
        command = (*PDQ, "autoscaler", "--actuator", "kubernetes", "--model", model)
        autoscaler = Child("autoscaler", command, tmp_path / "autoscaler.log", environ).start()
        async with connect(load({"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url}), "test") as system:
            sizes: set[int] = set()

            def over() -> bool:
                sizes.add(api.size("pdq-prefill"))
                return len(ended) == REQUESTS and api.size("pdq-prefill") == 1 and not api.leaving("pdq-prefill")

            try:
                async with asyncio.timeout(180), running(Kubelet(api, system, model, tmp_path, environ)) as kubelet:
                    ended = await _requests(system, model, count=REQUESTS, tokens=200)
                    await kubelet.until(over)
            finally:
                await autoscaler.stop()
                print(autoscaler.log_tail(40))
    assert max(sizes) > 1
    assert set(ended.values()) == {"done"}
    assert len(kubelet.exits) >= max(sizes) - 1
    assert all(kubelet.exits[name] == [0] for name in kubelet.exits.keys() & kubelet.served)
    assert autoscaler.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_pod_pauses_comes_back_and_goes_for_good(tmp_path: Path, nats: Server, valkey: Server) -> None:
    model = "sim-that-pauses"
    async with KubernetesApi(kubelet=False) as api:
        api.deploy("pdq-prefill", 1)
        api.deploy("pdq-decode", 1)
        [pod] = api.running("pdq-decode")
        environ = {
            **os.environ,
            "PDQ_NATS_URL": nats.url,
            "PDQ_REDIS_URL": valkey.url,
            "PDQ_TRANSPORT_ORDER": "redis",
            "PDQ_KUBERNETES_KUBECONFIG": kubeconfig(api, tmp_path / "config", namespace="llm"),
        }
        ours = {name: value for name, value in environ.items() if name.startswith("PDQ_")}
        async with (
            connect(load({"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url}), "test") as system,
            asyncio.timeout(180),
            running(Kubelet(api, system, model, tmp_path, environ)) as kubelet,
        ):
            await kubelet.until(lambda: kubelet.is_ready(pod))
            assert (await pdq("drain", pod, **ours)).status == 0
            await kubelet.until(lambda: kubelet.exits == {pod: [0]} and not kubelet.is_ready(pod))
            assert (await pdq("undrain", pod, **ours)).status == 0
            await kubelet.until(lambda: kubelet.is_ready(pod))
            assert (await pdq("drain", pod, "--kubernetes", **ours)).status == 0
            await kubelet.until(lambda: pod not in api.pods)
            assert api.size("pdq-decode") == 0
            assert kubelet.exits == {pod: [0, 0]}


async def _requests(system: Connected, model: str, count: int, tokens: int) -> dict[str, str]:
    """Publish them; what is returned fills with the state in which each ends."""
    ended: dict[str, str] = {}

    def on_frame(frame: TokenFrame) -> None:
        for entry in frame.entries:
            if entry.end is not None:
                ended[entry.request_id] = entry.end.state

    reply_to = names.reply_subject(mint_worker_id("test"))
    await system.bus.receive(reply_to, on_frame)
    for number in range(count):
        prompt = tuple(range(number, number + tokens))
        job = PrefillJob(model, reply_to, sampling=Sampling(max_tokens=4), prompt_token_ids=prompt)
        await system.queue.publish(Queue.PREFILL, model, encode(job))
    return ended
