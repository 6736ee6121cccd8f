"""Tool calls as Gemma 4 writes them, `{city:<|"|>Paris<|"|>,days:3}`: converting them to JSON while they arrive, and
grammar rules that hold them to schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NoReturn

from gateway.core.tokenizer import overlap_length
from outrider.errors import InvalidGrammarError
from outrider.grammar.spec import MAX_SOURCE_BYTES, prepare_schema, resolve_reference

QUOTE = '<|"|>'
"""The quote before and after each string, a token of its own; nothing within a string is escaped."""

_ESCAPES = '"\\/bfnrtu'
"""Characters that may follow a backslash in JSON."""
_NULLS = ("null", "none", "nil")
"""Words for null: the template writes a null in the conversation as `None`."""

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
    | {"$comment", "$schema", "$id", "$defs", "definitions"}
)
"""Keywords that do not limit the values of their schema."""
_REFERENCE = '"$ref"'
_Embedded = Callable[[dict[str, Any]], str]
_BARE_KEY = re.compile(r"[\w$.-]+")


def write_value(value: Any) -> str:
    """Return a JSON value as Gemma's template writes it: keys bare and sorted, strings in Gemma's quotes."""
    if isinstance(value, dict):
        items = (f"{_written_key(key)}:{write_value(value[key])}" for key in _in_order(value))
        return f"{{{','.join(items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(write_value, value))}]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) and QUOTE not in value else _in_json(value)


def _in_order(keys: Iterable[str]) -> list[str]:
    """Sort keys as the template does: Jinja's dictsort ignores case."""
    return sorted(keys, key=str.lower)


def _written_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _in_json(key)


def read_arguments(take: Callable[[str], None]) -> Generator[None, str, None]:
    """Read an object that is sent one character at a time, up to its end, and give `take` the same in JSON.

    Models deviate from this form, so JSON is read, too, and a bare word that is not JSON becomes a string. Anything out
    of place in an object or a list is left out, so that the result is JSON whenever the object comes to its end.
    """
    opened: list[str] = []
    has_item = False
    """Whether the innermost object or list has an item."""
    character = yield
    while True:
        if character in "}]" and opened:
            take("}" if opened.pop() == "{" else "]")
            if not opened:
                return
            has_item = True
            character = yield
            continue
        if character.isspace() or character == ",":
            character = yield
            continue
        comma = "," if has_item else ""
        if opened and opened[-1] == "{":
            key: list[str] = []
            character = yield from _read_word(character, ":,}", key.append, _in_json)
            while character not in ":,}":
                character = yield
            if character != ":":
                continue
            take(f"{comma}{''.join(key)}:")
            character = yield
            while character.isspace():
                character = yield
        elif comma:
            take(comma)
        if character in "{[":
            take(character)
            opened.append(character)
            has_item = False
            character = yield
        else:
            character = yield from _read_word(character, ",}]", take, _scalar)
            has_item = True


def _read_word(
    character: str, ends: str, take: Callable[[str], None], written: Callable[[str], str]
) -> Generator[None, str, str]:
    """Read a string, or a bare word up to one of `ends`; `written` makes JSON of the word. Return what follows it."""
    if character == '"':
        take(character)
        while (character := (yield)) != '"':
            if character == "\\":
                take(character)
                character = yield
                take(character if character in _ESCAPES else "\\" + _in_json(character)[1:-1])
            else:
                take(_in_json(character)[1:-1])
        take(character)
        return (yield)
    word = ""
    while character not in ends:
        word += character
        if word == QUOTE:
            yield from _read_quoted(take)
            return (yield)
        character = yield
    take(written(word.strip()))
    return character


def _read_quoted(take: Callable[[str], None]) -> Generator[None, str, None]:
    """Read a string, from after its opening quote to the end of its closing one."""
    take('"')
    held = ""
    while held != QUOTE:
        held += yield
        length = 0 if held == QUOTE else len(held) - overlap_length(held, QUOTE)
        if length:
            take(_in_json(held[:length])[1:-1])
            held = held[length:]
    take('"')


def _in_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _scalar(word: str) -> str:
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        if word.lower() in _NULLS:
            return "null"
        return word.lower() if word.lower() in ("true", "false") else _in_json(word)
    return word


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def call_rules(
    names: Sequence[str], definitions: dict[str, Any], quote_id: int | None, embedded: _Embedded
) -> list[str]:
    """Return rules in Lark; the rule `call` covers what follows the opener, up to the end of the arguments.

    `definitions`: the keyword `$defs` with the schemas `tool0`, `tool1` and so on; `quote_id`: the token of the quote,
    if there is one; `embedded`: writes a JSON schema as an expression.
    """
    prepare_schema(definitions)
    writer = _Writer(definitions, quote_id, embedded)
    calls = [
        f"{_literal(f'call:{name}')} {writer.value(definitions['$defs'][f'tool{index}'])}"
        for index, name in enumerate(names)
    ]
    return [f"call: {' | '.join(calls)}", *writer.finish()]


