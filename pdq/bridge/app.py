"""The HTTP side: a plain ASGI application, its routes, and the way of a request from its body into the queue.

A handler does not carry the answer: it puts the request on its way and then waits for the connection to end, which is
the answer's completion or the client's going away, whichever is first. The answer itself is written by ``pdq.bridge.reply``
as frames arrive. So a client that leaves is noticed at once, also while it waits for its first token.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdq import failpoints
from pdq.bridge import caller, openai, refusal, sse
from pdq.bridge.exchange import ClientGone, Exchange, Receive, Scope
from pdq.bridge.fleet import Fleet
from pdq.bridge.metrics import CONTENT_TYPE, Metrics
from pdq.bridge.openai import ChatRequest, CompletionRequest
from pdq.bridge.readings import Readings
from pdq.bridge.reply import Reply, Send, StreamReply, WholeReply
from pdq.bridge.requests import InFlight, Stream
from pdq.core import admission, errors
from pdq.core.ids import mint_secret
from pdq.core.lease import RecordKey
from pdq.core.messages import PolicyWish, PrefillJob, Sampling, encode
from pdq.core.routing import Route
from pdq.core.settings import Settings
from pdq.ports import HandoffLedger, JobQueue, NewRecord, Queue, TokenBus, Tokenizer, WorkerRegistry
from pdq.stages.census import Census
from pdq.stages.gate import Gate

log = logging.getLogger(__name__)

LARGE_BODY: Final = 20_000
"""Bytes; rendering and tokenizing more than this would hold the loop for more than a few milliseconds."""
READY_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True)
class Parts:
    """What the bridge works with. ``owner`` names this process: its token subject is made of it."""

    queue: JobQueue
    ledger: HandoffLedger
    bus: TokenBus
    registry: WorkerRegistry
    tokenizers: Mapping[str, Tokenizer]
    """By served model."""
    settings: Settings
    owner: str
    clock: Callable[[], float] = time.monotonic


class Bridge:
    """The ASGI application. ``start`` before the first request, ``close`` after the last."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self.metrics = Metrics(parts.tokenizers)
        self.readings = Readings(parts.tokenizers, parts.queue, parts.ledger, parts.registry, parts.clock)
        self.metrics.registry.register(self.readings)
        census = Census(parts.registry, parts.clock)
        self.fleet = Fleet(census, parts.settings.handoff.mode)
        self.gate = Gate(parts.ledger, census, parts.settings, parts.clock)
        self.keys = caller.Keys(parts.settings.bridge.api_keys)
        self.in_flight = InFlight(
            owner=parts.owner,
            ledger=parts.ledger,
            bus=parts.bus,
            metrics=self.metrics,
            silence_s=parts.settings.bridge.silence_s,
            clock=parts.clock,
        )
        self._routes: dict[str, tuple[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            "/health/live": ("GET", self._live),
            "/health/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
        }
        self._created = int(time.time())

    async def start(self) -> None:
        await self.in_flight.start()

    async def close(self) -> None:
        await self.in_flight.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the bridge speaks HTTP only, not {scope['type']}")
        exchange = Exchange(scope, receive, send)
        try:
            if scope["path"].startswith("/v1/"):
                exchange.key = self.keys.check(exchange.headers)
            await self._handler(scope["method"], scope["path"])(exchange)
        except ClientGone:
            pass
        except errors.PdqError as error:
            if isinstance(error, errors.Refused) and not error.reason:
                log.warning("request %s is refused: %s", exchange.request_id, error)
            self.metrics.refusals.labels(error.code).inc()
            if not exchange.channel.started:  # a request that is just being accepted may have been aborted
                exchange.channel.answer(refusal.refusal(error))
        except Exception:
            log.exception("request %s: a fault in the bridge", exchange.request_id)
            if exchange.channel.started:
                raise
            exchange.channel.answer(refusal.refusal(errors.PdqError("internal error: see the bridge's log")))
        await exchange.over()

    def _handler(self, method: str, path: str) -> Callable[[Exchange], Awaitable[None]]:
        route = self._routes.get(path)
        if route is None and path.startswith("/v1/models/"):
            route = "GET", lambda exchange: self._model(exchange, path.removeprefix("/v1/models/"))
        if route is None:
            raise refusal.NoSuchRoute(f"there is no {path} here")
        allowed, handler = route
        if method != allowed and not (method == "HEAD" and allowed == "GET"):
            allow = "GET, HEAD" if allowed == "GET" else allowed
            raise refusal.WrongMethod(f"{path} takes {allowed}, not {method}", allowed=allow)
        return handler

    # --- Inference ----------------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await self._infer(exchange, ChatRequest, sse.CHAT)

    async def _completion(self, exchange: Exchange) -> None:
        await self._infer(exchange, CompletionRequest, sse.COMPLETION)

    async def _infer(self, exchange: Exchange, kind: type[openai.R], dialect: sse.Dialect) -> None:
        arrived = self._parts.clock()
        body = await exchange.body(self._settings.bridge.max_body_bytes)
        request = openai.parse(body, kind)
        tokenizer = self._parts.tokenizers.get(request.model)
        if tokenizer is None:
            served = ", ".join(self._parts.tokenizers)
            raise errors.UnknownModel(f"model {request.model!r} is not served here; there is {served}", field="model")
        terms = caller.terms(exchange.headers, request, exchange.key, self._settings.handoff)
        if len(body) > LARGE_BODY:
            prompt = await asyncio.to_thread(openai.prompt_tokens, request, tokenizer)
        else:
            prompt = openai.prompt_tokens(request, tokenizer)
        max_context = await self.fleet.max_context(request.model)
        max_output = self._settings.engine.max_output_tokens
        sampling = openai.sampling_of(request, len(prompt), max_context, max_output)

        reply = _reply(exchange, request, dialect)
        key = RecordKey(request.model, exchange.request_id)
        stream: Stream | None = None
        try:
            async with self._admitted(key.model, len(prompt), sampling, terms) as route:
                stream = self.in_flight.open(key, route.mode, reply, arrived)
                await self._submit(exchange, request, stream, prompt, sampling, terms, route)
            await exchange.over()
        finally:  # also when this task is cancelled; nothing happens if the stream has ended
            if stream is not None:
                self.in_flight.cancel(stream, "the client went away")

    @contextlib.asynccontextmanager
    async def _admitted(
        self, model: str, prompt_tokens: int, sampling: Sampling, terms: caller.Terms
    ) -> AsyncIterator[Route]:
        """Where a request that is accepted runs; inside the block it is to be submitted."""
        assert sampling.max_tokens is not None
        route = await self.gate.route(model, prompt_tokens, terms.priority)
        wanted = admission.Request(
            prompt_tokens,
            sampling.max_tokens,
            terms.priority,
            terms.tenant,
            deadline_s=terms.timeout_ms / 1000,
            queues=route.queue == "prefill",
        )
        try:
            async with self.gate.entering(model, wanted) as admitted:
                self.metrics.routed.labels(model, route.mode, route.reason.value).inc()
                if admitted.wait_s is not None:
                    self.metrics.wait.labels(model).observe(admitted.wait_s)
                yield route
        except errors.Refused as error:
            if error.reason:
                self.metrics.admission_refusals.labels(model, terms.priority, error.reason).inc()
            raise

    async def _submit(
        self,
        exchange: Exchange,
        request: openai.Request,
        stream: Stream,
        prompt: list[int],
        sampling: Sampling,
        terms: caller.Terms,
        route: Route,
    ) -> None:
        """The record first, then the job: a worker that finds a job finds its record."""
        key = stream.key
        policy = (request.pdq or PolicyWish()).over(self._settings.policy)
        assert sampling.max_tokens is not None
        record = NewRecord(
            key=key,
            reply_to=self.in_flight.reply_to,
            prompt_tokens=len(prompt),
            max_new_tokens=sampling.max_tokens,
            timeout_ms=terms.timeout_ms,
            secret=mint_secret(),
            policy=policy,
            mode=route.mode,
            tenant=terms.tenant,
            priority=terms.priority,
            client_id=exchange.client_id,
        )
        job = PrefillJob(
            model=key.model,
            reply_to=self.in_flight.reply_to,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            timeout_ms=terms.timeout_ms,
            priority=terms.priority,
            tenant=terms.tenant,
            client_id=exchange.client_id,
            request_id=key.request_id,
        )
        try:
            if failpoints.armed:
                await failpoints.hit("bridge.before_enqueue", key.request_id)
            await self._parts.ledger.enqueue(record)
            if failpoints.armed:
                await failpoints.hit("bridge.before_publish", key.request_id)
            await self._parts.queue.publish(
                Queue(route.queue),
                key.model,
                encode(job),
                message_id=key.request_id,
                priority=terms.priority,
                ttl_s=terms.timeout_ms / 1000,
            )
            if failpoints.armed:
                await failpoints.hit("bridge.after_publish", key.request_id)
        except errors.PdqError as error:
            self.in_flight.fail(stream, error)
            raise
        self.in_flight.submitted(stream)

    # --- Everything else ----------------------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        exchange.json(200, {"object": "list", "data": [self._describe(model) for model in self._parts.tokenizers]})

    async def _model(self, exchange: Exchange, model: str) -> None:
        if model not in self._parts.tokenizers:
            raise errors.UnknownModel(f"model {model!r} is not served here", field="model")
        exchange.json(200, self._describe(model))

    def _describe(self, model: str) -> dict[str, Any]:
        context = self.fleet.known_context(model)
        known = {} if context is None else {"max_model_len": context}
        return {"id": model, "object": "model", "created": self._created, "owned_by": "pdq", **known}

    async def _live(self, exchange: Exchange) -> None:
        exchange.json(200, {"status": "live"})

    async def _ready(self, exchange: Exchange) -> None:
        """Broker and ledger answer, and every model has a live worker of each pool that it needs."""
        missing: list[str] = []
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                for name, check in (("broker", self._broker_answers), ("ledger", self._parts.ledger.now_ms)):
                    try:
                        await check()
                    except errors.PdqError as error:
                        missing.append(f"{name}: {error}")
                if not missing:
                    missing += await self.fleet.missing(self._parts.tokenizers)
        except TimeoutError:
            missing.append(f"no answer from broker or ledger within {READY_TIMEOUT_S:.0f} s")
        except errors.PdqError as error:
            missing.append(f"ledger: {error}")
        if missing:
            exchange.json(503, {"status": "not ready", "missing": missing})
        else:
            exchange.json(200, {"status": "ready", "models": list(self._parts.tokenizers)})

    async def _broker_answers(self) -> None:
        for model in self._parts.tokenizers:
            await self._parts.queue.depth(Queue.PREFILL, model)
            return

    async def _metrics(self, exchange: Exchange) -> None:
        await self.readings.refresh()
        exchange.channel.answer(refusal.Reply(200, self.metrics.render(), [(b"content-type", CONTENT_TYPE)]))


def _reply(exchange: Exchange, request: openai.Request, dialect: sse.Dialect) -> Reply:
    created = int(time.time())
    if not request.stream:
        return WholeReply(exchange.channel, sse.Whole(dialect, exchange.request_id, request.model, created))
    options = request.stream_options
    usage = options is not None and options.include_usage is True
    chunks = sse.Chunks(dialect, exchange.request_id, request.model, created, include_usage=usage)
    return StreamReply(exchange.channel, chunks)


def create_app(parts: Parts) -> Bridge:
    return Bridge(parts)
