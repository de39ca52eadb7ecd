"""A stand-in for the Kubernetes API server, as far as pdq uses it: a real HTTP server on a loopback port.

Written from the API reference and the order that the ReplicaSet documentation gives; it is not Kubernetes, and proves only
that pdq keeps to what is written there. What it does like the real one:

- Deployments: ``GET``; their ``scale`` subresource: ``GET``, ``PUT``, ``PATCH``. Pods: list with a label selector, ``GET``,
  ``PATCH`` of annotations and labels. Patches as JSON merge patch, strategic merge patch (the same for maps, which is all
  that there is here) and JSON patch; another content type is 415.
- A Scale has its Deployment's ``resourceVersion``; every write changes it, and so does the controller's own status. A write
  that names another version is 409, one that names none is not checked. A size of 0 is left out of the answer.
- A bearer token (401), RBAC rules as a Role has them (403), unknown objects (404), invalid values (422); all refusals are
  ``Status`` objects, with the messages of the real server.
- A controller for each Deployment makes pods that are missing and marks as terminating those that are too many: without a
  node before with, Pending before Running, not ready before ready, lower ``pod-deletion-cost`` before higher, newer before
  older. Every pod has a node to itself, so the order by nodes does not apply; nor do restarts.
"""

import asyncio
import json
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

from tests.kubernetes_patches import Object, Refusal, patched

COST = "controller.kubernetes.io/pod-deletion-cost"
TOKEN = "token-of-the-service-account"
USER = "system:serviceaccount:llm:pdq-autoscaler"
EVERYTHING = [{"apiGroups": ["", "apps"], "resources": ["*"], "verbs": ["*"]}]
PATH = r"/(?:api/v1|apis/(apps)/v1)/namespaces/([^/]+)/([a-z]+)(?:/([^/]+)(?:/([a-z]+))?)?"
INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True)
class Recorded:
    """One request, as it came."""

    method: str
    path: str
    query: Mapping[str, str]
    content_type: str
    body: Any


