"""``pdq simulate``: what admission and scaling would do with a trace, next to other policies, on a simulated clock."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from pdq.cli.find import AsJson
from pdq.cli.human import console, seconds
from pdq.core import environment
from pdq.core.errors import InvalidSettings
from pdq.simulate.compare import Outcome, Terms, compare
from pdq.simulate.profile import PROFILES
from pdq.simulate.traces import copies, read, swing

if TYPE_CHECKING:
    from rich.table import Table


class Report(Struct, frozen=True):
    trace: str
    copies: int
    swing: float
    profile: str
    gpus_per_worker: int
    terms: Terms
    outcomes: Sequence[Outcome]


def simulate(
    trace: Annotated[
        Path, typer.Option("--trace", help="Azure's LLM trace (CSV) or Mooncake's (JSON lines).", show_default=False)
    ],
    profile: Annotated[
        str, typer.Option("--profile", help=f"Which worker to pretend: {', '.join(PROFILES)}.")
    ] = "opt-13b-1gpu",
    count: Annotated[int, typer.Option("--copies", min=1, help="Lay the trace over itself so many times.")] = 1,
    lowest: Annotated[
        float,
        typer.Option("--swing", min=0.01, max=1, help="Thin it out in a wave, from this share of its load to all."),
    ] = 1,
    ttft_ms: Annotated[float, typer.Option("--ttft-ms", min=1, help="Limit of the time to first token.")] = 1_000,
    itl_ms: Annotated[float, typer.Option("--itl-ms", min=1, help="Limit of the mean time between tokens.")] = 100,
    startup_s: Annotated[float, typer.Option("--startup-s", min=0, help="How long a worker takes to start.")] = 30,
    warmup_s: Annotated[
        float, typer.Option("--warmup-s", min=0, help="Do not count this first time: nobody knows the load yet.")
    ] = 300,
    queue_jobs: Annotated[
        float, typer.Option("--queue-jobs", min=0.01, help="Prefill jobs per worker for the uncoupled controller.")
    ] = 1,
    queue_sequences: Annotated[
        float, typer.Option("--queue-sequences", min=1, help="Decode jobs per worker for the uncoupled controller.")
    ] = 32,
    max_workers: Annotated[
        int, typer.Option("--max-workers", min=1, help="Most workers of each pool, for every policy.")
    ] = 40,
    as_json: AsJson = False,
) -> None:
    """Replay a trace against simulated pools: pdq's scaling, fixed pools of the same mean size, and two controllers on
    queue length that are not coupled.

    Admission and scaling are the real functions with the settings of the environment (`PDQ_ADMISSION_...`,
    `PDQ_SCALING_...`), so a setting can be tried before it is used.
    """
    if profile not in PROFILES:
        raise InvalidSettings(f"unknown profile {profile!r}; known are {', '.join(PROFILES)}")
    configured = environment.load(os.environ)
    terms = Terms(
        ttft_s=ttft_ms / 1_000,
        itl_s=itl_ms / 1_000,
        startup_s=startup_s,
        warmup_s=warmup_s,
        queue_jobs=queue_jobs,
        queue_sequences=queue_sequences,
    )
    scaling = replace(configured.scaling, prefill_max=max_workers, decode_max=max_workers)
    outcomes = compare(
        swing(copies(read(trace), count), lowest), PROFILES[profile], configured.admission, scaling, terms
    )
    if as_json:
        report = Report(trace.name, count, lowest, profile, PROFILES[profile].gpus, terms, outcomes)
        typer.echo(msgspec.json.format(msgspec.json.encode(report)))
        return
    console().print(_table(outcomes, terms))


def _table(outcomes: Sequence[Outcome], terms: Terms) -> "Table":
    from rich.table import Table

    limits = f"TTFT <= {seconds(terms.ttft_s * 1_000)}", f"ITL <= {seconds(terms.itl_s * 1_000)}"
    heads = ("policy", *limits, "both", "refused", "TTFT p50", "p99", "prefill h", "decode h", "worker h", "changes")
    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for it in outcomes:
        table.add_row(
            it.policy,
            *(f"{share:.1%}" for share in (it.ttft_share, it.itl_share, it.both_share)),
            f"{sum(it.refused.values()) / max(1, it.requests):.1%}",
            *(seconds(time_s * 1_000) for time_s in (it.ttft_p50_s, it.ttft_p99_s)),
            *(f"{hours:.1f}" for hours in (it.prefill_hours, it.decode_hours, it.worker_hours)),
            str(it.changes),
        )
    return table
