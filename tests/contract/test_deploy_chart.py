"""The Helm chart, rendered by Helm's own engine: valid for Kubernetes, and in step with what the programs really do.

No cluster is needed or asked. What only a cluster can show is listed in deploy/README.md.
"""

from functools import cache
from typing import Any

import helm_python as helm
import pytest

from pdq.bridge.server import CLOSE_S
from pdq.core import names
from pdq.core.environment import load
from tests.contract.chart import CASES, CHART, MODEL, Rendered, container, invalid, labels, pod, selects
from tests.contract.deployed import parse, unknown_settings

OLDEST, NEWEST = "1.27", "1.37"
"""Of Kubernetes: what Chart.yaml demands, and the newest whose schemas are at hand."""
FOREIGN = {"ScaledObject", "ServiceMonitor"}
"""Of operators, not of Kubernetes itself."""
WORKERS = ("prefill", "decode")

every_case = pytest.mark.parametrize("case", CASES)


@cache
def rendered(case: str) -> Rendered:
    return Rendered(CASES[case])


# --- Kubernetes and Helm ----------------------------------------------------------------------------------------------


@every_case
def test_helm_lint_finds_nothing(case: str) -> None:
    report = helm.lint(CHART, CASES[case], strict=True, with_subcharts=True)
    assert not report["errors"]
    assert not [found for found in report["messages"] if found["severity"] > 1]


@every_case
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(case: str, version: str) -> None:
    for found in rendered(case).objects:
        if found["kind"] not in FOREIGN:
            assert not invalid(found, version), found


def test_the_schemas_notice_fields_that_do_not_exist() -> None:
    service = rendered("torch").one("Service", "pdq-bridge")
    assert invalid({**service, "spec": {**service["spec"], "selektor": {}}}, NEWEST)


@every_case
def test_no_two_objects_share_a_name(case: str) -> None:
    found = [(it["kind"], it["metadata"]["name"]) for it in rendered(case).objects]
    assert len(found) == len(set(found))