class _Writer:
    """Turns schemas into expressions of a grammar.

    Values are written in the model's form, with keys in the sorted order of its template. What this form cannot
    express, such as a string with a pattern, is written as JSON, which `read_arguments` accepts as well.
    """

    def __init__(self, definitions: dict[str, Any], quote_id: int | None, embedded: _Embedded) -> None:
        self._definitions = definitions
        self._embedded = embedded
        self._size = 0
        """Size of the expressions for values in JSON."""
        self._json_rules: dict[str, str] = {}
        """The rule of each schema whose values are in JSON."""
        self._references: dict[str, str] = {}
        """The rule of each reference."""
        self._pending: list[str] = []
        """References without a rule yet."""
        pattern = re.escape(QUOTE)
        if quote_id is None:
            self._quote = json.dumps(QUOTE)
            string, text = f"{self._quote} quoted", rf"quoted[lazy]: /(.|\n)*{pattern}/"
        else:
            self._quote = f"<[{quote_id}]>"
            string = f"{self._quote} QUOTED {self._quote}"
            text = rf"QUOTED: /(.|\n)*/ & ~/(.|\n)*{pattern}(.|\n)*/"
        self.rules = [
            f"string: {string}",
            text,
            "value: string | object | array | scalar",
            f"scalar: {embedded({'type': ['number', 'boolean', 'null']})}",
            'array: "[" (value ("," value)*)? "]"',
            'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
            r'KEY: /[^ \n\r\t:,{}\[\]<|>"]+/',
        ]

    def finish(self) -> list[str]:
        """Complete the rules with those of pending references, and return them."""
        while self._pending:
            reference = self._pending.pop()
            schema = resolve_reference(self._definitions, reference)
            value = self._in_json({"$ref": reference}) if schema is None else self.value(schema)
            self.rules.append(f"{self._references[reference]}: {value}")
        return self.rules

    def value(self, schema: Any) -> str:
        """Return an expression for values that fit a schema."""
        return self._in_form(schema) or self._in_json(schema)

    def _in_form(self, schema: Any) -> str | None:
        """Return an expression in the model's form; None if the form cannot express the schema, and for what is no
        schema, which verify refuses."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            return None
        match {key: value for key, value in schema.items() if key not in _ANNOTATIONS and not key.startswith("x-")}:
            case {**known} if not known:
                return "value"
            case {"$ref": str(reference), **others} if not others:
                return self._reference(reference)
            case {"anyOf": [*cases], **others} if cases and not others:
                return f"({' | '.join(map(self.value, cases))})"
            case {"enum": [*values], **others} if others in ({}, {"type": "string"}):
                return self._one_of(values)
            case {"const": str(text), **others} if others in ({}, {"type": "string"}):
                return self._one_of([text])
            case {"type": "string", **others} if not others:
                return "string"
            case {"type": "array", **others} if others.keys() <= {"items", "minItems", "maxItems"}:
                return self._array(others.get("items", True), others.get("minItems", 0), others.get("maxItems"))
            case {"type": "object", **others} if others.keys() <= {"properties", "required", "additionalProperties"}:
                properties, required = others.get("properties", {}), others.get("required", [])
                if isinstance(properties, dict) and isinstance(required, list):
                    return self._object(properties, required, others.get("additionalProperties", not properties))
        return None

    def _in_json(self, schema: Any) -> str:
        text = json.dumps(schema)
        if text in self._json_rules:
            return self._json_rules[text]
        written: dict[str, Any] = schema if isinstance(schema, dict) else {"allOf": [schema]}
        # Definitions may be long, and are rarely needed.
        shared = {key: value for key, value in self._definitions.items() if key != "$defs" or _REFERENCE in text}
        made = self._embedded(written | shared)
        self._size += len(made)
        if self._size > MAX_SOURCE_BYTES:
            raise InvalidGrammarError(
                "chat.tools",
                f"their grammar is over the limit of {MAX_SOURCE_BYTES} bytes",
                "send fewer or shorter ones",
            )
        self._json_rules[text] = self._rule(made)
        return self._json_rules[text]

    def _rule(self, expression: str) -> str:
        """Add a rule for an expression that may be used in more than one place. Return its name."""
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            self._references[reference] = f"ref{len(self._references)}"
            self._pending.append(reference)
        return self._references[reference]

    def _one_of(self, values: list[Any]) -> str | None:
        if not values or not all(isinstance(value, str) and "<" not in value for value in values):
            return None
        return f"({' | '.join(f'{self._quote} {_literal(value)} {self._quote}' for value in values)})"

    def _array(self, items: Any, least: Any, most: Any) -> str | None:
        if type(least) is not int or type(most) not in (int, type(None)) or (most is not None and most < max(1, least)):
            return None
        item = self._rule(self.value(items))
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        several = item if most == 1 else f"{item} {more}"
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def _object(self, properties: dict[str, Any], required: list[Any], others: Any) -> str | None:
        if others is not False:
            if properties or required:
                return None
            pair = self._rule(f'KEY ":" {self.value(others)}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        if not all(key in properties for key in map(str, required)):
            return None
        heads: list[str] = []
        behind, ending = "", "?"
        for key in reversed(_in_order(properties)):
            pair = self._rule(f"{_literal(f'{_written_key(key)}:')} {self.value(properties[key])}")
            is_required = key in required
            if is_required:
                heads.clear()
                ending = ""
            heads.append(f"{pair} {behind}")
            behind = self._rule(f'("," {pair}){"" if is_required else "?"} {behind}')
        return f'"{{" ({" | ".join(heads)}){ending} "}}"' if heads else '"{" "}"'


def _literal(text: str) -> str:
    return escape_directives(_in_json(text))


def escape_directives(source: str) -> str:
    """Return JSON that is safe in a grammar: a text in it may hold "::=", which would change the grammar's language, or
    "%llguidance", which would be a directive to the library."""
    return source.replace("::=", "::\\u003d").replace("%llguidance", "\\u0025llguidance")
