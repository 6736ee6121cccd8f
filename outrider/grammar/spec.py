"""Grammars that requests set for their answers, and checks of them that need no compilation. Torch-free.

Whether a grammar can be compiled is only known after compiling it (`outrider.grammar.compiler`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote

from outrider.errors import InvalidGrammarError


class GrammarKind(Enum):
    """The language that a grammar is written in."""

    JSON_OBJECT = "json_object"
    """Any JSON object; has no source."""
    JSON_SCHEMA = "json_schema"
    """The source is a JSON schema, as JSON."""
    REGEX = "regex"
    """The source is a regular expression that the whole answer matches."""
    CHOICE = "choice"
    """The source is a JSON list of texts, of which the answer is one."""
    EBNF = "ebnf"
    """The source is a context-free grammar in llguidance's dialect of Lark, or in GBNF. Rules in Lark may be followed
    by the line `FORM_BELOW` and a second grammar in either language, which the rules call `form`, or by the line
    `PATTERN_BELOW` and a regular expression, which they call `PATTERN`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match as a whole."""

    kind: GrammarKind
    source: str = ""

    @classmethod
    def of_choices(cls, choices: list[str]) -> Grammar:
        """Return the grammar whose answers are these texts."""
        return cls(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))

    @property
    def choices(self) -> list[str]:
        """The texts of a CHOICE."""
        return [str(choice) for choice in json.loads(self.source)]

    @property
    def digest(self) -> str:
        """SHA-256 of the grammar's kind and source, hexadecimal."""
        return hashlib.sha256(f"{self.kind.value}\n{self.source}".encode()).hexdigest()

    @property
    def field(self) -> str:
        """The field of gRPC's `Grammar` message that holds the source; messages name it."""
        return f"grammar.{self.kind.value}"


FORM_BELOW = "%form"
"""The line between the rules of an EBNF and the grammar that they call `form`."""
PATTERN_BELOW = "%pattern"
"""The line between the rules of an EBNF and the regular expression that they call `PATTERN`."""
EMPTY_DIRECTIVE = "%llguidance {}"
"""The only directive to the grammar library that a grammar in Lark may begin with: it sets no options."""
MAX_SOURCE_BYTES = 65536
"""Longest source of a JSON schema, an EBNF or a CHOICE."""
MAX_REGEX_BYTES = 4096
MAX_CHOICES = 1024
MAX_DEPTH = 64
"""Most levels of nested objects and lists in a JSON schema."""
_MAX_REFERENCES = 8
"""Most references from a `propertyNames` to the schema that says what the names are."""

