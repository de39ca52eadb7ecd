"""The program around every engine: arguments, adapters, one ``Worker``.

An engine's ``__main__`` says how the engine is loaded; all else is the same for all of them. A worker that an operator has
sent away and that is started all the same (Kubernetes starts a pod's container again, whatever its exit status) waits to be
called back, without a model in its memory.
"""

import argparse
import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdq import connect, runtime
from pdq.adapters.tokenizer import load_tokenizer
from pdq.core.environment import load
from pdq.core.errors import PdqError
from pdq.core.ids import mint_worker_id
from pdq.core.settings import Settings
from pdq.ports import Board, Pool, Tokenizer
from pdq.stages.local import WholeEngine
from pdq.stages.worker import Worker

log = logging.getLogger(__name__)

AWAY_POLL_S: Final = 1.0

Load = Callable[[str, Path | None, Settings, Tokenizer], WholeEngine]
"""(model name, model directory, settings, tokenizer) -> the engine. Called in a thread: it may take minutes."""


def main(engine: str, load_engine: Load) -> int:
    """Run one worker until it is drained; its exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m workers.{engine}", description=f"A pdq worker with the {engine} engine."
    )
    parser.add_argument("pool", type=Pool, choices=list(Pool), help="which queue it serves")
    parser.add_argument("--model", required=True, help="the name under which requests ask for the model")
    parser.add_argument("--directory", type=Path, help="the model's files")
    parser.add_argument("--id", help="this worker's name (default: pool and a random part)")
    arguments = parser.parse_args()
    worker_id = arguments.id or mint_worker_id(arguments.pool)

    async def serve(lifecycle: runtime.Lifecycle) -> None:
        settings = load(os.environ)
        async with connect.connect(settings, worker_id) as system:
            await lifecycle.until(lifecycle.draining, until_wanted(system.board, arguments.model, worker_id))
            if lifecycle.draining.is_set():
                return
            tokenizer = load_tokenizer(arguments.directory)
            loaded = await asyncio.to_thread(load_engine, arguments.model, arguments.directory, settings, tokenizer)
            if lifecycle.draining.is_set():
                return
            async with connect.transports(settings) as transports:
                worker = Worker(
                    worker=worker_id,
                    pool=arguments.pool,
                    model=arguments.model,
                    engine=loaded,
                    tokenizer=tokenizer,
                    settings=settings,
                    jobs=system.queue,
                    bus=system.bus,
                    ledger=system.ledger,
                    registry=system.registry,
                    transports=transports,
                )
                await worker.run(lifecycle)

    return runtime.run(worker_id, serve)


async def until_wanted(board: Board, model: str, worker: str) -> None:
    """While it is sent away."""
    idle = False
    while True:
        try:
            if worker not in await board.away(model):
                return
        except PdqError as error:
            if not idle:
                raise
            log.warning("whether it is called back cannot be read (%s): %s", error.code, error)
        if not idle:
            log.info("sent away by an operator: idle until `pdq undrain %s`", worker)
            idle = True
        await asyncio.sleep(AWAY_POLL_S)
