"""Text, token ids and conversations, by the files of a Hugging Face directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import make_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fastdeploy_rl.control.text_stream import TextStream
from fastdeploy_rl.engines.embedded import tokenizer as tokenizer_module
from fastdeploy_rl.errors import CheckpointError, RequestError

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}"
)
TEMPLATE += "{% endif %}<s>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
EOS = 256


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One token a byte, <e> ends, <s> starts."""
    make_checkpoint(tmp_path, vocab_size=258, eos_token_id=EOS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<e>", special=True), AddedToken("<s>", special=True)])
    fast.save(str(tmp_path / "tokenizer.json"))
    write_settings(tmp_path, eos_token={"content": "<e>"}, chat_template=TEMPLATE)
    return tmp_path


def write_settings(directory: Path, **settings: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def open_tokenizer(directory: Path) -> tokenizer_module.Tokenizer:
    return tokenizer_module.Tokenizer.open(directory)


@pytest.mark.parametrize("text", ["plain", "Zürich, 東京 🗼", "", " two  spaces\n"])
def test_text_comes_back(directory: Path, text: str) -> None:
    tokenizer = open_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_special_tokens_are_one_token_and_not_shown(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    token_ids = tokenizer.encode("a<e>")
    assert token_ids[1:] == [EOS]
    assert tokenizer.decode(token_ids) == "a"
    assert list(tokenizer.eos_token_ids) == [EOS]


def test_stream_never_breaks_a_character(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    stream = TextStream(tokenizer, ())
    pieces = [stream.push(token_id) for token_id in tokenizer.encode("ü東🗼")]
    assert [piece for piece in pieces if piece] == ["ü", "東", "🗼"]


def test_conversation_is_rendered_by_the_template(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<s>hi<e><s>"
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode("<s>hi<e><s>")


def test_template_in_its_own_file_wins(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("own file")
    assert open_tokenizer(directory).render_chat([]) == "own file"


def test_of_several_named_templates_the_default_counts(directory: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_settings(directory, chat_template=templates)
    assert open_tokenizer(directory).render_chat([]) == "plain"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "default", "template": 7}], "chat_template: expected text or a list of named texts, got int"),
        ({"default": "x"}, "chat_template: expected text or a list of named texts, got dict"),
    ],
)
def test_template_of_another_kind_is_named(directory: Path, template: object, message: str) -> None:
    write_settings(directory, chat_template=template)
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {message}"):
        open_tokenizer(directory)


def test_special_tokens_come_from_the_map_where_the_settings_have_none(directory: Path) -> None:
    write_settings(directory, bos_token="<own>", chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    mapped = {"bos_token": "<mapped>", "eos_token": {"content": "<e>", "lstrip": False}}
    (directory / "special_tokens_map.json").write_text(json.dumps(mapped))
    assert open_tokenizer(directory).render_chat([]) == "<own><e>"


def test_template_has_what_transformers_gives_it(directory: Path) -> None:
    """loopcontrols, plain tojson, namespaces, absent tools, generation marks, the day."""
    template = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    template += "{% if tools is not none or documents is not none %}tools{% endif %}"
    template += "{% generation %}{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endgeneration %}"
    template += "{{ strftime_now('%Y')|length }}{{ 'a'|indent(2, true) }}{% for i in range(2) %}{{ i }}{% endfor %}"
    template += "{{ 'b'|indent(width=2, first=true) }}{{ 'c'|center(3) }}{{ ('d'|center)|length }}"
    write_settings(directory, chat_template=template)
    messages = [{"role": "user", "content": "<ü>"}, {"role": "assistant", "content": "no"}]
    assert open_tokenizer(directory).render_chat(messages) == '{"role": "user", "content": "<ü>"}24  a01  b c 80'


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a'|center(10000000000) }}",
        "{{ 'a'|indent(10000000000, true) }}",
        "{{ 'a'|indent(first=true, width=10000000000) }}",
        "{{ messages | tojson(indent=10000000000) }}",
        "{% for i in range(100) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_without_end_is_stopped(directory: Path, template: str) -> None:
    write_settings(directory, chat_template=template)
    with pytest.raises(RequestError, match="refuses these messages"):
        open_tokenizer(directory).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "message", [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
)
def test_tools_are_refused_clearly(directory: Path, message: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="this engine has no tool calls"):
        open_tokenizer(directory).render_chat([{"role": "user", "content": "2+2?"}, message])


def test_slow_tokenizer_is_refused_with_the_mend(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone is a slow tokenizer.*save_pretrained"):
        open_tokenizer(directory)


def test_refused_role_is_a_request_error(directory: Path) -> None:
    with pytest.raises(RequestError, match="refuses these messages: no role wizard"):
        open_tokenizer(directory).render_chat([{"role": "wizard", "content": "hi"}])


@pytest.mark.parametrize("template", [None, [], [{"name": "tool_use", "template": "x"}]])
def test_model_without_template_says_so(directory: Path, template: object) -> None:
    write_settings(directory, eos_token="<e>", chat_template=template)
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        open_tokenizer(directory).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for",
    ],
)
def test_template_cannot_reach_python_or_change_the_messages(directory: Path, template: str) -> None:
    write_settings(directory, chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="refuses these messages"):
        open_tokenizer(directory).render_chat(messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_or_broken_file_is_named(directory: Path, name: str) -> None:
    (directory / name).write_text("{")
    with pytest.raises(CheckpointError, match=f"{name}: not a"):
        open_tokenizer(directory)
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: No such file"):
        open_tokenizer(directory)


def test_import_needs_no_framework() -> None:
    heavy = "{'paddle', 'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, fastdeploy_rl.engines.embedded.tokenizer; sys.exit(len({heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