_WHOLE_NUMBERS = range(-(10**18), 2**64)
"""Integers that a schema may hold: the grammar library refuses others as invalid JSON, and near -2^63 it crashes."""
_MANY_DIGITS = re.compile(r"-?(?<![\d.])\d{19,4000}(?![\d.eE])")
EXACT_ONE_OF: dict[str, Any] = {"x-guidance": {"coerce_one_of": False}}
"""The only option of the grammar library that a schema may set: not to read `oneOf` as `anyOf` if cases overlap."""
_UNSUPPORTED = {
    "not": "say what is allowed instead",
    "if": "use anyOf with both cases",
    "then": "use anyOf with both cases",
    "else": "use anyOf with both cases",
    "contains": "leave it out and check it afterwards",
    "minContains": "leave it out and check it afterwards",
    "maxContains": "leave it out and check it afterwards",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "dependentRequired": "use anyOf with both cases",
    "dependentSchemas": "use anyOf with both cases",
    "dependencies": "use anyOf with both cases",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""Keywords of JSON Schema that no token mask can enforce, and what to write instead."""
_DROPPED = ("uniqueItems", "$dynamicAnchor", "$recursiveAnchor")
"""Keywords that are dropped: the grammar library refuses them, and other engines ignore them."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Values of `format` that the library enforces; all others are annotations, as in JSON Schema."""
_DIALECTS = ("http://json-schema.org/draft", "https://json-schema.org/draft")
"""Beginnings of `$schema` that the library knows; for others it would fetch something."""
_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps arbitrary names to schemas."""
_NAME_KEYS = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "$ref"})
"""Keywords that matter in the schema of `propertyNames`: those for strings, since all names are strings."""
_MEMBER_KEYS = {
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "required",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
}
"""Keywords about an object's keys or a list's items."""
_APPLIED_HERE = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords that apply other schemas to the same value, besides allOf."""
_DATA = ("enum", "const", "default", "examples", "example", "discriminator")
"""Keywords whose value is not a schema; neither is that of keywords that begin with x-."""


def check_grammar(grammar: Grammar, field: str | None = None, *, strict: bool = False) -> None:
    """Raise InvalidGrammarError, about `field`, for a grammar that is too large or uses unsupported features.

    `strict` also refuses a schema with `uniqueItems` or a `format` of names, which are not enforced.
    """
    field = field or grammar.field
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            _check_schema(grammar.source, field, strict=strict)
        case GrammarKind.REGEX:
            _check_size(grammar.source, MAX_REGEX_BYTES, field)
            if not grammar.source:
                raise InvalidGrammarError(field, "is empty", "send a regular expression")
        case GrammarKind.EBNF:
            _check_size(grammar.source, MAX_SOURCE_BYTES, field)
            if not grammar.source.strip():
                raise InvalidGrammarError(field, "is empty", "send a grammar with a rule named root or start")
            rules = grammar.source.partition(f"\n{PATTERN_BELOW}\n")[0]
            # The library's own clients begin grammars with this directive, which sets nothing.
            if "%llguidance" in rules.replace(EMPTY_DIRECTIVE, "", 1):
                raise InvalidGrammarError(field, "holds a directive of the grammar library", "remove %llguidance")
            if "%json" in grammar.source:
                for digits in _MANY_DIGITS.findall(grammar.source):
                    _check_numbers(int(digits), field)
        case GrammarKind.CHOICE:
            _check_size(grammar.source, MAX_SOURCE_BYTES, field)
            choices = grammar.choices
            if not choices or len(choices) > MAX_CHOICES:
                raise InvalidGrammarError(field, f"holds {len(choices)} choices", f"send 1 to {MAX_CHOICES}")
            if not all(choices):
                raise InvalidGrammarError(field, "holds an empty choice", "send texts of at least one character")


def without_further_keys(source: str) -> str:
    """Return a JSON schema whose objects have only the keys it names, unless it says otherwise: OpenAI's `strict`.

    Its `oneOf` is enforced, or refused by verify. Schemas joined by allOf stay as they are, because each would forbid
    the keys of the others. Raises ValueError, RecursionError.
    """
    schema = json.loads(source)
    level: list[Any] = [schema]
    while level:
        value = level.pop()
        if isinstance(value, dict) and (value.get("type") == "object" or "properties" in value):
            value.setdefault("additionalProperties", False)
        level += [child for place, child in _subschemas(value) if place != ".allOf"]
    if isinstance(schema, dict):
        schema = EXACT_ONE_OF | schema
    return json.dumps(schema, ensure_ascii=False)


def prepare_schema(schema: Any) -> None:
    """Rewrite a JSON schema in place for the grammar library: `propertyNames` in other keywords, no annotations.

    Objects whose keys a schema names get no further ones, unless it speaks of them: a small model writes keys until its
    tokens run out. Schemas that hold together for one value stay open, since each would forbid the keys of the others.
    """
    open_ids = _joined(schema)
    level: list[Any] = [schema]
    while level:
        value = level.pop()
        if isinstance(value, dict):
            if id(value) not in open_ids and _names_its_keys(value):
                value["additionalProperties"] = False
            for key in [key for key, child in value.items() if _is_annotation(key, child)]:
                del value[key]
            joined = value.get("allOf", [])
            if "propertyNames" in value and isinstance(joined, list):
                value["allOf"] = [*joined, _object_of_names(value.pop("propertyNames"), schema) or {}]
        level += [child for _, child in _subschemas(value)]


def _names_its_keys(value: dict[str, Any]) -> bool:
    """Whether a schema names keys, among them those that it requires, and says nothing of others."""
    properties, required = value.get("properties", {}), value.get("required", [])
    return (
        not value.keys().isdisjoint({"properties", "patternProperties"})
        and value.keys().isdisjoint({"additionalProperties", "propertyNames", "minProperties"})
        and isinstance(properties, dict)
        and isinstance(required, list)
        and all(str(name) in properties for name in required)
    )


def _joined(root: Any) -> set[int]:
    """Return the ids of schemas that hold together with others for one value, and of all schemas below them."""
    level, together = [root], []
    while level:
        value = level.pop()
        level += [child for _, child in _subschemas(value)]
        if isinstance(value, dict):
            all_of = value.get("allOf")
            num_here = len(value.keys() & _APPLIED_HERE) + (len(all_of) if isinstance(all_of, list) else 0)
            if num_here + (not value.keys().isdisjoint(_MEMBER_KEYS)) > 1:
                together.append(value)
            # A key may be among the properties and fit a pattern, too.
            named, patterns = value.get("properties"), value.get("patternProperties")
            if isinstance(named, dict) and isinstance(patterns, dict):
                together += [*named.values(), *patterns.values()]
    found: set[int] = set()
    while together:
        value = together.pop()
        if id(value) not in found:
            found.add(id(value))
            together += [child for _, child in _subschemas(value)]
            if isinstance(value, dict) and "$ref" in value:
                together.append(resolve_reference(root, value["$ref"]))
    return found


def _object_of_names(names: Any, root: Any) -> dict[str, Any] | None:
    """Return a schema of objects whose names fit the schema `names`; None if other keywords cannot express it.

    `root` is the schema that references start from.
    """
    for _ in range(_MAX_REFERENCES):
        if isinstance(names, bool):
            return {} if names else {"additionalProperties": False}
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            return None
        known = names.keys() & _NAME_KEYS - {"type"}
        if known != {"$ref"}:
            break
        names = resolve_reference(root, names["$ref"])
    if known in ({"enum"}, {"const"}):
        values = names["enum"] if "enum" in names else [names["const"]]
        allowed = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        return {"properties": dict.fromkeys(allowed, True), "additionalProperties": False}
    pattern = names.get("pattern")
    if known and known <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        pattern = rf"^[\s\S]{{{least},{most}}}$" if f"{least}{most}".isdigit() else None
    elif known != {"pattern"}:
        return None if known else {}
    if not isinstance(pattern, str):
        return None
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def resolve_reference(root: Any, reference: Any) -> Any:
    """Return what a reference within a schema points at; None if nothing, or deeper than a schema may be."""
    parts = str(reference).removeprefix("#").split("/")[1:]
    if len(parts) > 2 * MAX_DEPTH:  # a keyword and a name for each level
        return None
    for part in parts:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(name)] if name.isdecimal() and len(name) < 6 and int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def _is_annotation(key: str, value: Any) -> bool:
    if key == "$schema":
        return not (isinstance(value, str) and value.startswith(_DIALECTS))
    return key in _DROPPED or (key == "format" and value not in FORMATS)


