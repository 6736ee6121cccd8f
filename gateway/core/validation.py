"""Turns pydantic's findings into one error that names the field, the limit and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from outrider.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)

_KINDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}

_WANTED: Mapping[str, str] = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}

_EITHER: Mapping[tuple[int | str, ...], str] = {
    ("@object",): "an object or a string",
    ("@text",): "a string or a list",
    ("@params",): "an object or a list",
    ("stop",): "a string or a list",
}
"""What fields of several types accept, by a location's last part: the field, or the tag of a value of another type."""

_OWN_PARTS = frozenset(
    {"[key]", "@text", "@texts", "@ids", "@lists", "@list", "@object", "@message", "@reasoning", "@call", "@output"}
    | {"@part", "@refusal", "@word", "@named", "@allowed", "@params", "@one"}
)
"""Parts that pydantic adds to a location: the key of a mapping, and the tags of this package's unions."""


FieldNames = Mapping[str, str]
"""A door's names for fields of the internal request, where they differ."""


def validate(model: type[M], data: Any, *, ignore_unknown: bool = False, names: FieldNames | None = None) -> M:
    """Return `data` as `model`. Raises InvalidRequestError about the first wrong field, under its name in `names`.

    `ignore_unknown`: leave out fields that no model knows, at any depth.
    """
    try:
        return model.model_validate(data, extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        raise renamed(explain(error.errors(include_url=False)[0], model), names or {}) from None
    except InvalidRequestError as error:
        raise renamed(error, names or {}) from None


def renamed(error: InvalidRequestError, names: FieldNames) -> InvalidRequestError:
    """Return the error with the door's name for the field."""
    ours = next((name for name in names if re.match(rf"{re.escape(name)}(\W|$)", error.field)), "")
    if not ours:
        return error
    field = names[ours] + error.field.removeprefix(ours)
    return type(error)(field, error.problem, error.fix, code=error.code)


def explain(error: ErrorDetails, model: type[BaseModel]) -> InvalidRequestError:
    """Return one finding in our words. Unknown fields are compared with those of `model`."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    field = field_path(error["loc"])
    if "within" in context:  # found by a validator of the whole object
        field = f"{field}.{context['within']}".removeprefix(".")
    if kind == "extra_forbidden":
        field = field or str(error["loc"][-1])  # named like a part of pydantic's own
        # Fields of a nested object are not those of the model.
        close = difflib.get_close_matches(field, list(model.model_fields), n=1) if "." not in field else ()
        fix = f"remove it, or did you mean {close[0]}?" if close else "remove it"
        return InvalidRequestError(field, "unknown field", fix, code="unknown_parameter")
    if kind == "missing":
        return InvalidRequestError(field, "missing", "this field is required", code="missing_required_parameter")
    if kind == "int_type" and error["loc"][-1:] == ("[key]",):
        return InvalidRequestError(field, "is no token id", "send whole numbers from 0 on", code="invalid_type")
    if kind in _WANTED:
        got = _KINDS.get(type(value), type(value).__name__)
        wanted = _EITHER.get(error["loc"][-1:], _WANTED[kind])
        return InvalidRequestError(field, f"expected {wanted}, got {got}", f"send {wanted}", code="invalid_type")
    if kind.startswith(("greater_than", "less_than")):
        return _out_of_range(field, value, context)
    if kind == "finite_number":
        return InvalidRequestError(field, "is not a finite number", "send a finite number")
    if kind in ("too_long", "string_too_long"):
        limit, unit = context["max_length"], "characters" if isinstance(value, str) else "entries"
        return InvalidRequestError(field, f"{len(value)} {unit}, over the limit of {limit}", f"send at most {limit}")
    if kind in ("too_short", "string_too_short"):
        unit = "character" if isinstance(value, str) else "entry"
        return InvalidRequestError(field, "is empty", f"send at least one {unit}")
    if kind == "literal_error":
        return InvalidRequestError(field, f"{_short(value)} is not supported", f"send {context['expected']}")
    if kind == "refused":
        return InvalidRequestError(field, context["problem"], context["fix"], code=context["code"])
    problem, _, fix = error["msg"].partition("; ")
    return InvalidRequestError(field, problem, fix)


def field_path(location: tuple[int | str, ...]) -> str:
    """Return a location as a client writes it: `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _OWN_PARTS:
            name = part[:64] or '""'
            path += f".{name}" if path else name
    return path


def _out_of_range(field: str, value: Any, context: Mapping[str, Any]) -> InvalidRequestError:
    words = {
        "ge": ("below the limit of", "at least"),
        "gt": ("not above", "more than"),
        "le": ("above the limit of", "at most"),
        "lt": ("not below", "less than"),
    }
    bound = next(name for name in words if name in context)
    side, fix = words[bound]
    limit = context[bound]
    limit = int(limit) if float(limit).is_integer() else limit
    return InvalidRequestError(field, f"{_short(value)} is {side} {limit}", f"send {fix} {limit}")


def _short(value: Any) -> str:
    # A long input must neither fill the log nor be sent back.
    if isinstance(value, int) and abs(value) > 10**20:
        return "the number"
    if isinstance(value, str):
        return repr(value[:40])
    return repr(value) if isinstance(value, int | float) else "the value"
