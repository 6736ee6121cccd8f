"""Chat templates of model folders, rendered in a sandbox: a template is data, never code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ConfigError, reason_of

MAX_TEMPLATE_BYTES = 1 << 20
MAX_RENDERED_CHARACTERS = 1 << 24
_OWN_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors besides jinja's own that a template raises for values that do not suit it."""


class ChatTemplateError(Exception):
    """The conversation does not suit the template; the message says why."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks answers for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, which also refuses powers and long repetitions: each could eat all memory in one step."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Allow multiplying numbers and repeating short sequences."""
        if operator == "**":
            raise SecurityError("the operator ** is not allowed in a chat template")
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int) and len(sequence) * count > 10_000:
                raise SecurityError("a repetition in the chat template is too long")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """Renders conversations as the model saw them in training."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` maps names such as `bos_token` to their text. Raises ConfigError."""
        if len(source) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"the chat template has {len(source)} characters, over the limit of {MAX_TEMPLATE_BYTES}")
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], autoescape=False
        )
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        environment.filters["tojson"] = _tojson
        self.source = source
        self.knows_tools = re.search(r"\btools\b", source) is not None
        """Whether the template mentions tools."""
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid: {error}") from None

    @classmethod
    def load(cls, folder: Path, name: str = "default") -> ChatTemplate | None:
        """Return a model folder's template, None if it has none; `name` picks one of several. Raises ConfigError."""
        config = read_config(folder / "tokenizer_config.json")
        path = folder / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
        if isinstance(source, list):  # several by name
            source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == name), None)
        if not isinstance(source, str):
            return None
        try:
            return cls(source, special_tokens(config))
        except ConfigError as error:
            raise ConfigError(
                f"{path if path.is_file() else folder / 'tokenizer_config.json'}: {error.message}"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the conversation as text, by default up to where the answer begins. Raises ChatTemplateError.

        `values` are additional variables of the template, by name.
        """
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                {
                    **(values or {}),
                    **self.special_tokens,
                    "messages": [dict(m) for m in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": [dict(tool) for tool in tools] or None,
                }
            ):
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError(
                        f"the rendered conversation is longer than {MAX_RENDERED_CHARACTERS} characters"
                    )
                pieces.append(piece)
        except (jinja2.TemplateError, *_OWN_ERRORS) as error:
            raise ChatTemplateError(str(error)) from None
        return "".join(pieces)


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json; empty if there is none. Raises ConfigError."""
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
    return config if isinstance(config, dict) else {}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token in tokenizer_config.json, by name."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Like transformers: plain JSON, nothing escaped for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
