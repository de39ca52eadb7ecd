"""``python -m pdq.bridge --model NAME [--directory DIR]``: one bridge process. ``pdq bridge`` starts it."""

import argparse
import os
import sys
from pathlib import Path

from pdq import runtime
from pdq.adapters.tokenizer import load_tokenizer
from pdq.bridge.app import Parts
from pdq.bridge.server import serve
from pdq.connect import connect
from pdq.core.environment import load
from pdq.core.ids import mint_worker_id


def main() -> int:
    """Serve until drained; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pdq.bridge", description="A pdq bridge: the OpenAI API.")
    parser.add_argument("--model", required=True, help="the name under which requests ask for the model")
    parser.add_argument("--directory", type=Path, help="the model's files, for its tokenizer; none: the sim engine's")
    arguments = parser.parse_args()
    owner = mint_worker_id("bridge")

    async def run(lifecycle: runtime.Lifecycle) -> None:
        settings = load(os.environ)
        tokenizers = {arguments.model: load_tokenizer(arguments.directory)}
        async with connect(settings, owner) as system:
            parts = Parts(
                queue=system.queue,
                ledger=system.ledger,
                bus=system.bus,
                registry=system.registry,
                tokenizers=tokenizers,
                settings=settings,
                owner=owner,
            )
            await serve(parts, lifecycle)

    return runtime.run("bridge", run)


if __name__ == "__main__":
    sys.exit(main())
