"""``--kubernetes``: resizing a pool, or taking a worker out of it for good, directly in a cluster where no autoscaler runs.

It asks nothing of NATS, and Redis only for which workers are missed least; without an answer Kubernetes chooses by itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Struct

from pdq.autoscale.observe import missed_least_first
from pdq.cli.find import environment
from pdq.cli.human import warn
from pdq.core.environment import load
from pdq.core.errors import InvalidRequest, InvalidSettings, PdqError
from pdq.core.settings import KubernetesSettings
from pdq.ports import Pool, WorkerInfo

if TYPE_CHECKING:
    from pdq.adapters.kubernetes import KubernetesActuator, Request

Kubernetes = Annotated[
    bool,
    typer.Option("--kubernetes", help="Directly, at the Kubernetes API server: for clusters where no autoscaler runs."),
]
Namespace = Annotated[str, typer.Option(help="With --kubernetes: of the pools (PDQ_KUBERNETES_NAMESPACE).")]
Context = Annotated[str, typer.Option(help="With --kubernetes: of the kubeconfig (PDQ_KUBERNETES_CONTEXT).")]
PrefillDeployment = Annotated[
    str, typer.Option(help="With --kubernetes: the prefill pool (PDQ_KUBERNETES_PREFILL_DEPLOYMENT).")
]
DecodeDeployment = Annotated[
    str, typer.Option(help="With --kubernetes: the decode pool (PDQ_KUBERNETES_DECODE_DEPLOYMENT).")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --kubernetes: show what would be sent, and change nothing.")
]


class Sent(Struct, frozen=True):
    """What ``--json`` prints."""

    dry_run: bool
    """True: nothing was changed; these requests would do it."""
    requests: Sequence["Request"]


def place(
    wanted: bool, namespace: str, prefill_deployment: str, decode_deployment: str, context: str, dry_run: bool
) -> KubernetesSettings | None:
    """Where the pools are: as these options say, and for what they leave open, the environment. None: without --kubernetes.

    Raises:
        InvalidRequest: the options are there, and --kubernetes is not.
    """
    given = {
        "namespace": namespace,
        "prefill_deployment": prefill_deployment,
        "decode_deployment": decode_deployment,
        "context": context,
    }
    if not wanted:
        if dry_run or any(given.values()):
            raise InvalidRequest(
                "--dry-run, --namespace, --context and the options that name Deployments need --kubernetes",
                field="kubernetes",
            )
        return None
    settings = load(os.environ).kubernetes
    return msgspec.structs.replace(settings, **{name: value for name, value in given.items() if value})


@asynccontextmanager
async def actuator(
    settings: KubernetesSettings, rehearse: bool, on_change: Callable[["Request"], None] = lambda request: None
) -> AsyncIterator["KubernetesActuator"]:
    """See ``KubernetesActuator``.

    Raises:
        InvalidSettings: the optional dependencies are missing, or nothing leads to an API server.
    """
    with _optional():
        from pdq.adapters.kubernetes import connect
    async with connect(settings, rehearse, on_change) as connected:
        yield connected


@contextmanager
def _optional() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidSettings(f"{error.name} is not installed: `pip install 'pdq[kubernetes]'`") from error


def scale(
    settings: KubernetesSettings, wanted: Mapping[Pool, int | None], state_dir: Path, dry_run: bool, as_json: bool
) -> None:
    """Give pools these sizes; with none given, show those that they have."""
    if not wanted:
        _show_sizes(settings, as_json)
        return
    sizes = {pool: replicas for pool, replicas in wanted.items() if replicas is not None}
    if automatic := [pool for pool in wanted if pool not in sizes]:
        raise InvalidRequest(
            f"{automatic[0]}=auto needs an autoscaler to leave it to: without --kubernetes, or give a number",
            field="pool",
        )

    with _optional():
        from pdq.adapters.kubernetes import outline

    async def work() -> Sequence["Request"]:
        changes: list[Request] = []
        try:
            async with actuator(settings, dry_run, changes.append) as kubernetes:
                before = await kubernetes.sizes()
                shrinks = any(replicas < before[pool] for pool, replicas in sizes.items())
                workers = await _workers(state_dir) if shrinks else ()
                for pool, replicas in sizes.items():
                    await kubernetes.scale(pool, replicas, missed_least_first(pool, workers))
            return changes
        except InvalidSettings as error:
            if not dry_run:
                raise
            warn(f"an outline only: {error}; a pool that shrinks has the costs of its pods written first")
            return [request for pool, replicas in sizes.items() for request in outline(settings, pool, replicas)]

    _show(asyncio.run(work()), dry_run, as_json)


def _show_sizes(settings: KubernetesSettings, as_json: bool) -> None:
    async def work() -> Mapping[Pool, int]:
        async with actuator(settings, rehearse=True) as kubernetes:
            return await kubernetes.sizes()

    sizes = asyncio.run(work())
    typer.echo(msgspec.json.encode(sizes) if as_json else " ".join(f"{pool}={size}" for pool, size in sizes.items()))


def drain(settings: KubernetesSettings, worker: str, dry_run: bool, as_json: bool) -> None:
    """This worker drains and goes for good: its pool has one worker less."""

    async def work() -> Sequence["Request"]:
        changes: list[Request] = []
        async with actuator(settings, dry_run, changes.append) as kubernetes:
            await kubernetes.remove(worker)
        return changes

    _show(asyncio.run(work()), dry_run, as_json)


async def _workers(state_dir: Path) -> Sequence[WorkerInfo]:
    """Those of a running system, if there is one to ask."""
    from pdq.connect import connect

    try:
        async with connect(load(environment(state_dir)), "cli") as system:
            return await system.registry.workers()
    except PdqError as error:
        warn(f"Kubernetes chooses by itself who goes, because nobody says what workers hold: {error}")
        return ()


def _show(requests: Sequence["Request"], dry_run: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(Sent(dry_run, requests))))
    elif not requests:
        typer.echo("nothing to do")
    else:
        typer.echo("\n\n".join(map(_text, requests)))


def _text(request: "Request") -> str:
    """As HTTP has it."""
    head = f"{request.method} {request.path}"
    if request.body is None:
        return head
    return f"{head}\nContent-Type: {request.content_type}\n\n{msgspec.json.encode(request.body).decode()}"
