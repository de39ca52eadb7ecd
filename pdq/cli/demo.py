"""``pdq demo``: the whole path once, with the real default model, and an account of where the time went."""

import http.client
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from pdq.cli.programs import EngineOption, ModelOption
from pdq.cli.up import Waiting, make_plan
from pdq.core import names

QUESTION = "Explain in two sentences why a queue makes a busy system calmer."


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    model: ModelOption = None,
    engine: EngineOption = "torch",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
) -> None:
    """Start everything, stream the answer to one chat request, tell where it ran and how long each step took, stop."""
    import asyncio

    from pdq import runtime
    from pdq.cli.stack import Stack

    async def run(lifecycle: runtime.Lifecycle) -> None:
        with tempfile.TemporaryDirectory(prefix="pdq-demo-") as directory, Waiting() as waiting:
            plan = make_plan(0, 1, 1, model, engine, "disaggregated", Path(directory))
            stack = Stack(plan, waiting.progress)
            async with stack.running(lifecycle.stopped):
                await lifecycle.until(lifecycle.draining, stack.ready())
                if lifecycle.draining.is_set():
                    return
                waiting.done()
                print(f"pdq is up: one prefill worker, one decode worker, {plan.model.name} at {stack.url}/v1\n")
                print(f"> {question}\n", flush=True)
                asking = asyncio.to_thread(_ask, stack.url, plan.model.name, question, max_tokens)
                request_id = await asking
                print(await _account(stack.environ, request_id))
                print("\nstopping", flush=True)

    raise typer.Exit(runtime.run("demo", run))


def _ask(url: str, model: str, question: str, max_tokens: int) -> str:
    """Print the answer as it comes; the request's id."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.2,
        "seed": 7,
        "stream": True,
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    for text in _texts(answer):
        sys.stdout.write(text)
        sys.stdout.flush()
    print("\n")
    return answer.getheader(names.HEADER_REQUEST_ID) or ""


def _texts(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"the request failed: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""


async def _account(environ: Mapping[str, str], request_id: str) -> str:
    from pdq.cli.trace import account, lines
    from pdq.connect import connect
    from pdq.core.environment import load

    async with connect(load(environ), "demo") as system:
        record = await system.ledger.find(request_id)
        assert record is not None
        return "\n".join(lines(account(record, await system.ledger.history(record.key))))