@every_case
def test_selectors_find_the_pods_they_mean(case: str) -> None:
    chart = rendered(case)
    for name, workload in chart.workloads.items():
        assert selects(workload["spec"]["selector"], labels(workload)), name
    for kind, selector in (
        ("Service", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        for name, found in chart.all(kind).items():
            wanted = found["spec"][selector]
            wanted = wanted if "matchLabels" in wanted else {"matchLabels": wanted}
            taken = [other for other, workload in chart.workloads.items() if selects(wanted, labels(workload))]
            assert taken == [name.removesuffix("-headless")], f"{kind} {name}"


@every_case
def test_pods_have_no_rights_that_they_do_not_need(case: str) -> None:
    for name, workload in rendered(case).workloads.items():
        assert pod(workload)["securityContext"]["runAsNonRoot"] is True, name
        assert pod(workload)["automountServiceAccountToken"] is name.endswith("-autoscaler"), name
        security = container(workload)["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"]["drop"] == ["ALL"], name


@every_case
def test_services_put_no_variables_into_pods(case: str) -> None:
    """``PDQ_BRIDGE_PORT=tcp://10.0.0.1:80`` of a Service named pdq-bridge would stop every program at start."""
    for workload in rendered(case).workloads.values():
        assert pod(workload)["enableServiceLinks"] is False


@pytest.mark.parametrize("case", ["everything", "autoscaler"])
def test_the_autoscaler_may_scale_its_two_pools_and_nothing_else(case: str) -> None:
    [role] = rendered(case).all("Role").values()
    pools = {f"pdq-{pool}" for pool in WORKERS}
    scaling = [rule for rule in role["rules"] if rule["apiGroups"] == ["apps"]]
    assert all(set(rule["resourceNames"]) == pools for rule in scaling)
    assert {resource for rule in scaling for resource in rule["resources"]} == {"deployments", "deployments/scale"}
    assert not {verb for rule in role["rules"] for verb in rule["verbs"]} & {"create", "delete", "*"}
    assert pools <= set(rendered(case).all("Deployment"))
    assert not rendered("torch").all("Role")


# --- What the programs really do --------------------------------------------------------------------------------------


def environment(chart: Rendered, component: str) -> dict[str, str]:
    """What a container of ``component`` finds, secrets of the chart included."""
    found: dict[str, str] = {}
    program = container(chart.programs[component])
    for source in program["envFrom"]:
        if "configMapRef" in source:
            found |= chart.one("ConfigMap", source["configMapRef"]["name"])["data"]
        else:
            found |= chart.all("Secret").get(source["secretRef"]["name"], {}).get("stringData", {})
    return found | {entry["name"]: entry.get("value", "192.0.2.7") for entry in program.get("env", [])}


@every_case
def test_every_program_accepts_its_settings(case: str) -> None:
    for component in rendered(case).programs:
        environ = environment(rendered(case), component)
        assert not unknown_settings(environ)
        load(environ)


@every_case
def test_every_program_is_started_by_a_command_that_exists(case: str) -> None:
    for component, workload in rendered(case).programs.items():
        arguments = container(workload)["args"]
        parse(arguments)
        assert component in arguments[:2]


@every_case
def test_programs_find_the_servers_of_the_chart(case: str) -> None:
    chart = rendered(case)
    for variable, port in (("PDQ_NATS_URL", 4222), ("PDQ_REDIS_URL", 6379)):
        host = environment(chart, "reaper").get(variable, "//elsewhere").split("//")[1].split(":")[0]
        if host in chart.all("Service"):
            assert port in [entry["port"] for entry in chart.one("Service", host)["spec"]["ports"]]
        else:
            assert not CASES[case].get("nats", {}).get("enabled", True)


def test_the_model_is_mounted_where_the_program_looks_and_called_what_the_values_say() -> None:
    for component in ("bridge", *WORKERS):
        program = container(rendered("torch").programs[component])
        path = program["args"][program["args"].index("--model") + 1]
        assert path in [mount["mountPath"] for mount in program["volumeMounts"]]
        assert path.rpartition("/")[2] == MODEL["name"]


def test_workers_tell_each_other_the_address_of_their_pod() -> None:
    for pool in WORKERS:
        [host] = [
            entry
            for entry in container(rendered("torch").programs[pool])["env"]
            if entry["name"] == "PDQ_TRANSPORT_UCX_HOST"
        ]
        assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_pods_have_time_to_drain() -> None:
    chart = rendered("torch")
    hook = container(chart.programs["bridge"])["lifecycle"]["preStop"]["exec"]["command"]
    for component in ("bridge", *WORKERS):
        needed = float(environment(chart, component)["PDQ_DRAIN_DEADLINE_S"]) + CLOSE_S
        needed += int(hook[1]) if component == "bridge" else 0
        assert pod(chart.programs[component])["terminationGracePeriodSeconds"] >= needed


def test_a_worker_keeps_its_name_when_its_container_is_started_again() -> None:
    for pool in WORKERS:
        program = container(rendered("torch").programs[pool])
        assert program["args"][-2:] == ["--id", "$(POD_NAME)"]
        [name] = [entry for entry in program["env"] if entry["name"] == "POD_NAME"]
        assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_probes_and_service_use_the_port_that_the_bridge_listens_on() -> None:
    bridge = container(rendered("torch").programs["bridge"])
    [port] = bridge["ports"]
    assert bridge["args"][bridge["args"].index("--port") + 1] == str(port["containerPort"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert bridge[probe]["httpGet"]["port"] == port["name"]
    [service] = rendered("torch").one("Service", "pdq-bridge")["spec"]["ports"]
    assert service["targetPort"] == port["name"]


def test_large_numbers_stay_whole_numbers() -> None:
    chart = rendered("everything")
    assert environment(chart, "bridge")["PDQ_BRIDGE_MAX_BODY_BYTES"] == "16777216"
    assert environment(chart, "decode")["PDQ_ENGINE_KV_TOKENS"] == "1048576"
    assert environment(chart, "bridge")["PDQ_BRIDGE_SILENCE_S"] == "2.5"


def test_streams_get_as_many_copies_as_the_bundled_cluster_can_hold() -> None:
    assert environment(rendered("everything"), "bridge")["PDQ_QUEUE_REPLICAS"] == "3"
    assert environment(rendered("own servers"), "bridge")["PDQ_QUEUE_REPLICAS"] == "3"
    assert environment(rendered("torch"), "bridge")["PDQ_QUEUE_REPLICAS"] == "1"


def test_pools_have_their_own_devices() -> None:
    prefill = container(rendered("everything").programs["prefill"])["resources"]
    decode = container(rendered("everything").programs["decode"])["resources"]
    assert prefill["limits"].items() >= {"nvidia.com/gpu": 2, "rdma/hca": 1}.items()
    assert prefill["requests"].items() >= {"nvidia.com/gpu": 2, "rdma/hca": 1}.items()
    assert decode["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in container(rendered("sim").programs["decode"])["resources"]["limits"]


def test_replicas_are_left_to_whoever_scales() -> None:
    for pool in WORKERS:
        assert "replicas" not in rendered("everything").programs[pool]["spec"]
        assert "replicas" not in rendered("autoscaler").programs[pool]["spec"]
        assert rendered("torch").programs[pool]["spec"]["replicas"] == 1
    assert "replicas" not in rendered("everything").programs["bridge"]["spec"]


# --- pdq's own autoscaler ---------------------------------------------------------------------------------------------


def test_the_autoscaler_runs_as_the_account_that_may_scale() -> None:
    chart = rendered("autoscaler")
    account = pod(chart.programs["autoscaler"])["serviceAccountName"]
    [binding] = chart.all("RoleBinding").values()
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    assert account in chart.all("ServiceAccount")
    others = {pod(workload)["serviceAccountName"] for name, workload in chart.programs.items() if name != "autoscaler"}
    assert account not in others


def test_the_autoscaler_is_told_which_deployments_are_its_pools() -> None:
    chart = rendered("autoscaler")
    settings = load(environment(chart, "autoscaler"))
    assert {settings.kubernetes.prefill_deployment, settings.kubernetes.decode_deployment} <= set(
        chart.all("Deployment")
    )
    assert (settings.scaling.prefill_max, settings.scaling.in_window_s) == (16, 120)
    arguments = container(chart.programs["autoscaler"])["args"]
    assert arguments[arguments.index("--model") + 1] == MODEL["name"]
    assert arguments[arguments.index("--actuator") + 1] == "kubernetes"


def test_the_autoscalers_metrics_are_served_where_they_are_scraped() -> None:
    chart = rendered("autoscaler")
    program = container(chart.programs["autoscaler"])
    [port] = program["ports"]
    assert environment(chart, "autoscaler")["PDQ_SCALING_METRICS_PORT"] == str(port["containerPort"])
    assert environment(chart, "autoscaler")["PDQ_SCALING_METRICS_HOST"] == "0.0.0.0"
    assert program["readinessProbe"]["httpGet"]["port"] == port["name"]
    [service] = chart.one("Service", "pdq-autoscaler")["spec"]["ports"]
    assert service["targetPort"] == port["name"]
    monitor = chart.one("ServiceMonitor", "pdq-autoscaler")["spec"]
    assert [entry["port"] for entry in monitor["endpoints"]] == [service["name"]]
    assert selects(monitor["selector"], chart.one("Service", "pdq-autoscaler")["metadata"]["labels"])


@pytest.mark.parametrize("port", [443, 6443])
def test_only_the_autoscaler_reaches_the_api_server(port: int) -> None:
    for case in ("autoscaler", "torch"):
        chart = rendered(case)
        for component in chart.programs:
            rules = chart.one("NetworkPolicy", f"pdq-{component}")["spec"]["egress"]
            reached = [rule for rule in rules if port in [entry["port"] for entry in rule.get("ports", [])]]
            assert bool(reached) is (component == "autoscaler")
    [rule] = [
        it for it in rendered("autoscaler").one("NetworkPolicy", "pdq-autoscaler")["spec"]["egress"] if "to" in it
    ]
    assert rule["to"] == [{"ipBlock": {"cidr": "192.0.2.1/32"}}]


# --- Who may talk to whom ---------------------------------------------------------------------------------------------


def admitted(policy: dict[str, Any], port: int, found: dict[str, str], direction: str) -> bool:
    """Does a NetworkPolicy let pods with these labels through on ``port``?"""
    side = "from" if direction == "ingress" else "to"
    for rule in policy["spec"].get(direction, []):
        peers = rule.get(side)
        known = peers is None or any(selects(peer["podSelector"], found) for peer in peers if "podSelector" in peer)
        ports = [(entry["port"], entry.get("endPort", entry["port"])) for entry in rule.get("ports", [])]
        if known and any(isinstance(low, int) and low <= port <= high for low, high in ports):
            return True
    return False


@pytest.mark.parametrize("port", [1024, 13337, 65535])
def test_kv_goes_between_workers_and_nowhere_else(port: int) -> None:
    chart = rendered("torch")
    for target in WORKERS:
        policy = chart.one("NetworkPolicy", f"pdq-{target}")
        for source, workload in chart.programs.items():
            assert admitted(policy, port, labels(workload), "ingress") is (source in WORKERS)
            assert admitted(policy, port, labels(workload), "egress") is (source in WORKERS)


@pytest.mark.parametrize(("server", "port"), [("nats", 4222), ("valkey", 6379)])
def test_only_programs_of_pdq_reach_the_servers(server: str, port: int) -> None:
    chart = rendered("everything")
    policy = chart.one("NetworkPolicy", f"pdq-{server}")
    for component, workload in chart.programs.items():
        assert admitted(policy, port, labels(workload), "ingress"), component
        assert admitted(chart.one("NetworkPolicy", f"pdq-{component}"), port, {}, "egress"), component
    assert not admitted(policy, port, {"app.kubernetes.io/name": "stranger"}, "ingress")


def test_only_the_api_is_published_by_the_ingress() -> None:
    [rule] = rendered("everything").one("Ingress", "pdq-bridge")["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]


# --- Scaling by KEDA --------------------------------------------------------------------------------------------------


def triggers(chart: Rendered, pool: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chart.one("ScaledObject", f"pdq-{pool}")["spec"]["triggers"]
    return found


@pytest.mark.parametrize("model", ["sim", "Qwen2.5-7B", "a_b-c.d", "X"])
def test_keda_asks_for_the_consumers_that_workers_make(model: str) -> None:
    chart = Rendered({"model": {**MODEL, "name": model}, "keda": {"enabled": True}})
    expected = {
        "prefill": [names.PREFILL_STREAM],
        "decode": [names.DECODE_STREAM, names.LOCAL_STREAM],
    }
    for pool, streams in expected.items():
        assert [(it["metadata"]["stream"], it["metadata"]["consumer"]) for it in triggers(chart, pool)] == [
            (stream, names.consumer(model, priority)) for stream in streams for priority in names.PRIORITIES
        ]


def test_keda_finds_the_monitoring_port_of_the_bundled_server() -> None:
    chart = rendered("everything")
    pod_name, service, namespace = triggers(chart, "prefill")[0]["metadata"]["natsServerMonitoringEndpoint"].split(".")[
        :3
    ]
    assert (pod_name, namespace) == ("pdq-nats-0", "llm")
    ports = {entry["name"]: entry["port"] for entry in chart.one("Service", service)["spec"]["ports"]}
    assert triggers(chart, "prefill")[0]["metadata"]["natsServerMonitoringEndpoint"].endswith(f":{ports['monitor']}")


@pytest.mark.parametrize("case", ["everything", "keda on prometheus"])
def test_work_for_prefill_wakes_a_decode_pool_that_sleeps(case: str) -> None:
    asked = [trigger["metadata"] for trigger in triggers(rendered(case), "decode")]
    assert any(it.get("stream") == "PDQ_PREFILL" or 'queue="prefill"' in it.get("query", "") for it in asked)


def test_an_aggregated_pool_scales_by_the_prefill_queue() -> None:
    assert "PDQ_PREFILL" in [it["metadata"]["stream"] for it in triggers(rendered("aggregated"), "decode")]
    assert "prefill" not in rendered("aggregated").programs


# --- Values that cannot work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model": {"name": "m"}}, "model.volume"),
        ({"model": {"name": "org/m"}}, "/model/name"),
        ({"model": MODEL, "nats": {"enabled": False}}, "where nats is"),
        ({"model": MODEL, "valkey": {"enabled": False}}, "where redis is"),
        ({"model": MODEL, "settings": {"NATS_URL": "x"}}, "NATS_URL"),
        ({"model": MODEL, "prefil": {}}, "prefil"),
        ({"model": MODEL, "nats": {"replicas": 2}}, "/nats/replicas"),
        ({"model": MODEL, "bridge": {"ingress": {"enabled": True}}}, "ingress.host"),
        ({"engine": "vllm"}, "/engine"),
        ({"model": MODEL, "autoscaler": {"enabled": True}, "keda": {"enabled": True}}, "choose one"),
        ({"model": MODEL, "autoscaler": {"enabled": True}, "prefill": {"enabled": False}}, "prefill.enabled"),
        ({"model": MODEL, "autoscaler": {"enabled": True, "replicas": 0}}, "/autoscaler/replicas"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        Rendered(values)


def test_a_release_of_any_name_keeps_its_objects_apart() -> None:
    one, other = Rendered({"model": MODEL}, "llama"), Rendered({"model": MODEL}, "qwen")
    assert not {(it["kind"], it["metadata"]["name"]) for it in one.objects} & {
        (it["kind"], it["metadata"]["name"]) for it in other.objects
    }
