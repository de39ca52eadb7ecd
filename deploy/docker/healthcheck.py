"""``healthcheck.py bridge|worker``: is the program in this container alive? Exit status 0 or 1, and why on stderr.

A bridge answers over HTTP. A worker has no port: it says every few seconds in Redis that it lives, so it is looked up
there, by this container's host name. ``--lenient`` is for liveness probes: a worker that holds sequences must not be killed
because Redis cannot be asked. Without it, "cannot be asked" is not healthy, as a readiness probe wants. ``--model`` is for
all probes whose failure restarts the container: a worker of that model which an operator has sent away idles, and is well.
"""

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 4.0
REMEMBERED = Path(tempfile.gettempdir()) / "pdq-worker"
"""This container's worker, once found: with many workers, looking through all of them again and again would be a load."""


def bridge() -> str | None:
    """What is wrong, or None."""
    url = f"http://127.0.0.1:{os.environ.get('PDQ_BRIDGE_PORT', '8000')}/health/live"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return None if answer.status == 200 else f"{url} answers {answer.status}"
    except (OSError, urllib.error.URLError) as error:
        return f"{url}: {error}"


async def worker(lenient: bool, model: str | None) -> str | None:
    """What is wrong, or None."""
    from pdq.adapters import redis
    from pdq.core import names
    from pdq.core.environment import load
    from pdq.core.errors import PdqError

    try:
        async with asyncio.timeout(TIMEOUT_S):
            client = await redis.connect(load(os.environ).redis)
            try:
                remembered = REMEMBERED.read_text() if REMEMBERED.exists() else ""
                if remembered and await client.exists(names.worker_key(remembered)):
                    return None
                registered = await redis.RedisRegistry(client).workers()
                host = socket.gethostname()
                mine = [info.worker for info in registered if info.host == host]
                if not mine and model and host in await redis.RedisBoard(client).away(model):
                    return None
            finally:
                await client.aclose()
    except (PdqError, OSError, TimeoutError) as error:
        return None if lenient else f"the registry does not answer: {error}"
    if not mine:
        return f"no worker on {socket.gethostname()} says that it lives"
    REMEMBERED.write_text(mine[0])
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["bridge", "worker"])
    parser.add_argument("--lenient", action="store_true", help="healthy as long as nothing says otherwise")
    parser.add_argument("--model", help="a worker of this model is healthy, too, while it is sent away")
    arguments = parser.parse_args()
    wrong = bridge() if arguments.role == "bridge" else asyncio.run(worker(arguments.lenient, arguments.model))
    if wrong is not None:
        print(wrong, file=sys.stderr)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
