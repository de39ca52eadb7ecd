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

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote

from kubernetes_asyncio.client import ApiClient

from pdq.adapters.kubernetes.api import ApiServer, Conflict, Missing, open_client
from pdq.adapters.kubernetes.objects import COST, Deployment, Pod, Pods, Request, Scale
from pdq.core.errors import InvalidSettings, Unavailable, WorkerNotFound
from pdq.core.settings import KubernetesSettings
from pdq.ports import Pool

log = logging.getLogger(__name__)

MERGE: Final = "application/merge-patch+json"
ATTEMPTS: Final = 5
"""How often a size is decided anew because the Deployment has changed meanwhile."""
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Of objects in Kubernetes."""


class KubernetesActuator:
    """``Actuator`` over two Deployments of one namespace. With ``rehearse`` it reads, and changes nothing.

    ``on_change`` gets every request that changes something, or would.
    """

    name: Final = "kubernetes"

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        deployments: Mapping[Pool, str],
        timeout_s: float = 10.0,
        rehearse: bool = False,
        on_change: Callable[[Request], None] = lambda request: None,
    ) -> None:
        for name in (namespace, *deployments.values()):
            if not NAME.fullmatch(name):
                raise InvalidSettings(f"{name!r} is no name of a namespace or Deployment")
        self._api = ApiServer(client, timeout_s)
        self._namespace = namespace
        self._deployments = deployments
        self._rehearse = rehearse
        self._on_change = on_change

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

    async def trouble(self, pool: Pool) -> str:
        scale = await self._scale(pool)
        pods = await self._pods(scale)
        found = next((pod.trouble for pod in pods if pod.trouble), "")
        if found or len(pods) >= scale.spec.replicas:
            return found
        path = self._scale_path(pool).removesuffix("/scale")
        return (await self._api.read(Request("GET", path), Deployment)).trouble

    async def remove(self, worker: str) -> Pool:
        """This worker goes for good: its pod drains, and its pool has one worker less. Says which pool.

        Raises:
            WorkerNotFound: neither pool has such a pod.
            Unavailable: Kubernetes would take another pod away now, or cannot be asked.
        """
        found: list[Pool] = []

        async def removing() -> Sequence[Request]:
            pool, scale, pods = await self._pool_of(worker)
            found.append(pool)
            self._check_that_it_would_go(worker, scale, pods)
            return (*self._priced(pods, (worker,)), self._resize(pool, scale, len(pods) - 1))

        await self._carry_out(removing)
        return found[-1]

    async def _pool_of(self, worker: str) -> tuple[Pool, Scale, Sequence[Pod]]:
        for pool in self._deployments:
            scale = await self._scale(pool)
            pods = await self._pods(scale)
            if any(pod.name == worker for pod in pods):
                return pool, scale, pods
        raise WorkerNotFound(
            f"no pod {worker!r} in {' or '.join(self._deployments.values())} (namespace {self._namespace}), "
            "or it has been told to go already; a worker's id is its pod's name"
        )

    def _check_that_it_would_go(self, worker: str, scale: Scale, pods: Sequence[Pod]) -> None:
        unsettled = [pod.name for pod in pods if not pod.ready and pod.name != worker]
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

    def _priced(self, pods: Sequence[Pod], leaving: Sequence[str]) -> Sequence[Request]:
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

    def _resize(self, pool: Pool, read: Scale, replicas: int) -> Request:
        return _resized(self._scale_path(pool), read.metadata.resource_version, replicas)

    def _scale_path(self, pool: Pool) -> str:
        return _scale_path(self._namespace, self._deployments[pool])

    async def _scale(self, pool: Pool) -> Scale:
        return await self._api.read(Request("GET", self._scale_path(pool)), Scale)

    async def _pods(self, scale: Scale) -> Sequence[Pod]:
        """The pods that count as its replicas."""
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        found = await self._api.read(Request("GET", path, query={"labelSelector": scale.status.selector}), Pods)
        return [pod for pod in found.items or () if pod.counts]

    async def _carry_out(self, decide: Callable[[], Awaitable[Sequence[Request]]]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                for change in await decide():
                    await self._change(change)
                return
            except Conflict as error:
                if attempt == ATTEMPTS:
                    raise Unavailable(f"gave up after {ATTEMPTS} attempts: {error}") from error

    async def _change(self, request: Request) -> None:
        log.info("%s %s %s %s", "would send" if self._rehearse else "sends", request.method, request.path, request.body)
        self._on_change(request)
        if self._rehearse:
            return
        try:
            await self._api.send(request)
        except Missing:
            if "/pods/" not in request.path:
                raise
            # It has gone since it was listed, which is what a cost is for.


def _scale_path(namespace: str, deployment: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}/scale"


def _resized(path: str, version: str, replicas: int) -> Request:
    body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
    return Request("PATCH", path, content_type=MERGE, body=body)


def outline(settings: KubernetesSettings, pool: Pool, replicas: int) -> Sequence[Request]:
    """What resizing a pool asks and sends, as far as that is known without an API server that answers."""
    path = _scale_path(settings.namespace or "default", _deployments(settings)[pool])
    return Request("GET", path), _resized(path, "<that of the answer>", replicas)


def _deployments(settings: KubernetesSettings) -> Mapping[Pool, str]:
    return {Pool.PREFILL: settings.prefill_deployment, Pool.DECODE: settings.decode_deployment}


@asynccontextmanager
async def connect(
    settings: KubernetesSettings,
    rehearse: bool = False,
    on_change: Callable[[Request], None] = lambda request: None,
) -> AsyncIterator[KubernetesActuator]:
    """As the settings, and the place where this program runs, say.

    Raises:
        InvalidSettings: there is no way to an API server, or a name is none.
    """
    made, namespace = await open_client(settings)
    async with made:
        yield KubernetesActuator(made, namespace, _deployments(settings), settings.timeout_s, rehearse, on_change)
