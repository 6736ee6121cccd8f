"""Typed reads from a parsed config.json; every error names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model folder needs {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(fields).__name__}")
    return fields


def get_int(fields: Mapping[str, Any], name: str, default: int | None = None, *, minimum: int = 0) -> int:
    """An integer field; null counts as absent. Without a default the field is required."""
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"config.json: {name} must be an integer of at least {minimum}, got {value!r}")
    return value


def get_float(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A finite number field; null counts as absent. Without a default the field is required."""
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"config.json: {name} must be a finite number, got {value!r}")
    return float(value)


def get_bool(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean field; null counts as absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def get_token_ids(fields: Mapping[str, Any], name: str, source: str) -> list[int]:
    """A token id or a list of them; null and absent give none."""
    value = fields.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{source}: {name} must be token ids, got {value!r}")
    return ids
