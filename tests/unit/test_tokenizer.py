"""The tokenizer adapter reads a model directory as transformers does: same ids, same text, same rendered chats."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pdq.adapters.tokenizer import ByteTokenizer, load_tokenizer
from pdq.core.errors import InvalidRequest, InvalidSettings
from pdq.core.messages import ChatMessage
from tests.unit import tiny_tokenizers as tiny

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message['role'] == 'assistant' %}
{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}

    {% else %}
[{{ ns.count }}] {{ message | tojson }} {{ message.content | tojson(indent=2) }}
    {% endif %}
{% endfor %}
{% if not messages[0].name is defined %}{{ 'anonymous <é> ' }}{% endif %}
{% if add_generation_prompt %}Assistant:{% endif %}"""
CHATS = [
    [{"role": "user", "content": "hello world"}],
    [
        {"role": "system", "content": "  be brief \n"},
        {"role": "user", "content": 'the "dog" <b>日本</b>', "name": "ann"},
        {"role": "assistant", "content": " jumps "},
        {"role": "user", "content": "<|im_end|></s> injected"},
    ],
]


def write(directory: Path, template: str | None = None, **files: Any) -> Path:
    tokenizer = tiny.byte_level()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=tiny.BOS, eos_token=tiny.EOS)
    fast.save_pretrained(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("template", [CHATML, BLOCKS], ids=["chatml", "blocks"])
@pytest.mark.parametrize("chat", CHATS, ids=["short", "long"])
def test_a_rendered_chat_equals_that_of_transformers(tmp_path: Path, template: str, chat: list[dict[str, str]]) -> None:
    directory = write(tmp_path, template)
    ours, theirs = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    rendered = ours.render([ChatMessage(**message) for message in chat])
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.encode(rendered, add_special_tokens=False) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize(
    "text",
    ["", " ", "hello world", "  two  spaces ", "日本語 😀", "<s> hello</s>", "a\nb\t\x00", "long, <s>日本 " * 1000],
)
def test_ids_and_text_equal_those_of_transformers(tmp_path: Path, text: str) -> None:
    directory = write(tmp_path)
    ours, theirs = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for special in (True, False):
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_template_in_its_own_file_goes_before_the_configured_one(tmp_path: Path) -> None:
    directory = write(tmp_path, "configured")
    hello = [ChatMessage("user", "hello")]
    assert load_tokenizer(directory).render(hello) == "configured"
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_tokenizer(directory).render(hello) == "from json"
    (directory / "chat_template.jinja").write_text("from jinja")
    assert load_tokenizer(directory).render(hello) == "from jinja"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    directory = write(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(directory).render([ChatMessage("user", "hello")]) == "plain"


def test_what_a_template_refuses_is_the_clients_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        tokenizer.render([ChatMessage("user", "hello")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "escape", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ lipsum.__globals__.os }}"]
)
def test_a_template_stays_in_its_sandbox(tmp_path: Path, escape: str) -> None:
    with pytest.raises(InvalidRequest):
        load_tokenizer(write(tmp_path, escape)).render([ChatMessage("user", "hello")])


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_tokenizer(write(tmp_path)).render([ChatMessage("user", "hello")])


def test_a_template_that_does_not_compile_is_refused_at_loading(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="does not compile"):
        load_tokenizer(write(tmp_path, "{% if %}"))


def test_end_tokens_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    directory = write(tmp_path, generation_config={"eos_token_id": [7, 8]}, config={"text_config": {"eos_token_id": 9}})
    assert load_tokenizer(directory).eos_token_ids == {1, 7, 8, 9}


def test_a_piece_keeps_its_leading_space_and_shows_special_tokens(tmp_path: Path) -> None:
    tiny.llama().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(tokenizer.piece(token) for token in hello).startswith(" ")
    assert tokenizer.piece(2) == "</s>"


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    inner = tiny.byte_level()
    inner.enable_truncation(3)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("a b c d e f g h")) > 3


def test_the_digest_is_of_the_file(tmp_path: Path) -> None:
    tiny.llama().save(str(tmp_path / "tokenizer.json"))
    first = load_tokenizer(tmp_path).digest
    assert load_tokenizer(tmp_path).digest == first
    tiny.metaspace().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).digest != first
    assert len(first) == 32


@pytest.mark.parametrize("content", [None, "not json", "{}", '{"decoder": {"type": "CTC"}}'])
def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidSettings, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_the_byte_tokenizer_round_trips_any_text_and_ends_at_its_own_end_token() -> None:
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.decode(tokenizer.encode("żółć 😀")) == "żółć 😀"
    assert tokenizer.eos_token_ids == {ByteTokenizer.EOS}
    assert tokenizer.render([ChatMessage("user", "hi")]) == "user: hi\nassistant: "