@dataclass
class KubernetesApi:
    """``async with`` it; then ``url`` is where it listens, and ``requests`` all that it was asked."""

    namespace: str = "llm"
    rules: Sequence[Mapping[str, Any]] = field(default_factory=lambda: EVERYTHING)
    kubelet: bool = True
    """New pods run and are ready at once; without it they have no node until ``start`` and ``ready`` are called."""
    tls: ssl.SSLContext | None = None
    before: Callable[[Recorded], None] = lambda request: None
    """Called before a request is judged: what somebody else does meanwhile."""
    silent: bool = False
    """Requests are taken, and never answered."""
    requests: list[Recorded] = field(default_factory=list)
    deployments: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    _writes: int = 1000
    _born: int = 0

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        self.port: int = self._runner.addresses[0][1]
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    # --- What a cluster's other inhabitants do ------------------------------------------------------------------------

    def deploy(self, name: str, replicas: int) -> None:
        """As ``kubectl apply`` of one of the chart's pools."""
        labels = {
            "app.kubernetes.io/name": "pdq",
            "app.kubernetes.io/instance": name.rpartition("-")[0],
            "app.kubernetes.io/component": name.rpartition("-")[2],
        }
        self.deployments[name] = {
            "kind": "Deployment",
            "apiVersion": "apps/v1",
            "metadata": {**self._metadata(name), "labels": labels, "generation": 1},
            "spec": {"replicas": replicas, "selector": {"matchLabels": labels}},
            "status": {},
        }
        self._reconcile(name)

    def touch(self, name: str) -> None:
        """Anything that changes the Deployment, and with it its version."""
        self._written(self.deployments[name])

    def resize(self, name: str, replicas: int) -> None:
        """As ``kubectl scale``."""
        self.deployments[name]["spec"]["replicas"] = replicas
        self._written(self.deployments[name])
        self._reconcile(name)

    def start(self, pod: str) -> None:
        """It has got a node, and its container runs."""
        self.pods[pod]["spec"]["nodeName"] = f"node-of-{pod}"
        self.pods[pod]["status"] = {"phase": "Running", "conditions": _conditions(ready=False)}
        self._written(self.pods[pod])

    def ready(self, pod: str) -> None:
        """Its readiness probe succeeds."""
        self.pods[pod]["status"]["conditions"] = _conditions(ready=True)
        self._written(self.pods[pod])

    def unready(self, pod: str) -> None:
        """Its readiness probe fails."""
        self.pods[pod]["status"]["conditions"] = _conditions(ready=False)
        self._written(self.pods[pod])

    def gone(self, pod: str) -> None:
        """A pod that was terminating has ended."""
        assert "deletionTimestamp" in self.pods[pod]["metadata"]
        del self.pods[pod]

    # --- What one looks for -------------------------------------------------------------------------------------------

    @property
    def writes(self) -> list[Recorded]:
        return [request for request in self.requests if request.method != "GET"]

    def size(self, deployment: str) -> int:
        size: int = self.deployments[deployment]["spec"]["replicas"]
        return size

    def running(self, deployment: str) -> list[str]:
        """Its pods, oldest first; those that are told to go not."""
        return [pod["metadata"]["name"] for pod in self._pods_of(deployment) if _active(pod)]

    def leaving(self, deployment: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._pods_of(deployment) if not _active(pod)]

    def cost(self, pod: str) -> str | None:
        cost: str | None = self.pods[pod]["metadata"].get("annotations", {}).get(COST)
        return cost

    # --- The controller -----------------------------------------------------------------------------------------------

    def _reconcile(self, name: str) -> None:
        deployment = self.deployments[name]
        active = [pod for pod in self._pods_of(name) if _active(pod)]
        missing = deployment["spec"]["replicas"] - len(active)
        for _ in range(missing):
            self._create_pod(deployment)
        for pod in sorted(active, key=_goes_first)[: max(0, -missing)]:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._written(pod)
        deployment["status"] = {"replicas": deployment["spec"]["replicas"]}
        self._written(deployment)

    def _create_pod(self, deployment: Object) -> None:
        self._born += 1
        name = f"{deployment['metadata']['name']}-5d8f7c9b4-{self._born:05x}"
        owner = {"kind": "ReplicaSet", "uid": f"replicas-{deployment['metadata']['uid']}", "controller": True}
        self.pods[name] = {
            "metadata": {
                **self._metadata(name),
                "labels": {**deployment["spec"]["selector"]["matchLabels"], "pod-template-hash": "5d8f7c9b4"},
                "ownerReferences": [owner],
            },
            "spec": {"nodeName": f"node-{self._born}"} if self.kubelet else {},
            "status": {
                "phase": "Running" if self.kubelet else "Pending",
                "conditions": _conditions(ready=True) if self.kubelet else [UNSCHEDULABLE],
            },
        }

    def _pods_of(self, deployment: str) -> list[Object]:
        owner = f"replicas-{self.deployments[deployment]['metadata']['uid']}"
        return [pod for pod in self.pods.values() if pod["metadata"]["ownerReferences"][0]["uid"] == owner]

    # --- The API server -----------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            return self._refused(Refusal(400, "BadRequest", "the object provided is unrecognized"))
        asked = Recorded(request.method, request.path, dict(request.query), request.content_type if raw else "", body)
        self.before(asked)
        self.requests.append(asked)
        if self.silent:
            await asyncio.Event().wait()
        try:
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            return web.json_response(self._judge(asked))
        except Refusal as refusal:
            return self._refused(refusal)

    @staticmethod
    def _refused(refusal: Refusal) -> web.Response:
        return web.json_response(refusal.status, status=refusal.code)

    def _judge(self, asked: Recorded) -> Object:
        place = re.fullmatch(PATH, asked.path)
        if place is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        group, namespace, kind, name, part = place.groups("")
        verb = {"GET": "get" if name else "list", "PUT": "update", "PATCH": "patch"}.get(asked.method, asked.method)
        self._authorize(verb, group, namespace, kind, name, part)
        match kind, verb, part:
            case "deployments", "get", "":
                return self._existing(self.deployments, group, namespace, kind, name)
            case "deployments", "get", "scale":
                return _scale(self._existing(self.deployments, group, namespace, kind, name))
            case "deployments", "update" | "patch", "scale":
                return self._rescale(self._existing(self.deployments, group, namespace, kind, name), verb, asked)
            case "pods", "list", "":
                chosen = _selector(asked.query.get("labelSelector", ""))
                found = self.pods.values() if namespace == self.namespace else ()
                items = [pod for pod in found if chosen(pod["metadata"]["labels"])]
                return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
            case "pods", "get", "":
                return self._existing(self.pods, group, namespace, kind, name)
            case "pods", "patch", "":
                return self._annotate(self._existing(self.pods, group, namespace, kind, name), asked)
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _authorize(self, verb: str, group: str, namespace: str, kind: str, name: str, part: str) -> None:
        resource = f"{kind}/{part}" if part else kind
        for rule in self.rules:
            if (
                group in rule["apiGroups"]
                and {resource, "*"} & set(rule["resources"])
                and {verb, "*"} & set(rule["verbs"])
                and (name in rule["resourceNames"] if "resourceNames" in rule else True)
            ):
                return
        subject = f"{_qualified(group, kind)} {json.dumps(name)}" if name else _qualified(group, kind)
        raise Refusal(
            403,
            "Forbidden",
            f'{subject} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in API group "{group}" '
            f'in the namespace "{namespace}"',
            {"name": name, "group": group, "kind": kind},
        )

    def _existing(self, objects: Mapping[str, Object], group: str, namespace: str, kind: str, name: str) -> Object:
        if namespace != self.namespace or name not in objects:
            message = f'{_qualified(group, kind)} "{name}" not found'
            raise Refusal(404, "NotFound", message, {"name": name, "group": group, "kind": kind})
        return objects[name]

    def _rescale(self, deployment: Object, verb: str, asked: Recorded) -> Object:
        name = deployment["metadata"]["name"]
        before = _scale(deployment)
        after = asked.body if verb == "update" else patched(before, asked.content_type, asked.body)
        replicas = (after.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas not in INT32:
            raise Refusal(400, "BadRequest", "json: cannot unmarshal: ScaleSpec.spec.replicas is an int32")
        if replicas < 0:
            raise _invalid(
                "autoscaling", "Scale", name, "spec.replicas", replicas, "must be greater than or equal to 0"
            )
        version = (after.get("metadata") or {}).get("resourceVersion")
        if version not in (None, "", deployment["metadata"]["resourceVersion"]):
            raise Refusal(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on deployments.apps "{name}": the object has been modified; '
                "please apply your changes to the latest version and try again",
                {"name": name, "group": "apps", "kind": "deployments"},
            )
        deployment["spec"]["replicas"] = replicas
        self._written(deployment)
        answer = _scale(deployment)
        self._reconcile(name)
        return answer

    def _annotate(self, pod: Object, asked: Recorded) -> Object:
        name = pod["metadata"]["name"]
        after = patched(pod, asked.content_type, asked.body)
        if {**after, "metadata": None} != {**pod, "metadata": None}:
            raise _invalid("", "Pod", name, "spec", "...", "pod updates may not change fields other than those listed")
        cost = after["metadata"].get("annotations", {}).get(COST)
        if cost is not None and not (re.fullmatch(r"0|-?[1-9][0-9]*", cost) and int(cost) in INT32):
            place = f"metadata.annotations[{COST}]"
            raise _invalid("", "Pod", name, place, cost, "must be a 32bit integer")
        for part in ("annotations", "labels"):
            pod["metadata"][part] = after["metadata"].get(part, {})
        self._written(pod)
        return pod

    def _metadata(self, name: str) -> Object:
        self._writes += 1
        return {
            "name": name,
            "namespace": self.namespace,
            "uid": f"uid-of-{name}",
            "resourceVersion": str(self._writes),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }

    def _written(self, found: Object) -> None:
        self._writes += 1
        found["metadata"]["resourceVersion"] = str(self._writes)


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
}


