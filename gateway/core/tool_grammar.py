"""Grammars that hold tool calls to the schemas of their arguments, and answers to a form beside calls and reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from gateway.core.gemma_calls import call_rules, escape_directives
from gateway.core.reasoning import ReasoningStart
from gateway.core.request import Tool
from gateway.core.tool_parser import ToolFormat
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import (
    EXACT_ONE_OF,
    FORM_BELOW,
    MAX_SOURCE_BYTES,
    PATTERN_BELOW,
    Grammar,
    GrammarKind,
    check_grammar,
    prepare_schema,
)

_FIELD = "chat.tools"
"""The field that refusals name."""


def forced_grammars(
    tools: Sequence[Tool], form: ToolFormat, mark_ids: Mapping[str, int]
) -> tuple[Grammar, Grammar | None]:
    """Return the grammar of an answer that must call one of these tools, and another in case verify cannot compile it.

    The first holds arguments to the schema of each tool that is strict or whose schema can be held to; other arguments
    are any object. The second, None if it would be the same, holds only strict tools to their schemas. `mark_ids` as in
    `strict_grammar`. Raises InvalidRequestError.
    """
    loose = _forced(tools, form, _definitions(tools), mark_ids)
    if all(tool.strict for tool in tools):
        return loose, None
    try:
        check_sizes(tools)
        return _forced(tools, form, _definitions(tools, all_held=True), mark_ids), loose
    except InvalidRequestError:
        return loose, None


def _forced(
    tools: Sequence[Tool], form: ToolFormat, definitions: dict[str, Any], mark_ids: Mapping[str, int]
) -> Grammar:
    schema = _call_schema(tools, form)
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    if form.quote:
        rules = _one_call(tools, form, definitions, mark_ids)
        grammar = Grammar(GrammarKind.EBNF, "\n".join(("start: call", *rules)))
    else:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema | definitions, ensure_ascii=False))
    check_grammar(grammar, _FIELD)
    return grammar


def strict_grammar(tools: Sequence[Tool], form: ToolFormat, mark_ids: Mapping[str, int]) -> Grammar | None:
    """Return the grammar of an answer that may call these tools: any text, in which each call fits its tool's schema.

    `mark_ids`: ids of tokens that stand for whole marks, of the format and of reasoning, which the grammar library does
    not take for text. Returns None, for no grammar, if no tool is strict, and for llama3 and mistral.
    Raises InvalidRequestError.
    """
    if not any(tool.strict for tool in tools) or (form.opener and not form.closer):
        return None
    ids = {mark: token_id for mark, token_id in mark_ids.items() if mark not in (form.opener, form.closer)}
    text = f"text: TEXT (({' | '.join(f'<[{mark}]>' for mark in ids.values())}) TEXT)*" if ids else "text: TEXT"
    if form.opener:
        rules = [*_marked_rules(form, mark_ids), *_one_call(tools, form, _definitions(tools), ids)]
    else:
        rules = _bare_rules(tools, form)
    source = "\n".join((*rules, text, r"TEXT: /(.|\n)*/", f"WS: /{_SPACE}/"))
    grammar = Grammar(GrammarKind.EBNF, source)
    check_grammar(grammar, _FIELD)
    return grammar


def form_grammar(
    wanted: Grammar,
    tools: Sequence[Tool],
    form: ToolFormat | None,
    start: ReasoningStart | None,
    mark_ids: Mapping[str, int],
) -> Grammar:
    """Return the grammar of an answer that has the `wanted` form, or consists of calls of these tools.

    Reasoning may come first; `start` says how it begins. Calls of strict tools fit their schemas. `mark_ids` as in
    `strict_grammar`. Raises InvalidRequestError.
    """
    rules = [f"WS: /{_SPACE}/"]
    answer = "form"
    if form is not None and tools:
        answer = "(form | WS? calls)"
        rules += _call_rules(tools, form, mark_ids)
    if start is not None:
        thought = "thought WS?" if start.begun else "(WS? begin thought WS?)?"
        answer = f"{thought} {answer}"
        rules += _thought_rules(start, mark_ids)
    form_rule = _form_rule(wanted, start)
    grammar = Grammar(GrammarKind.EBNF, "\n".join((f"start: {answer}", *rules, form_rule)))
    check_grammar(grammar, "grammar")
    return grammar


def _form_rule(wanted: Grammar, start: ReasoningStart | None) -> str:
    """Return the rule `form`, which comes last."""
    match wanted.kind:
        case GrammarKind.CHOICE:
            choices = (escape_directives(json.dumps(text, ensure_ascii=False)) for text in wanted.choices)
            return f"form: {' | '.join(choices)}"
        case GrammarKind.REGEX:
            # Otherwise an expression that also matches the marker would match the reasoning after it.
            begin = "" if start is None else f" & ~/[ \\n\\r\\t]*{_in_regex(start.markers.begin)}(.|\\n)*/"
            return f"form: FORM\nFORM: PATTERN{begin}\n{PATTERN_BELOW}\n{wanted.source}"
        case GrammarKind.EBNF:
            return f"{FORM_BELOW}\n{wanted.source}"
        case _:
            return f"form: {_embedded(json.loads(wanted.source) if wanted.source else {'type': 'object'})}"


def _call_rules(tools: Sequence[Tool], form: ToolFormat, mark_ids: Mapping[str, int]) -> list[str]:
    calls = {"type": "array", "items": _call_schema(tools, form), "minItems": 1}
    return [
        f"calls: {_calls(form)}",
        *_one_call(tools, form, _definitions(tools), mark_ids),
        f"list: {_embedded(calls | _definitions(tools))}",
        f"opener: {_mark(form.opener, mark_ids)}",
        f"closer: {_mark(form.closer, mark_ids)}",
    ]


def _one_call(
    tools: Sequence[Tool], form: ToolFormat, definitions: dict[str, Any], mark_ids: Mapping[str, int]
) -> list[str]:
    """Return the rule `call`, and the rules that it needs."""
    if form.quote:
        return call_rules([tool.name for tool in tools], definitions, mark_ids.get(form.quote), _embedded)
    return [f"call: {_embedded(_call_schema(tools, form) | definitions)}"]


def _thought_rules(start: ReasoningStart, mark_ids: Mapping[str, int]) -> list[str]:
    """Return rules for reasoning, its end marker included: text, and marks that are tokens of their own."""
    end = start.markers.end
    within = " | ".join(f"<[{token_id}]>" for mark, token_id in mark_ids.items() if mark != end)
    marked = f"(TEXT ({within}))*" if within else ""
    written = _in_regex(end)
    token = f" | {marked} TEXT <[{mark_ids[end]}]>" if end in mark_ids else ""
    return [
        f"begin: {_mark(start.markers.begin, mark_ids)}",
        f"thought: {marked} written{token}",
        rf"written[lazy]: /(.|\n)*{written}/",
        r"TEXT: /(.|\n)*/",
    ]


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _calls(form: ToolFormat) -> str:
    """Return an expression for calls and nothing else."""
    if form.is_list:
        return "opener WS? list"
    if form.closer:
        return "opener WS? call WS? closer (WS? opener WS? call WS? closer)*"
    return 'opener? (call (WS? ";" WS? call)* | list)'


def _mark(mark: str, ids: Mapping[str, int]) -> str:
    """Return an expression for a mark, which may be a token."""
    return json.dumps(mark) + (f" | <[{ids[mark]}]>" if mark in ids else "")


def check_sizes(held: Sequence[Tool]) -> None:
    """Raise InvalidRequestError if the schemas of tools that calls are held to are too large for one grammar, before it
    is made of them."""
    sizes = accumulate(len(json.dumps(tool.arguments_schema, ensure_ascii=False)) for tool in held)
    if any(size > MAX_SOURCE_BYTES for size in sizes):
        raise InvalidRequestError(
            _FIELD,
            f"the schemas that calls must fit are together over the limit of {MAX_SOURCE_BYTES} bytes",
            "send fewer or shorter ones",
        )


_SPACE = r"[ \n\r\t]{1,40}"
_MAY_SPACE = r"[ \n\r\t]{0,40}"


def _marked_rules(form: ToolFormat, ids: Mapping[str, int]) -> list[str]:
    """Return rules for text with calls in it: after an opener the model can only write a call and a closer."""
    opened = f"(written | text <[{ids[form.opener]}]>)" if form.opener in ids else "written"
    return [
        f"start: ({opened} WS? call WS? closer)* text",
        rf"written[lazy]: /(.|\n)*{re.escape(form.opener)}/",
        f"closer: {_mark(form.closer, ids)}",
    ]


def _bare_rules(tools: Sequence[Tool], form: ToolFormat) -> list[str]:
    """Return rules for a call, a list of calls, or text: once a call names a strict tool, the rest must complete it."""
    held = {index: tool for index, tool in enumerate(tools) if tool.strict}
    ways = {
        kind: " | ".join(f"{kind}{index} ARGUMENTS WS? args{index} END" for index in held)
        for kind in ("only", "first", "next")
    }
    rules = [f"start: {ways['only']} | ({ways['first']}) ({ways['next']})* LAST | text"]
    for index, tool in held.items():
        head = rf'\{{{_MAY_SPACE}"name"{_MAY_SPACE}:{_MAY_SPACE}"{re.escape(tool.name)}"'
        arguments = _held_schema(tool, "") | EXACT_ONE_OF
        rules += [
            f"only{index}[lazy]: /{_MAY_SPACE}{head}/",
            rf"first{index}[lazy]: /{_MAY_SPACE}\[{_MAY_SPACE}{head}/",
            f"next{index}[lazy]: /{_MAY_SPACE},{_MAY_SPACE}{head}/",
            f"args{index}: {_embedded(arguments)}",
        ]
    key = rf'ARGUMENTS: /{_MAY_SPACE},{_MAY_SPACE}"{form.arguments_key}"{_MAY_SPACE}:/'
    return [*rules, key, rf"END: /{_MAY_SPACE}\}}/", rf"LAST: /{_MAY_SPACE}\]/"]


def _embedded(schema: dict[str, Any]) -> str:
    """Return a JSON schema for use in a Lark grammar. White space is bounded: small models may repeat it forever."""
    prepare_schema(schema)
    options = {"whitespace_pattern": _SPACE, "lenient": False, "coerce_one_of": True} | schema.get("x-guidance", {})
    return "%json " + escape_directives(json.dumps(schema | {"x-guidance": options}, ensure_ascii=False))


def _call_schema(tools: Sequence[Tool], form: ToolFormat) -> dict[str, Any]:
    """Return the schema of a call of one of the tools; the schema of each one's arguments is under `$defs`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, form.arguments_key: {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _definitions(tools: Sequence[Tool], *, all_held: bool = False) -> dict[str, Any]:
    """Return the keyword `$defs` with the schemas of the tools' arguments.

    For tools that are not strict, this is any object or, with `all_held`, their own schema if it can be held to.
    """
    schemas = {
        f"tool{index}": _held_schema(tool, f"tool{index}")
        if tool.strict or (all_held and _can_be_held(tool))
        else {"type": "object"}
        for index, tool in enumerate(tools)
    }
    # Strict tools are held to `oneOf` exactly, and the library has one rule for the whole grammar.
    return {"$defs": schemas} | (EXACT_ONE_OF if any(tool.strict for tool in tools) else {})