def _check_size(source: str, limit: int, field: str) -> None:
    try:
        length = len(source.encode())
    except UnicodeEncodeError:
        raise InvalidGrammarError(field, "holds a lone surrogate, which is not Unicode text", "send UTF-8") from None
    if length > limit:
        raise InvalidGrammarError(field, f"{length} bytes, over the limit of {limit}", f"send at most {limit}")


def _check_schema(source: str, field: str, *, strict: bool) -> None:
    _check_size(source, MAX_SOURCE_BYTES, field)
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise InvalidGrammarError(field, reason, "send a JSON schema") from None
    if not isinstance(schema, dict):
        raise InvalidGrammarError(field, "is not an object", 'send a JSON schema such as {"type": "object"}')
    _check_numbers(schema, field)
    if schema.get("x-guidance") == EXACT_ONE_OF["x-guidance"]:
        del schema["x-guidance"]
    # Breadth first with a list of our own, so that depth costs no stack.
    level: list[tuple[Any, str]] = [(schema, field)]
    size_of_names = 0
    for _ in range(MAX_DEPTH):
        for value, path in level:
            _check_keywords(value, path, strict=strict)
            if isinstance(value, dict) and "propertyNames" in value:
                place = f"{path}.propertyNames"
                size_of_names += _check_names(value["propertyNames"], place, schema, strict=strict)
                if size_of_names > MAX_SOURCE_BYTES:
                    problem = (
                        f"with all objects that refer to the same names, over the limit of {MAX_SOURCE_BYTES} bytes"
                    )
                    raise InvalidGrammarError(place, problem, "use a pattern, or fewer names")
        level = [(child, path + place) for value, path in level for place, child in _subschemas(value)]
        if not level:
            return
    raise InvalidGrammarError(field, f"is nested over {MAX_DEPTH} levels", "move inner schemas to $defs and use $ref")


