"""The HTTP side: a plain ASGI application, its routes, and the way of a request from its body into the queue.

A handler does not carry the answer: it puts the request on its way and then waits for the connection to end, which is
the answer's completion or the client's going away, whichever is first. The answer itself is written by ``pdq.bridge.reply``
as frames arrive. So a client that leaves is noticed at once, also while it waits for its first token.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pdq import failpoints
from pdq.bridge import openai, refusal, sse
from pdq.bridge.fleet import Fleet
from pdq.bridge.metrics import CONTENT_TYPE, Metrics
from pdq.bridge.openai import ChatRequest, CompletionRequest
from pdq.bridge.readings import Readings
from pdq.bridge.reply import Channel, Reply, Send, StreamReply, WholeReply
from pdq.bridge.requests import InFlight, Stream
from pdq.core import errors
from pdq.core.ids import mint_request_id, mint_secret
from pdq.core.lease import RecordKey
from pdq.core.messages import PolicyWish, PrefillJob, Sampling, encode
from pdq.core.names import HEADER_CLIENT_REQUEST_ID, HEADER_REQUEST_ID, HEADER_TIMEOUT_MS
from pdq.core.settings import Settings
from pdq.ports import HandoffLedger, JobQueue, NewRecord, Queue, TokenBus, Tokenizer, WorkerRegistry

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LARGE_BODY: Final = 20_000
"""Bytes; rendering and tokenizing more than this would hold the loop for more than a few milliseconds."""
CLIENT_ID_LENGTH: Final = 256
READY_TIMEOUT_S: Final = 2.0
DISCARD_BYTES: Final = 64 * 1024 * 1024
DISCARD_S: Final = 10.0
BODY_S: Final = 60.0
"""How long a client may take to send a body."""

_REQUEST_ID: Final = HEADER_REQUEST_ID.encode()
_CLIENT_REQUEST_ID: Final = HEADER_CLIENT_REQUEST_ID.encode()
_TIMEOUT_MS: Final = HEADER_TIMEOUT_MS.encode()


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


class ClientGone(Exception):
    """Nobody is left to answer."""


class Exchange:
    """One HTTP request and the channel back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = mint_request_id(time.time_ns() // 1_000_000)
        self.receive = receive
        answer_headers = [(_REQUEST_ID, self.request_id.encode())]
        self.client_id = ""
        if theirs := self.headers.get(_REQUEST_ID):
            self.client_id = "".join(c for c in theirs.decode("latin-1") if c.isprintable())[:CLIENT_ID_LENGTH]
            answer_headers.append((_CLIENT_REQUEST_ID, self.client_id.encode("latin-1")))
        self.channel = Channel(send, answer_headers)

    async def body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            BodyTooLarge: over ``limit``, as announced or as read.
            TooSlow: it took too long.
            ClientGone: before it was complete.
        """
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            if b"expect" not in self.headers:
                await self._discard()
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_S):
                return await self._whole_body(limit)
        except TimeoutError:
            raise refusal.TooSlow(f"the request's body did not come within {BODY_S:.0f} s") from None

    async def _whole_body(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            part, more = await self._read()
            size += len(part)
            if size > limit:
                if more:
                    await self._discard()
                raise _too_large(limit)
            parts.append(part)
            if not more:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read(self) -> tuple[bytes, bool]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), bool(message.get("more_body"))

    async def _discard(self) -> None:
        """Read the rest of a body that is refused, within reason: most clients look for the answer only after they have
        sent all, and closing a connection with unread bytes destroys the answer."""
        left, more = DISCARD_BYTES, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and left > 0:
                    part, more = await self._read()
                    left -= len(part)

    async def over(self) -> None:
        """Until the answer is complete, or the client has gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def json(self, status: int, content: Any) -> None:
        self.channel.answer(refusal.Reply(status, sse.json_bytes(content), [refusal.JSON]))


class Bridge:
    """The ASGI application. ``start`` before the first request, ``close`` after the last."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self.metrics = Metrics()
        self.readings = Readings(parts.tokenizers, parts.queue, parts.ledger, parts.registry, parts.clock)
        self.metrics.registry.register(self.readings)
        self.fleet = Fleet(parts.registry, parts.settings.handoff.mode, parts.clock)
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
            await self._handler(scope["method"], scope["path"])(exchange)
        except ClientGone:
            pass
        except errors.PdqError as error:
            if isinstance(error, errors.Refused):
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
        timeout_ms = self._timeout_ms(exchange)
        if len(body) > LARGE_BODY:
            prompt = await asyncio.to_thread(openai.prompt_tokens, request, tokenizer)
        else:
            prompt = openai.prompt_tokens(request, tokenizer)
        max_context = await self.fleet.max_context(request.model)
        max_output = self._settings.engine.max_output_tokens
        sampling = openai.sampling_of(request, len(prompt), max_context, max_output)

        reply = _reply(exchange, request, dialect)
        key = RecordKey(request.model, exchange.request_id)
        mode: Literal["disaggregated", "aggregated"]
        queue, mode = self._route(len(prompt))
        stream = self.in_flight.open(key, mode, reply, arrived)
        try:
            await self._submit(exchange, request, stream, prompt, sampling, timeout_ms, queue, mode)
            await exchange.over()
        finally:  # also when this task is cancelled; nothing happens if the stream has ended
            self.in_flight.cancel(stream, "the client went away")

    async def _submit(
        self,
        exchange: Exchange,
        request: openai.Request,
        stream: Stream,
        prompt: list[int],
        sampling: Sampling,
        timeout_ms: int,
        queue: Queue,
        mode: Literal["disaggregated", "aggregated"],
    ) -> None:
        """The record first, then the job: a worker that finds a job finds its record."""
        key, tenant = stream.key, request.user or ""
        priority = request.priority or "interactive"
        policy = (request.pdq or PolicyWish()).over(self._settings.policy)
        assert sampling.max_tokens is not None
        record = NewRecord(
            key=key,
            reply_to=self.in_flight.reply_to,
            prompt_tokens=len(prompt),
            max_new_tokens=sampling.max_tokens,
            timeout_ms=timeout_ms,
            secret=mint_secret(),
            policy=policy,
            mode=mode,
            tenant=tenant,
            priority=priority,
            client_id=exchange.client_id,
        )
        job = PrefillJob(
            model=key.model,
            reply_to=self.in_flight.reply_to,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            timeout_ms=timeout_ms,
            priority=priority,
            tenant=tenant,
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
                queue,
                key.model,
                encode(job),
                message_id=key.request_id,
                priority=priority,
                ttl_s=timeout_ms / 1000,
            )
            if failpoints.armed:
                await failpoints.hit("bridge.after_publish", key.request_id)
        except errors.PdqError as error:
            self.in_flight.fail(stream, error)
            raise
        self.in_flight.submitted(stream)

    def _route(self, prompt_length: int) -> tuple[Queue, Literal["disaggregated", "aggregated"]]:
        handoff = self._settings.handoff
        match handoff.mode:
            case "aggregated":
                return Queue.PREFILL, "aggregated"
            case "auto" if prompt_length <= handoff.auto_local_tokens:
                return Queue.LOCAL, "aggregated"
            case _:
                return Queue.PREFILL, "disaggregated"

    def _timeout_ms(self, exchange: Exchange) -> int:
        handoff = self._settings.handoff
        asked = exchange.headers.get(_TIMEOUT_MS)
        if asked is None:
            return handoff.default_timeout_ms
        if not asked.isdigit() or len(asked) > 12 or not 1 <= int(asked) <= handoff.max_timeout_ms:
            raise errors.InvalidRequest(
                f"{HEADER_TIMEOUT_MS} is {asked.decode('latin-1')[:40]!r}, and must be a whole number of milliseconds "
                f"from 1 to {handoff.max_timeout_ms}",
                field=HEADER_TIMEOUT_MS,
            )
        return int(asked)

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


def _too_large(limit: int) -> refusal.BodyTooLarge:
    return refusal.BodyTooLarge(f"the body is longer than the {limit} bytes that this server takes at most")


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
