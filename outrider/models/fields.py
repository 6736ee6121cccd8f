"""Fields of config.json and its like, each checked as it is read. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, reason_of


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json, and generation_config.json or {} if it is missing. Raises ConfigError as `read_json` does."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder; give a Hugging Face model folder")
    path = folder / "generation_config.json"
    return read_json(folder / "config.json"), read_json(path) if path.exists() else {}


LFS_POINTER = b"version https://git-lfs"
"""The beginning of a file that git leaves in place of one that it keeps in LFS."""


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raise ConfigError if `content`, the beginning of a file or all of it, is a pointer of git LFS."""
    if content.startswith(LFS_POINTER):
        raise ConfigError(f"{path} is a pointer of git LFS, not the file itself; run git lfs pull in its folder")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises ConfigError if the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        data = path.read_bytes()
        refuse_pointer(path, data)
        fields = json.loads(data.decode())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model folder needs {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {reason_of(error)}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(fields).__name__}")
    return fields


MAX_LAYERS = 4096
"""Most layers of a model: some 20 times as many as the deepest models have."""


MAX_INT = 2**31 - 1
"""The largest integer in config.json, where nothing else bounds it."""


def get_int(
    fields: Mapping[str, Any], name: str, default: int | None = None, *, minimum: int = 0, maximum: int = MAX_INT
) -> int:
    """Return an integer field; null counts as absent. Without a default the field is required."""
    what = f"an integer of at least {minimum}" + (f" and at most {maximum}" if maximum < MAX_INT else "")
    return int(_get(fields, name, default, what, lambda value: type(value) is int and minimum <= value <= maximum))


def get_float(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a finite number field; null counts as absent. Without a default the field is required."""
    return float(_get(fields, name, default, "a finite number", _is_finite))


def get_bool(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean field; null counts as absent."""
    return bool(_get(fields, name, default, "true or false", lambda value: type(value) is bool))


def get_object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object field; null counts as absent, and an absent one is empty."""
    found: Mapping[str, Any] = _get(fields, name, {}, "an object", lambda value: isinstance(value, Mapping))
    return found


def get_strings(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that is a list of strings; null counts as absent, and an absent one is empty."""
    found: list[str] = _get(fields, name, [], "a list of strings", _are_strings)
    return found


def _is_finite(value: object) -> bool:
    # An integer of hundreds of digits is no float.
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= sys.float_info.max


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _get(fields: Mapping[str, Any], name: str, default: Any, what: str, is_legal: Callable[[Any], bool]) -> Any:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {name} is missing")
    if not is_legal(value):
        raise ConfigError(f"config.json: {name} must be {what}, got {value!r}")
    return value


def get_eos_token_ids(fields: Mapping[str, Any], source: str) -> list[int]:
    """Return the ids in `eos_token_id`, which is a token id or a list of them; none if it is null or absent."""
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{source}: eos_token_id must be token ids, got {value!r}")
    return ids