def _check_numbers(schema: Any, field: str) -> None:
    """Raise InvalidGrammarError for a number anywhere in a schema that the grammar library would misread."""
    level: list[tuple[Any, str]] = [(schema, field)]
    while level:
        value, place = level.pop()
        if isinstance(value, dict):
            level += [(child, f"{place}.{key[:40]}") for key, child in value.items()]
        elif isinstance(value, list):
            level += [(child, f"{place}[{index}]") for index, child in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidGrammarError(place, "is not a finite number", "send one below 1.8e308")
        elif isinstance(value, int) and value not in _WHOLE_NUMBERS:
            raise InvalidGrammarError(place, "is too far from 0", "send a whole number from -10^18 to 2^64 - 1")


def _check_keywords(value: Any, path: str, *, strict: bool) -> None:
    """Raise InvalidGrammarError for an unsupported keyword of a schema. A list has no keywords."""
    for key, child in value.items() if isinstance(value, dict) else ():
        if key in EXACT_ONE_OF:
            raise InvalidGrammarError(f"{path}.{key}", "is not a keyword of JSON Schema", "remove it")
        if key in _UNSUPPORTED:
            raise InvalidGrammarError(f"{path}.{key}", "is not supported", _UNSUPPORTED[key])
        if strict and key == "uniqueItems" and child is not False:
            fix = "leave it out and check it afterwards, or leave strict out"
            raise InvalidGrammarError(f"{path}.{key}", "is not enforced", fix)
        if key == "$ref" and isinstance(child, str) and not child.startswith("#"):
            raise InvalidGrammarError(f"{path}.$ref", "points outside the schema", "use a $ref that begins with #")


def _check_names(names: Any, place: str, root: Any, *, strict: bool) -> int:
    """Return roughly how many bytes `prepare_schema` writes for these `propertyNames` at each object that has them.

    Raises InvalidGrammarError about `place` if it cannot express them.
    """
    known = _object_of_names(names, root)
    if known is None:
        fix = "say it by enum, const, pattern, lengths or a $ref to one of these alone, or use patternProperties"
        raise InvalidGrammarError(place, "is not supported", fix)
    if strict and isinstance(names, dict) and names.get("format") in FORMATS:
        raise InvalidGrammarError(f"{place}.format", "is not enforced", "use pattern, or leave strict out")
    return sum(len(name) + 1 for key in ("properties", "patternProperties") for name in known.get(key, ()))


def _subschemas(value: Any) -> list[tuple[str, Any]]:
    """Return the schemas and lists of schemas directly below a schema or a list of schemas, with their places."""
    below: list[tuple[str, Any]] = []
    if isinstance(value, list):
        below = [(f"[{index}]", child) for index, child in enumerate(value)]
    elif isinstance(value, dict):
        for key, child in value.items():
            if key in _NAMES and isinstance(child, dict):
                below += [(f".{key}.{name[:40]}", inner) for name, inner in child.items()]
            elif key not in _DATA and not key.startswith("x-"):
                below.append((f".{key}", child))
    return [(place, child) for place, child in below if isinstance(child, dict | list)]
