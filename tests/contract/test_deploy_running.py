"""Alerts, dashboard and health checks against a system that runs: they ask only for what is really there."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import generate_latest

from pdq.adapters.redis import RedisBoard
from pdq.autoscale.metrics import Metrics
from pdq.core.handoff import State
from pdq.core.pacing import Cause
from pdq.ports import Pool, PoolReport, ScalingReport
from tests.contract.chart import CASES, Rendered, container
from tests.contract.deployed import DEPLOY
from tests.e2e.stack import Stack, running

RULES = DEPLOY / "prometheus" / "rules.yaml"
GROUPS: dict[str, list[dict[str, Any]]] = {
    group["name"]: group["rules"] for group in yaml.safe_load(RULES.read_text())["groups"]
}
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
HEALTHCHECK = DEPLOY / "docker" / "healthcheck.py"

KEDA = [
    trigger["metadata"]["query"]
    for found in Rendered(CASES["keda on prometheus"]).all("ScaledObject").values()
    for trigger in found["spec"]["triggers"]
]
EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for group in ("pdq", "pdq-autoscaler") for rule in GROUPS[group]},
    **{panel["title"]: " or ".join(target["expr"] for target in panel["targets"]) for panel in PANELS},
    "KEDA": " or ".join(KEDA),
    "the dashboard's list of models": DASHBOARD["templating"]["list"][1]["query"]["query"],
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("deploy") / "state", "--engine", "sim") as stack:
        stack.complete("a prompt", max_tokens=8)
        httpx.post(f"{stack.url}/v1/completions", json={"model": "unknown", "prompt": "refused"})
        yield stack


@pytest.fixture(scope="module")
def exported(stack: Stack) -> dict[str, set[str]]:
    """The labels of every metric, by its name as a query writes it: those of bridges and of an autoscaler that decides."""
    found: dict[str, set[str]] = {}
    for line in (httpx.get(f"{stack.url}/metrics").text + of_an_autoscaler()).splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels or ""))
    return found


def of_an_autoscaler() -> str:
    said = PoolReport(1, 1, 2, Cause.OUT, "a test", inputs={"wait_s": 2.0}, manual=2)
    metrics = Metrics("sim")
    metrics.leads(True)
    report = ScalingReport(0, "a test", "kubernetes", automatic=True, period_ms=1, pools=dict.fromkeys(Pool, said))
    metrics.decided(report, time.monotonic())
    return generate_latest(metrics.registry).decode()


# --- Queries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_every_metric_and_label_in_a_query_is_exported(place: str, exported: dict[str, set[str]]) -> None:
    asked = re.findall(r"\b(pdq_\w+)(?:\{([^}]*)\})?", EXPRESSIONS[place])
    assert asked
    for name, matchers in asked:
        assert name in exported, name
        assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= exported[name], f"{name}{{{matchers}}}"


def test_values_that_queries_compare_with_can_occur(stack: Stack) -> None:
    queries = " ".join(EXPRESSIONS.values())
    assert set(re.findall(r'pdq_requests\w*\{[^}]*state="(\w+)"', queries)) <= {state.value for state in State}
    assert set(re.findall(r'cause="(\w+)"', queries)) <= set(Cause)
    assert set(re.findall(r'outcome="(\w+)"', queries)) <= {state.value for state in State if state.terminal}
    text = httpx.get(f"{stack.url}/metrics").text
    for label in ("pool", "queue"):
        for value in re.findall(rf'\b{label}=~?"([\w|]+)"', queries):
            for one in value.split("|"):
                assert f'{label}="{one}"' in text


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    alerts = [rule for rules in GROUPS.values() for rule in rules]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}


def test_metrics_of_others_are_asked_for_in_a_group_that_says_so() -> None:
    assert set(GROUPS) == {"pdq", "pdq-autoscaler", "pdq-nats-exporter"}
    assert all("pdq_autoscaler_" in rule["expr"] for rule in GROUPS["pdq-autoscaler"])
    for rule in GROUPS["pdq-nats-exporter"]:
        assert re.match(r".*\b(jetstream|gnatsd)_\w+", rule["expr"])
        assert "pdq_" not in rule["expr"]


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


@needs_promtool
def test_promtool_accepts_the_rules_and_the_queries_of_dashboard_and_keda(tmp_path: Path) -> None:
    queries = [target["expr"].replace("$model", "m") for panel in PANELS for target in panel["targets"]] + KEDA
    as_rules = [{"record": f"query:number{at}", "expr": query} for at, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": as_rules}]}))
    done = subprocess.run(["promtool", "check", "rules", RULES, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    tests = RULES.with_name("rules.test.yaml")
    done = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- Dashboard --------------------------------------------------------------------------------------------------------


def test_panels_lie_side_by_side_within_the_grid() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_use_the_variables_that_the_dashboard_has() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables


# --- Health -----------------------------------------------------------------------------------------------------------


def health(stack: Stack, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, HEALTHCHECK, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **stack.environ, **environ},
    )  # fmt: skip


@pytest.fixture
def forgotten(tmp_path: Path) -> dict[str, str]:
    """An environment in which no health check has found a worker before."""
    return {"TMPDIR": str(tmp_path)}


def test_probes_of_the_chart_ask_what_the_bridge_answers(stack: Stack) -> None:
    bridge = container(Rendered(CASES["torch"]).programs["bridge"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert httpx.get(stack.url + bridge[probe]["httpGet"]["path"]).status_code == 200


def test_a_bridge_is_healthy_while_it_answers(stack: Stack) -> None:
    assert health(stack, "bridge", PDQ_BRIDGE_PORT=stack.url.rpartition(":")[2]).returncode == 0
    assert health(stack, "bridge", PDQ_BRIDGE_PORT="1").returncode == 1


def test_a_worker_is_healthy_once_it_says_so(stack: Stack, forgotten: dict[str, str]) -> None:
    assert health(stack, "worker", **forgotten).returncode == 0
    remembered = (Path(forgotten["TMPDIR"]) / "pdq-worker").read_text()
    assert remembered in [info.worker for info in stack.workers()]
    assert health(stack, "worker", **forgotten).returncode == 0


def test_a_redis_that_does_not_answer_makes_a_worker_unready_but_not_dead(
    stack: Stack, forgotten: dict[str, str]
) -> None:
    nowhere = {**forgotten, "PDQ_REDIS_URL": "redis://127.0.0.1:1/0"}
    assert health(stack, "worker", **nowhere).returncode == 1
    assert health(stack, "worker", "--lenient", **nowhere).returncode == 0


def test_a_worker_that_no_longer_says_that_it_lives_is_dead(stack: Stack, forgotten: dict[str, str]) -> None:
    (Path(forgotten["TMPDIR"]) / "pdq-worker").write_text(stack.workers()[0].worker)
    empty = {"PDQ_REDIS_URL": stack.environ["PDQ_REDIS_URL"].replace("/0", "/1")}
    assert health(stack, "worker", "--lenient", **forgotten, **empty).returncode == 1


async def test_a_worker_that_was_sent_away_is_well_but_not_ready(stack: Stack, forgotten: dict[str, str]) -> None:
    empty = {"PDQ_REDIS_URL": stack.environ["PDQ_REDIS_URL"].replace("/0", "/1")}
    board = RedisBoard(empty["PDQ_REDIS_URL"])
    await board.send_away("sim", socket.gethostname())
    await board.close()
    assert health(stack, "worker", "--model", "sim", **forgotten, **empty).returncode == 0
    assert health(stack, "worker", "--model", "other", **forgotten, **empty).returncode == 1
    assert health(stack, "worker", **forgotten, **empty).returncode == 1
