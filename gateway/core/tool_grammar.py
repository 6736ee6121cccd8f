"""What holds a call of a tool to the schema of its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.core.request import Tool
from gateway.core.tool_format import ToolFormat
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind, check_grammar


def forced_grammar(tools: Sequence[Tool], form: ToolFormat, field: str) -> Grammar:
    """What an answer is that must be a call of one of these tools. Raises InvalidRequestError about `field`."""
    definitions = {f"tool{index}": _held_schema(tool, f"tool{index}") for index, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, form.arguments_key: {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema | {"$defs": definitions}, ensure_ascii=False))
    check_grammar(grammar, field)
    return grammar


def _held_schema(tool: Tool, place: str) -> dict[str, Any]:
    """A tool's parameters as they stand under `$defs`: references go there, and no further keys are invented."""
    schema = dict(tool.arguments_schema) | {"type": "object"}
    for key in ("$schema", "$id"):
        schema.pop(key, None)
    if not schema.keys() & {"additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"}:
        schema["additionalProperties"] = False
    moved: dict[str, Any] = _moved(schema, f"#/$defs/{place}")
    return moved


def _moved(value: Any, root: str) -> Any:
    """A schema whose references begin at `root`; as deep as `check_grammar` lets it be."""
    if isinstance(value, list):
        return [_moved(child, root) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        key: root + child[1:] if key == "$ref" and isinstance(child, str) else _moved(child, root)
        for key, child in value.items()
    }


def check_tool(tool: Tool, field: str) -> None:
    """Raises InvalidRequestError about `field` for parameters that no grammar can hold arguments to."""
    schema = tool.arguments_schema
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False)), field)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f"{field}.type", "arguments are an object", 'send "object"')
