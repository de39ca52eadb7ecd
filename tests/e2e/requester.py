"""A producer on NATS that sees every token of its request, and can act at an exact one."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdq.connect import Connected
from pdq.core import names
from pdq.core.ids import mint_worker_id
from pdq.core.messages import (
    Control,
    End,
    OutputAnswer,
    PolicyWish,
    PrefillJob,
    Sampling,
    TokenFrame,
    TokenLogprobs,
    encode,
)
from pdq.core.stream import Assembler
from pdq.ports import Queue
from tests.e2e.stack import Stack

PATIENCE_S = 90.0


@dataclass
class Stream:
    """What came of one request."""

    request_id: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: End | None = None
    ends: int = 0
    after_the_end: int = 0
    """Tokens in frames that came later than the end."""
    workers: list[str] = field(default_factory=list)
    """Who sent, in order."""
    asked: int = 0

    @property
    def whole(self) -> tuple[str, list[int], Any, Any]:
        """What must not depend on anybody's death."""
        assert self.end is not None
        end = self.end
        return self.text + end.tail, self.tokens, (end.state, end.finish_reason, end.stop_reason), end.usage


At = Mapping[int, Callable[[Connected, Stream], Coroutine[Any, Any, None]]]
"""What to do once that many tokens have come."""


def request(
    stack: Stack,
    prompt: str | list[int],
    sampling: Sampling,
    policy: PolicyWish | None = None,
    *,
    at: At | None = None,
    answers: bool = True,
) -> Stream:
    """One request, from its publication to its end."""
    given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": tuple(prompt)}
    job = PrefillJob(
        stack.model,
        names.reply_subject(mint_worker_id("test")),
        sampling=sampling,
        policy=policy or PolicyWish(),
        **given,
    )
    return stack.inside.ask(lambda system: _request(system, job, at or {}, answers), PATIENCE_S + 10)


async def _request(system: Connected, job: PrefillJob, at: At, answers: bool) -> Stream:
    stream, assembler, over = Stream(), Assembler(), asyncio.Event()
    left, acting = dict(at), set[asyncio.Task[None]]()

    def on_frame(frame: TokenFrame) -> None:
        if frame.worker not in stream.workers[-1:]:
            stream.workers.append(frame.worker)
        for entry in frame.entries:
            stream.request_id = entry.request_id
            if assembler.ended:
                stream.after_the_end += len(entry.tokens)
                stream.ends += entry.end is not None
            for part in assembler.accept(entry):
                stream.text += "".join(part.pieces)
                stream.logprobs += part.logprobs or ()
                if part.end is not None:
                    stream.end = part.end
                    stream.ends += 1
                    over.set()
            stream.tokens = assembler.tokens
            for count in [it for it in left if it <= len(assembler.tokens)]:
                acting.add(asyncio.create_task(left.pop(count)(system, stream)))

    def answer(request_id: str) -> OutputAnswer:
        stream.asked += 1
        return OutputAnswer(request_id, wanted=True, tokens=tuple(assembler.tokens))

    subscription = await system.bus.receive(job.reply_to, on_frame, answer if answers else None)
    try:
        await system.queue.publish(Queue.PREFILL, job.model, encode(job))
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        await asyncio.gather(*acting)
    finally:
        await subscription.close()
    return stream


async def kill_the_sender(system: Connected, stream: Stream) -> None:
    """SIGKILL to whoever sent the token before."""
    (pid,) = [it.pid for it in await system.registry.workers() if it.worker == stream.workers[-1]]
    os.kill(pid, signal.SIGKILL)


def tell(stack: Stack, worker: str, message: Control) -> None:
    stack.inside.ask(lambda system: system.bus.control(names.worker_subject(worker), message))
