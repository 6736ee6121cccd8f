from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.chat_template import ChatTemplate, ChatTemplateError
from outrider.errors import ConfigError

HELLO = [{"role": "user", "content": "<b>Hé</b>"}]


def test_templates_see_messages_special_tokens_and_helpers() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y') | length }}",
        {"bos_token": "<s>"},
    )
    assert template.render(HELLO) == '<s>{"role": "user", "content": "<b>Hé</b>"}>4'


def test_json_is_written_as_the_template_asks() -> None:
    source = "{{ m | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=True) }}"
    assert (
        ChatTemplate("{% for m in messages %}" + source + "{% endfor %}").render([{"role": "user", "content": "é"}])
        == r'{"content":"\u00e9","role":"user"}'
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ [1] | dictsort }}",
        "{{ messages.__class__.__mro__[1] }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 9 ** 999999 }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.missing }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    ],
)
def test_a_template_reaches_no_python_and_what_it_cannot_do_is_told(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(HELLO)


def test_broken_and_huge_templates_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate("{% for %}")
    with pytest.raises(ConfigError, match="over the limit"):
        ChatTemplate("x" * (1 << 21))


def test_the_template_comes_from_its_own_file_or_the_config(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = {"chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "config"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None and loaded.render(HELLO) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None and loaded.render(HELLO) == "file"
