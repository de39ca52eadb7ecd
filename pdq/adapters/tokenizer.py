"""The ``Tokenizer`` port over Hugging Face ``tokenizers`` files and chat templates, without transformers.

Text in, text out and rendered chats equal what transformers makes of the same directory: that equality is tested. So
``chat_template.jinja`` goes before ``chat_template.json`` and ``tokenizer_config.json``, templates run in jinja's
immutable sandbox with the same few additions, and a rendered chat is encoded without further special tokens.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import tokenizers
import xxhash
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdq.core.errors import InvalidRequest, InvalidSettings
from pdq.core.messages import ChatMessage
from pdq.ports import Tokenizer

NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG_TEXT: Final = 4_000
"""Characters."""
UNSTREAMABLE_DECODERS: Final = frozenset({"BPEDecoder", "CTC"})
"""With these the text of a token depends on its neighbours, so that no text is certain before the next token."""


def load_tokenizer(directory: Path | None) -> Tokenizer:
    """The tokenizer of a local model directory, or the ``ByteTokenizer`` where there is no model.

    Raises:
        InvalidSettings: the directory has no usable tokenizer.
    """
    return ByteTokenizer() if directory is None else HuggingFaceTokenizer(directory)


class HuggingFaceTokenizer:
    """``tokenizer.json`` is required; configuration files beside it add EOS ids, named tokens and the template."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidSettings(f"no tokenizer in {directory}: {error}; pdq needs its tokenizer.json") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            decoder = json.loads(data).get("decoder") or {}
        except Exception as error:  # the library raises bare Exceptions
            raise InvalidSettings(f"{path} is not a tokenizer file: {error}") from error
        if unfit := UNSTREAMABLE_DECODERS & _decoder_types(decoder):
            raise InvalidSettings(f"{path} has a {min(unfit)} decoder, whose text cannot be streamed")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._digest = xxhash.xxh3_128_hexdigest(data)
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pieces: dict[int, str] = {}

        config = _read_json(directory / "tokenizer_config.json")
        named = _named_tokens(_read_json(directory / "special_tokens_map.json")) | _named_tokens(config)
        self._eos_token_ids = frozenset(self._find_eos(directory, named.get("eos_token")))
        source = _template_source(directory, config)
        self._template = None if source is None else _compile(source, named, directory)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def digest(self) -> str:
        return self._digest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # ``encode`` keeps all other threads waiting, for seconds if the text is long; the batch call does not, at the
        # price of a thread pool. "Fast" leaves out offsets, which nobody reads here.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def piece(self, token: int) -> str:
        """As it reads behind other text, where a leading space is kept; special tokens by their names."""
        known = self._pieces.get(token)
        if known is None:
            once, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
            known = self._pieces[token] = twice[len(once) :]
        return known

    def render(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", field="messages")
        if not messages:
            raise InvalidRequest("a chat needs at least one message", field="messages")
        try:
            return self._template.render(
                messages=[_as_dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # the template is foreign code: whatever it raises, it could not take the messages
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error

    def _find_eos(self, directory: Path, named: str | None) -> Iterable[int]:
        for name in ("generation_config.json", "config.json"):
            config = _read_json(directory / name)
            for holder in (config, config.get("text_config") or {}):
                ids = holder.get("eos_token_id")
                yield from ids if isinstance(ids, list) else () if ids is None else (ids,)
        if named is not None and (token := self._tokenizer.token_to_id(named)) is not None:
            yield token


class ByteTokenizer:
    """One token per byte, then BOS and EOS: for the engine without a model."""

    BOS: Final = 256
    EOS: Final = 257

    @property
    def vocab_size(self) -> int:
        return 258

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.EOS})

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(b"pdq byte tokenizer")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.BOS, *text.encode()] if add_special_tokens else list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        return {self.BOS: "<bos>", self.EOS: "<eos>"}.get(token) or self.decode([token])

    def render(self, messages: Sequence[ChatMessage]) -> str:
        if not messages:
            raise InvalidRequest("a chat needs at least one message", field="messages")
        return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant: "


# --- Files ------------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if the file is missing."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidSettings(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; each is a string or an object with ``content``."""
    found = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _decoder_types(decoder: Mapping[str, Any]) -> set[str]:
    return {decoder.get("type", "")}.union(*(_decoder_types(inner) for inner in decoder.get("decoders", ())))


# --- Chat templates ---------------------------------------------------------------------------------------------------


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    elif isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _compile(source: str, named_tokens: Mapping[str, str], directory: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(named_tokens, raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidSettings(f"the chat template in {directory} does not compile: {error}") from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; when serving, its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _as_dict(message: ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain if message.name is None else {**plain, "name": message.name}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes for HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
