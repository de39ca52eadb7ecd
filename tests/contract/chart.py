"""The Helm chart rendered by Helm's own engine, and what one looks for in the result."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "pdq"
MODEL = {"name": "Qwen2.5-7B", "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}

CASES: dict[str, dict[str, Any]] = {
    "torch": {"model": MODEL},
    "sim": {
        "engine": "sim",
        "model": {"name": "sim"},
        "prefill": {"gpu": {"count": 0}},
        "decode": {"gpu": {"count": 0}},
    },
    "own servers": {
        "model": MODEL,
        "nats": {"enabled": False},
        "valkey": {"enabled": False},
        "connections": {"natsUrl": "tls://nats.example:4222", "redisUrl": "rediss://redis.example:6379/0"},
        "credentials": {
            "values": {"PDQ_NATS_USER": "pdq", "PDQ_NATS_PASSWORD": "n", "PDQ_REDIS_PASSWORD": "r"},
            "filesSecret": "pdq-files",
        },
        "settings": {"PDQ_NATS_TLS_CA": "/etc/pdq/secrets/ca.crt", "PDQ_QUEUE_REPLICAS": 3},
        "networkPolicy": {"serversAt": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "bridgeFrom": [{"podSelector": {}}]},
    },
    "servers named by a secret": {
        "model": MODEL,
        "nats": {"enabled": False},
        "valkey": {"enabled": False},
        "credentials": {"existingSecret": "pdq-servers"},
    },
    "everything": {
        "model": {**MODEL, "subPath": "qwen/2.5"},
        "image": {"registry": "registry.example/llm", "tag": "1.2.3"},
        "imagePullSecrets": [{"name": "pull"}],
        "nats": {"replicas": 3},
        "settings": {"PDQ_LEASE_TTL_MS": 15000, "PDQ_BRIDGE_MAX_BODY_BYTES": 16777216},
        "bridge": {
            "replicas": None,
            "settings": {"PDQ_BRIDGE_SILENCE_S": 2.5},
            "ingress": {"enabled": True, "host": "llm.example", "className": "nginx", "tlsSecret": "llm-tls"},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
        },
        "prefill": {
            "gpu": {"count": 2},
            "devices": {"rdma/hca": 1},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}},
            "runtimeClassName": "nvidia",
            "nodeSelector": {"gpu": "large"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        },
        "decode": {"replicas": None, "keda": {"minReplicas": 0}, "settings": {"PDQ_ENGINE_KV_TOKENS": 1048576}},
        "autoscaler": {"rbac": True},
        "keda": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"monitoringFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    },
    "autoscaler": {
        "model": MODEL,
        "autoscaler": {
            "enabled": True,
            "replicas": 2,
            "settings": {"PDQ_SCALING_PREFILL_MAX": 16, "PDQ_SCALING_IN_WINDOW_S": 120},
            "podAnnotations": {"example": "yes"},
        },
        "serviceMonitor": {"enabled": True},
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "apiServerAt": [{"ipBlock": {"cidr": "192.0.2.1/32"}}],
        },
    },
    "keda on prometheus": {
        "model": MODEL,
        "keda": {"enabled": True, "source": "prometheus"},
        "decode": {"keda": {"minReplicas": 0}},
    },
    "aggregated": {
        "model": MODEL,
        "settings": {"PDQ_HANDOFF_MODE": "aggregated"},
        "prefill": {"enabled": False},
        "keda": {"enabled": True},
    },
}


class Rendered:
    """All objects of one rendering."""

    def __init__(self, values: Mapping[str, Any], release: str = "pdq") -> None:
        with helm.Chart.load(CHART) as chart:
            files = chart.render(dict(values), name=release, namespace="llm")
        self.notes = next(text for path, text in files.items() if path.endswith("NOTES.txt"))
        documents = [
            found
            for path, text in files.items()
            if path.endswith(".yaml")
            for found in yaml.safe_load_all(text)
            if found
        ]
        self.objects: list[dict[str, Any]] = documents

    def all(self, kind: str) -> dict[str, dict[str, Any]]:
        """By name."""
        return {found["metadata"]["name"]: found for found in self.objects if found["kind"] == kind}

    def one(self, kind: str, name: str) -> dict[str, Any]:
        return self.all(kind)[name]

    @property
    def workloads(self) -> dict[str, dict[str, Any]]:
        return self.all("Deployment") | self.all("StatefulSet")

    @property
    def programs(self) -> dict[str, dict[str, Any]]:
        """pdq's own Deployments, by component."""
        return {
            found["metadata"]["labels"]["app.kubernetes.io/component"]: found
            for found in self.all("Deployment").values()
        }


def pod(workload: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def container(workload: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    [found] = pod(workload)["containers"]
    return found


def labels(workload: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def selects(selector: Mapping[str, Any], found: Mapping[str, str]) -> bool:
    """Does a Kubernetes label selector take these labels?"""
    wanted = selector.get("matchLabels", {}).items() <= found.items()
    return wanted and all(
        found.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", [])
        if rule["operator"] == "In"
    )


def invalid(found: Mapping[str, Any], version: str) -> list[str]:
    """What Kubernetes of this version would not accept, unknown fields included, in words."""
    group, _, api = found["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (found["kind"].lower(), group.split(".")[0], api)))
    return [f"{error.json_path}: {error.message}" for error in _validator(name, version).iter_errors(found)]


@cache
def _validator(name: str, version: str) -> Draft202012Validator:
    """From the schemas that kubernetes-validate ships; its own function reads megabytes again for every object."""
    return Draft202012Validator(_schema(f"{name}.json", version), registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    definitions = "_definitions.json"
    # Crawled here once; otherwise at every reference that is looked up, which are thousands.
    return Registry().with_resource(definitions, DRAFT202012.create_resource(_schema(definitions, version))).crawl()


def _schema(file: str, version: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return json.loads((folder / file).read_text())
