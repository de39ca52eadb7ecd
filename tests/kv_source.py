"""One end of a transport in a process of its own: reads commands on stdin, one JSON object per line, answers each with one.

``{"do": "offer", "id": ..., "lengths": [...], "seed": 7, "chunks": [0, 1], "parts": 3}``: offer chunks of ``payload``.
``{"do": "fetch", "id": ..., "lengths": [...], "address": {...}}``: start a fetch; it is answered before it ends.
``{"do": "release", "id": ...}``, ``{"do": "holding"}``, ``{"do": "close"}`` (and exit).
"""

import asyncio
import json
import sys
from typing import Any

from pdq.ports import ChunkPlan, Fetched, KvTransport, Locator
from tests.kv import cuts, make, payload, ref, targets


async def main(kind: str, url: str) -> None:
    transport: KvTransport = make(kind, url)
    await transport.start()
    print(json.dumps({"ready": True}), flush=True)
    fetches: set[asyncio.Future[Fetched]] = set()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {}
        match command["do"]:
            case "offer":
                plan = ChunkPlan(tuple(command["lengths"]))
                for chunk in command["chunks"]:
                    data = payload(command["seed"], chunk, plan.lengths[chunk])
                    parts = cuts(data, command["parts"])
                    locator = await transport.offer(ref(command["id"]), plan, chunk, parts)
                answer = {"transport": locator.transport, "address": dict(locator.address)}
            case "fetch":
                plan = ChunkPlan(tuple(command["lengths"]))
                locator = Locator(kind, command["address"])
                fetches.add(
                    asyncio.ensure_future(transport.fetch(locator, ref(command["id"]), plan, targets(plan)[1], 60))
                )
            case "release":
                await transport.release(ref(command["id"]))
            case "holding":
                answer = {"holding": [held.key.request_id for held in transport.holding()]}
            case "close":
                await transport.close()
        print(json.dumps(answer), flush=True)
        if command["do"] == "close":
            return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
