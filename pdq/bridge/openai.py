"""The OpenAI API's request types, and their translation into pdq's own.

What a client sends is decoded straight into typed structs: a wrong type, range or missing field is refused with the
field's name before anything else happens. Fields that pdq cannot honour yet are declared and refused by name instead of
being ignored; fields that nobody knows are ignored, as OpenAI does. Whatever is not declared here (request ids, reply
subjects) cannot be set from outside.
"""

import random
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from pdq.core.errors import ContextTooLong, InvalidRequest
from pdq.core.messages import (
    MAX_CHAT_MESSAGES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    ChatMessage,
    PolicyWish,
    Priority,
    Sampling,
    StopText,
    TokenId,
)
from pdq.ports import Tokenizer

MAX_PARTS: Final = 256
"""Content parts of one message."""
SAME_IN_SAMPLING: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)

Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Top = Annotated[int, Meta(ge=0, le=20)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(Struct):
    include_usage: bool | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class Message(Struct):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None


class _Request(Struct):
    """What both endpoints share. ``None`` is OpenAI's way of writing a default out."""

    model: Name
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: AtLeastOne | None = None
    max_tokens: AtLeastOne | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    # Not OpenAI's, but what the usual servers take besides.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    priority: Priority | None = None
    pdq: PolicyWish | None = None
    """What pdq may do for this request when something fails."""


class ChatRequest(_Request, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None


class CompletionRequest(_Request, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Top | None = None
    best_of: AtLeastOne | None = None
    echo: bool | None = None
    suffix: str | None = None


Request = ChatRequest | CompletionRequest
R = TypeVar("R", ChatRequest, CompletionRequest)

_decoders: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)
}
_AT: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]+)`")
_BYTE: Final = re.compile(r"\(byte (\d+)\)$")
_LAST_KEY: Final = re.compile(rb'"([\w-]{1,64})"\s*:\s*-?$')


def parse(body: bytes, kind: type[R]) -> R:
    """The request in ``body``.

    Raises:
        InvalidRequest: not JSON, or not such a request; names the field where there is one.
    """
    try:
        request: R = _decoders[kind].decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        at, missing = _AT.search(text), _MISSING.search(text)
        field = ".".join(part for part in (at and at[1], missing and missing[1]) if part)
        raise InvalidRequest(text.replace("`$.", "`"), field=field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", field=_field_before(str(error), body)) from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    _refuse_unsupported(request)
    return request


def _field_before(error: str, body: bytes) -> str | None:
    """Whose value JSON has no notation for (NaN, Infinity), so that it is found by its place only."""
    at = _BYTE.search(error)
    key = at and _LAST_KEY.search(body[: int(at[1])][-128:])
    return key[1].decode() if key else None


def _refuse_unsupported(request: Request) -> None:
    if request.n not in (None, 1):
        raise InvalidRequest(f"n={request.n} is not supported yet: send {request.n} requests with n=1", field="n")
    unsupported: dict[str, Any] = {"logit_bias": request.logit_bias}
    if isinstance(request, ChatRequest):
        form = request.response_format
        plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
        unsupported |= {
            "tools": request.tools,
            "functions": request.functions,
            "response_format": None if plain else form,
        }
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    else:
        unsupported |= {"echo": request.echo, "suffix": request.suffix}
        if request.best_of not in (None, 1):
            unsupported["best_of"] = request.best_of
    for field, value in unsupported.items():
        if value:
            raise InvalidRequest(f"{field} is not supported yet", field=field)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", field="stream_options")


# --- Prompt -----------------------------------------------------------------------------------------------------------


def prompt_tokens(request: Request, tokenizer: Tokenizer) -> list[int]:
    """The prompt as the model reads it; never empty.

    Raises:
        InvalidRequest: the template refuses the messages, or the prompt is of no supported form.
    """
    if isinstance(request, ChatRequest):
        rendered = tokenizer.render([_message(message, at) for at, message in enumerate(request.messages)])
        tokens = _encode(tokenizer, rendered, "messages", add_special_tokens=False)
    else:
        prompt = _single(request.prompt)
        tokens = prompt if isinstance(prompt, list) else _encode(tokenizer, prompt, "prompt", add_special_tokens=True)
        if isinstance(prompt, list) and tokens and max(tokens) >= tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {max(tokens)} is not in the model's vocabulary of {tokenizer.vocab_size}", field="prompt"
            )
    if not tokens:
        raise InvalidRequest("the prompt is empty", field="messages" if isinstance(request, ChatRequest) else "prompt")
    return tokens


def _encode(tokenizer: Tokenizer, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise InvalidRequest(f"the text is not valid Unicode: {error}", field=field) from error


def _message(message: Message, at: int) -> ChatMessage:
    content = message.content
    if isinstance(content, list):
        for index, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"content part of type {part.type!r} is not supported: send text",
                    field=f"messages[{at}].content[{index}]",
                )
        content = "\n".join(part.text or "" for part in content)
    return ChatMessage(message.role, content or "", message.name)


def _single(prompt: str | Sequence[int | str | list[int]]) -> str | list[int]:
    """A string or token ids, either of them also as the only member of a list."""
    if isinstance(prompt, str):
        return prompt
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return ids
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        return prompt[0]
    raise InvalidRequest("several prompts in one request are not supported: send one request each", field="prompt")


# --- Sampling ---------------------------------------------------------------------------------------------------------


def sampling_of(request: Request, prompt_length: int, max_context: int, max_output: int) -> Sampling:
    """How to sample, with ``max_tokens`` filled in.

    Raises:
        ContextTooLong: prompt, or prompt and ``max_tokens``, do not fit.
        InvalidRequest: ``max_tokens`` is over the configured bound, or given twice with different values.
    """
    field, max_tokens = _max_tokens(request)
    room = max_context - prompt_length
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_length} tokens, and this model's context is {max_context} tokens, output included",
            field="messages" if isinstance(request, ChatRequest) else "prompt",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextTooLong(
            f"prompt ({prompt_length} tokens) and {field} ({max_tokens}) make {prompt_length + max_tokens} tokens, "
            f"and this model's context is {max_context} tokens",
            field=field,
        )
    if max_tokens is not None and max_tokens > max_output:
        raise InvalidRequest(f"{field} is {max_tokens}, and this server allows {max_output} at most", field=field)
    limit = min(room, max_output) if max_tokens is None else max_tokens
    if (request.min_tokens or 0) > limit:
        raise InvalidRequest(f"min_tokens is {request.min_tokens}, but {field} is {limit}", field="min_tokens")
    chosen = {name: value for name in SAME_IN_SAMPLING if (value := getattr(request, name)) is not None}
    stop = request.stop
    return Sampling(
        max_tokens=limit,
        seed=random.getrandbits(63) if request.seed is None else request.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        top_k=max(request.top_k or 0, 0),
        logprobs=_logprobs(request),
        **chosen,
    )


def _max_tokens(request: Request) -> tuple[Literal["max_tokens", "max_completion_tokens"], int | None]:
    """``max_tokens`` is the old name of ``max_completion_tokens`` in chats."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                f"max_tokens ({request.max_tokens}) and max_completion_tokens ({request.max_completion_tokens}) "
                "differ: they mean the same, send one",
                field="max_tokens",
            )
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _logprobs(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs
