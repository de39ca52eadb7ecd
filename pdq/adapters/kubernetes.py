"""Kubernetes: each pool is a Deployment, its size that Deployment's ``scale`` subresource, a worker's id its pod's name.

Kubernetes, not pdq, picks the pods that go when a Deployment shrinks. It can be told: among pods that are equally ready,
the ReplicaSet controller takes the one with the lowest ``pod-deletion-cost`` first. So the costs are written before the
size is, and taken away from all pods that shall stay. What Kubernetes puts before the cost is left to it, because those
pods hold nothing yet: pods without a node come first, then pending ones, then those that are not ready. Costs compare
pods of one ReplicaSet only; while a rollout runs, the Deployment controller spreads the size over two of them.

A size is written for the version of the Deployment from which it was decided: if anything has changed since, the API
server refuses (409), and everything is read and decided again. All that is ever sent goes through one function, as a
``Request``, so a rehearsal shows exactly what a real run would send.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import ClientError
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from kubernetes_asyncio.config.incluster_config import SERVICE_HOST_ENV_NAME
from kubernetes_asyncio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION
from msgspec import Struct
from yaml import YAMLError

from pdq.core.errors import InvalidRequest, InvalidSettings, Unavailable
from pdq.core.settings import KubernetesSettings
from pdq.ports.workers import Pool

T = TypeVar("T")

COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Of a pod without it: 0."""
MERGE: Final = "application/merge-patch+json"
ATTEMPTS: Final = 5
"""How often a size is decided anew because the Deployment has changed meanwhile."""
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Of objects in Kubernetes."""


class Request(Struct, frozen=True, omit_defaults=True):
    """One HTTP request to the API server."""

    method: str
    path: str
    query: Mapping[str, str] = {}
    content_type: str = ""
    body: Mapping[str, Any] | None = None


class _Conflict(Unavailable):
    """The object is not any more what it was when it was read."""


class _Missing(Unavailable):
    """There is no such object."""


class _Metadata(Struct, frozen=True, rename="camel"):
    name: str
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: Mapping[str, str] = {}
    owner_references: tuple[Mapping[str, Any], ...] = ()


class _ScaleSpec(Struct, frozen=True):
    replicas: int = 0
    """The API server leaves a 0 out."""


class _ScaleStatus(Struct, frozen=True):
    selector: str = ""


class _Scale(Struct, frozen=True):
    metadata: _Metadata
    spec: _ScaleSpec = _ScaleSpec()
    status: _ScaleStatus = _ScaleStatus()


class _PodStatus(Struct, frozen=True):
    phase: str = ""
    conditions: tuple[Mapping[str, Any], ...] = ()


class _Pod(Struct, frozen=True):
    metadata: _Metadata
    status: _PodStatus = _PodStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def counts(self) -> bool:
        """Among the replicas? Not those that are told to go or have ended."""
        return self.metadata.deletion_timestamp is None and self.status.phase not in ("Failed", "Succeeded")

    @property
    def ready(self) -> bool:
        return any(it.get("type") == "Ready" and it.get("status") == "True" for it in self.status.conditions)

    @property
    def controller(self) -> str | None:
        return next((it["uid"] for it in self.metadata.owner_references if it.get("controller")), None)


class _Pods(Struct, frozen=True):
    items: tuple[_Pod, ...] = ()


class _Status(Struct, frozen=True):
    message: str


class KubernetesActuator:
    """``Actuator`` over two Deployments of one namespace. With ``rehearse`` it reads, and changes nothing."""

    name: Final = "kubernetes"

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        deployments: Mapping[Pool, str],
        timeout_s: float = 10.0,
        rehearse: bool = False,
    ) -> None:
        for name in (namespace, *deployments.values()):
            if not NAME.fullmatch(name):
                raise InvalidSettings(f"{name!r} is no name of a namespace or Deployment")
        self._api = api
        self._namespace = namespace
        self._deployments = deployments
        self._timeout_s = timeout_s
        self._rehearse = rehearse
        self.changes: list[Request] = []
        """All requests that have changed something, or would have."""

    async def sizes(self) -> Mapping[Pool, int]:
        return {pool: (await self._scale(pool)).spec.replicas for pool in self._deployments}

    async def scale(self, pool: Pool, replicas: int, leaving_first: Sequence[str]) -> None:
        async def resizing() -> Sequence[Request]:
            scale = await self._scale(pool)
            if replicas == scale.spec.replicas:
                return ()
            pods = await self._pods(scale)
            if replicas > scale.spec.replicas:
                return (self._resize(pool, scale, replicas), *self._priced(pods, ()))
            known = {pod.name for pod in pods}
            leaving = [worker for worker in leaving_first if worker in known][: max(0, len(pods) - replicas)]
            return (*self._priced(pods, leaving), self._resize(pool, scale, replicas))

        await self._carry_out(resizing)

    async def remove(self, worker: str) -> Pool:
        """This worker goes for good: its pod drains, and its pool has one worker less. Says which pool.

        Raises:
            InvalidRequest: neither pool has such a pod.
            Unavailable: Kubernetes would take another pod away now, or cannot be asked.
        """
        found: list[Pool] = []

        async def removing() -> Sequence[Request]:
            pool, scale, pods = await self._pool_of(worker)
            found.append(pool)
            self._check_that_costs_decide(scale, pods)
            return (*self._priced(pods, (worker,)), self._resize(pool, scale, len(pods) - 1))

        await self._carry_out(removing)
        return found[-1]

    async def _pool_of(self, worker: str) -> tuple[Pool, _Scale, Sequence[_Pod]]:
        for pool in self._deployments:
            scale = await self._scale(pool)
            pods = await self._pods(scale)
            if any(pod.name == worker for pod in pods):
                return pool, scale, pods
        raise InvalidRequest(
            f"no pod {worker!r} in {' or '.join(self._deployments.values())} (namespace {self._namespace}), "
            "or it has been told to go already; a worker's id is its pod's name",
            field="worker",
        )

    def _check_that_costs_decide(self, scale: _Scale, pods: Sequence[_Pod]) -> None:
        unsettled = [pod.name for pod in pods if not pod.ready]
        if len({pod.controller for pod in pods}) > 1:
            why = "a rollout is under way"
        elif unsettled:
            why = f"{', '.join(unsettled)} is not ready, and would go first"
        elif len(pods) != scale.spec.replicas:
            why = f"it has {len(pods)} of {scale.spec.replicas} pods"
        else:
            return
        raise Unavailable(
            f"{scale.metadata.name} is not settled: {why}, so Kubernetes may take another pod than the one that you name. "
            "Try again when the Deployment is complete"
        )

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _priced(self, pods: Sequence[_Pod], leaving: Sequence[str]) -> Sequence[Request]:
        """Those that leave get the lowest costs, in their order; nobody else has one."""
        costs = {worker: str(place - len(leaving)) for place, worker in enumerate(leaving)}
        return [
            Request(
                "PATCH",
                f"/api/v1/namespaces/{self._namespace}/pods/{quote(pod.name)}",
                content_type=MERGE,
                body={"metadata": {"annotations": {COST: costs.get(pod.name)}}},
            )
            for pod in pods
            if pod.metadata.annotations.get(COST) != costs.get(pod.name)
        ]

    def _resize(self, pool: Pool, read: _Scale, replicas: int) -> Request:
        body = {"metadata": {"resourceVersion": read.metadata.resource_version}, "spec": {"replicas": replicas}}
        return Request("PATCH", self._scale_path(pool), content_type=MERGE, body=body)

    def _scale_path(self, pool: Pool) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{self._deployments[pool]}/scale"

    async def _scale(self, pool: Pool) -> _Scale:
        return await self._read(Request("GET", self._scale_path(pool)), _Scale)

    async def _pods(self, scale: _Scale) -> Sequence[_Pod]:
        """The pods that count as its replicas."""
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        found = await self._read(Request("GET", path, query={"labelSelector": scale.status.selector}), _Pods)
        return [pod for pod in found.items if pod.counts]

    async def _carry_out(self, decide: Callable[[], Awaitable[Sequence[Request]]]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                for change in await decide():
                    await self._change(change)
                return
            except _Conflict:
                if attempt == ATTEMPTS:
                    raise

    async def _change(self, request: Request) -> None:
        self.changes.append(request)
        if self._rehearse:
            return
        try:
            await self._send(request)
        except _Missing:
            if "/pods/" not in request.path:
                raise
            # It has gone since it was listed, which is what a cost is for.

    async def _read(self, request: Request, kind: type[T]) -> T:
        answer = await self._send(request)
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise Unavailable(f"{self._host} answers {request.path} with something else: {error}") from error

    async def _send(self, request: Request) -> object:
        headers = {"Accept": "application/json"} | ({"Content-Type": request.content_type} if request.body else {})
        try:
            answer, _, _ = await self._api.call_api(
                request.path,
                request.method,
                query_params=list(request.query.items()),
                header_params=headers,
                body=request.body,
                response_types_map={200: "object"},
                auth_settings=["BearerToken"],
                _request_timeout=self._timeout_s,
            )
        except ApiException as error:
            raise self._refusal(request, error) from error
        except TimeoutError as error:
            raise Unavailable(
                f"the Kubernetes API server {self._host} did not answer within {self._timeout_s:g} s "
                "(PDQ_KUBERNETES_TIMEOUT_S)"
            ) from error
        except (ClientError, OSError, ConfigException, UnicodeDecodeError) as error:
            raise Unavailable(f"the Kubernetes API server {self._host} cannot be asked: {error}") from error
        return answer

    @property
    def _host(self) -> str:
        return str(self._api.configuration.host)

    def _refusal(self, request: Request, error: ApiException) -> Unavailable:
        said = _message(error)
        match error.status:
            case 401:
                return Unavailable(
                    f"{self._host} accepts no such token ({said}): renew that of the kubeconfig or the service account"
                )
            case 403:
                return Unavailable(
                    f"Kubernetes forbids it: {said}. The chart grants these rights to the service account "
                    "<release>-autoscaler with autoscaler.enabled, or autoscaler.rbac for a scaler of your own"
                )
            case 404:
                return _Missing(
                    f"Kubernetes does not know {request.path}: {said}. Another release or namespace? See "
                    "PDQ_KUBERNETES_NAMESPACE, PDQ_KUBERNETES_PREFILL_DEPLOYMENT and PDQ_KUBERNETES_DECODE_DEPLOYMENT"
                )
            case 409:
                return _Conflict(f"Kubernetes refused {ATTEMPTS} times, the last time with: {said}")
            case status:
                return Unavailable(f"Kubernetes refused {request.method} {request.path} with {status}: {said}")


def _message(error: ApiException) -> str:
    """Of the ``Status`` object that the API server sends with a refusal."""
    try:
        return msgspec.json.decode(error.body or "", type=_Status).message
    except msgspec.DecodeError:  # a proxy's page, perhaps
        return str(error.reason)


@asynccontextmanager
async def connect(settings: KubernetesSettings, rehearse: bool = False) -> AsyncIterator[KubernetesActuator]:
    """As a pod's service account or, outside of a pod or if a kubeconfig or context is named, by a kubeconfig.

    Raises:
        InvalidSettings: neither can be used.
    """
    configuration = Configuration()
    try:
        if settings.context or settings.kubeconfig or SERVICE_HOST_ENV_NAME not in os.environ:
            namespace = await _by_kubeconfig(settings, configuration)
        else:
            namespace = _by_service_account(settings, configuration)
        api = ApiClient(configuration)
    except (ConfigException, OSError) as error:
        raise InvalidSettings(f"no way to a Kubernetes API server: {error}") from error
    api.user_agent = "pdq"
    deployments = {Pool.PREFILL: settings.prefill_deployment, Pool.DECODE: settings.decode_deployment}
    async with api:
        yield KubernetesActuator(api, namespace, deployments, settings.timeout_s, rehearse)


async def _by_kubeconfig(settings: KubernetesSettings, configuration: Configuration) -> str:
    paths = settings.kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    if not any(map(_is_file, paths.split(os.pathsep))):
        raise InvalidSettings(
            f"this is no pod, and there is no kubeconfig {paths}: set KUBECONFIG or PDQ_KUBERNETES_KUBECONFIG"
        )
    try:
        async with asyncio.timeout(settings.timeout_s):  # it may call a program that fetches a token
            loader = await load_kube_config(paths, settings.context or None, configuration)
        context = (loader.current_context or {})["context"]
    except (AssertionError, KeyError, TypeError, ValueError, YAMLError) as error:
        raise InvalidSettings(f"kubeconfig {paths} cannot be understood: {error or type(error).__name__}") from error
    return settings.namespace or str(context.get("namespace") or "default")


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()


def _by_service_account(settings: KubernetesSettings, configuration: Configuration) -> str:
    directory = Path(settings.service_account)
    load_incluster_config(
        configuration, token_filename=str(directory / "token"), cert_filename=str(directory / "ca.crt")
    )
    return settings.namespace or (directory / "namespace").read_text().strip()
