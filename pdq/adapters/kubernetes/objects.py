"""What is read of Kubernetes' objects, and the requests that are sent: plain data, named as in the API reference."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod; one without it costs 0."""


class Request(Struct, frozen=True, omit_defaults=True):
    """One HTTP request to the API server."""

    method: str
    path: str
    query: Mapping[str, str] = {}
    content_type: str = ""
    body: Mapping[str, Any] | None = None


class Metadata(Struct, frozen=True, rename="camel"):
    name: str
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: Mapping[str, str] = {}
    owner_references: tuple[Mapping[str, Any], ...] = ()


class Condition(Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class ScaleSpec(Struct, frozen=True):
    replicas: int = 0
    """The API server leaves a 0 out."""


class ScaleStatus(Struct, frozen=True):
    selector: str = ""
    """As a query for pods has it."""


class Scale(Struct, frozen=True):
    metadata: Metadata
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()


class Waiting(Struct, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerState(Struct, frozen=True):
    waiting: Waiting | None = None


class ContainerStatus(Struct, frozen=True):
    state: ContainerState = ContainerState()


class PodStatus(Struct, frozen=True, rename="camel"):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Struct, frozen=True):
    metadata: Metadata
    status: PodStatus = PodStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def counts(self) -> bool:
        """Among the replicas? Not those that are told to go or have ended."""
        return self.metadata.deletion_timestamp is None and self.status.phase not in ("Failed", "Succeeded")

    @property
    def ready(self) -> bool:
        return any(it.type == "Ready" and it.status == "True" for it in self.status.conditions)

    @property
    def controller(self) -> str | None:
        """The ReplicaSet that it belongs to."""
        return next((it["uid"] for it in self.metadata.owner_references if it.get("controller")), None)

    @property
    def trouble(self) -> str:
        """Why it does not run, unless it only takes its time."""
        unscheduled = [
            it.message for it in self.status.conditions if it.type == "PodScheduled" and it.status == "False"
        ]
        waiting = [it.state.waiting for it in self.status.container_statuses if it.state.waiting is not None]
        stuck = [
            f"{it.reason}: {it.message}" for it in waiting if it.reason not in ("ContainerCreating", "PodInitializing")
        ]
        return next((f"pod {self.name}: {why}" for why in (*unscheduled, *stuck)), "")


class Pods(Struct, frozen=True):
    items: tuple[Pod, ...] | None = None
    """Of an empty list some servers make null."""


class DeploymentStatus(Struct, frozen=True):
    conditions: tuple[Condition, ...] = ()


class Deployment(Struct, frozen=True):
    status: DeploymentStatus = DeploymentStatus()

    @property
    def trouble(self) -> str:
        """Why it makes no pods: a quota, an admission webhook."""
        failed = (it.message for it in self.status.conditions if it.type == "ReplicaFailure" and it.status == "True")
        return next(failed, "")


class Status(Struct, frozen=True):
    """What a refusal says."""

    message: str