def _can_be_held(tool: Tool) -> bool:
    try:
        _check_schema(tool, _FIELD)
    except InvalidRequestError:
        return False
    return True


_OPEN_KEYS = {"additionalProperties", "patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "$ref"}
"""Keywords of a schema; with any of them, its keys are not limited to its `properties`."""


def _held_schema(tool: Tool, place: str) -> dict[str, Any]:
    """Return a tool's parameters for a place under `$defs`, or by themselves: references point there, and keys are
    limited to `properties` unless the schema says otherwise."""
    schema = dict(tool.arguments_schema) | {"type": "object"}
    for key in ("$schema", "$id"):
        schema.pop(key, None)
    if not schema.keys() & _OPEN_KEYS:
        schema["additionalProperties"] = False
    moved: dict[str, Any] = _moved(schema, f"#/$defs/{place}" if place else "#")
    return moved


def _moved(value: Any, root: str) -> Any:
    """Return a schema with references that begin at `root`. Its depth is one that `check_grammar` lets through."""
    if isinstance(value, list):
        return [_moved(child, root) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        key: root + child[1:] if key == "$ref" and isinstance(child, str) else _moved(child, root)
        for key, child in value.items()
    }


def check_tools(tools: Sequence[Tool], choice: str, name: str | None = None, *, place: str = "chat.tools[{}]") -> None:
    """Raise InvalidRequestError about tools that are not valid, or do not fit the choice; arguments as in `Chat`.

    `name`: the one tool that must be called, if any; `place`: the door's name for the tool with an index, to format.
    """
    names = [tool.name for tool in tools]
    for index, one in enumerate(names):
        if one in names[:index]:
            raise InvalidRequestError(f"{place.format(index)}.name", f"{one!r} is defined twice", "rename one")
    is_forced = choice == "required"
    if name is not None and name not in names:
        raise InvalidRequestError("chat.tool_name", f"{name[:64]!r} is not one of the tools", "send the name of one")
    if name is not None and not is_forced:
        raise InvalidRequestError("chat.tool_name", "needs a tool_choice of required", "set that, or leave it out")
    if is_forced and not tools:
        raise InvalidRequestError(place.partition("[")[0], "missing", "send tools, or set tool_choice to auto")
    for index, tool in enumerate(tools):
        field = f"{place.format(index)}.parameters"
        is_strict = tool.strict and choice != "none"
        if is_strict:
            _check_schema(tool, field)
        if (is_forced or is_strict) and tool.arguments_schema.get("type", "object") != "object":
            raise InvalidRequestError(f"{field}.type", "arguments are an object", 'send "object"')


def _check_schema(tool: Tool, field: str) -> None:
    """Raise InvalidRequestError about `field` for parameters that no grammar can hold arguments to."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(tool.arguments_schema, ensure_ascii=False))
    check_grammar(grammar, field, strict=bool(tool.strict))