def _conditions(ready: bool) -> list[Object]:
    return [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]


def _ready(pod: Object) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"]["conditions"]


def _active(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ("Succeeded", "Failed")


def _goes_first(pod: Object) -> tuple[Any, ...]:
    """The ReplicaSet controller's order."""
    cost = int(pod["metadata"].get("annotations", {}).get(COST, 0))
    age = int(pod["metadata"]["name"].rpartition("-")[2], 16)
    return "nodeName" in pod["spec"], pod["status"]["phase"] == "Running", _ready(pod), cost, -age


def _qualified(group: str, kind: str) -> str:
    return f"{kind}.{group}" if group else kind


def _invalid(group: str, kind: str, name: str, place: str, value: object, why: str) -> Refusal:
    said = f"{place}: Invalid value: {json.dumps(value)}: {why}"
    cause = {"reason": "FieldValueInvalid", "message": said.removeprefix(f"{place}: "), "field": place}
    details = {"name": name, "group": group, "kind": kind, "causes": [cause]}
    return Refusal(422, "Invalid", f'{_qualified(group, kind)} "{name}" is invalid: {said}', details)


def _scale(deployment: Object) -> Object:
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    labels = deployment["spec"]["selector"]["matchLabels"]
    replicas = deployment["spec"]["replicas"]
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: deployment["metadata"][key] for key in kept},
        "spec": {"replicas": replicas} if replicas else {},
        "status": {
            "replicas": deployment["status"].get("replicas", 0),
            "selector": ",".join(f"{key}={labels[key]}" for key in sorted(labels)),
        },
    }


def _selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """Requirements by equality, as ``status.selector`` of these Deployments has them."""
    wanted = [re.fullmatch(r"([\w./-]+)=([\w.-]*)", part) for part in filter(None, text.split(","))]
    if None in wanted:
        raise Refusal(400, "BadRequest", f"unable to parse requirement: {text}")
    pairs = {found[1]: found[2] for found in wanted if found}
    return lambda labels: pairs.items() <= labels.items()


def kubeconfig(api: KubernetesApi, file: Path, **context: str) -> str:
    """With a context that leads to it, and one that leads nowhere."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {"name": "stand-in", "cluster": {"server": api.url}},
            {"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}},
        ],
        "users": [{"name": "somebody", "user": {"token": TOKEN}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "stand-in", "user": "somebody", **context}},
            {"name": "away", "context": {"cluster": "nowhere", "user": "somebody"}},
        ],
    }
    file.write_text(yaml.safe_dump(config))
    return str(file)
