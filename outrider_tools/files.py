"""Files that tools read and write: JSONL of prompts, and outputs that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outrider.config.base import expand
from outrider.errors import ConfigError, reason_of

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
)
"""Files of a model folder beside config and weights that tokenizers or people need."""


def copy_files(source: Path, folder: Path, patterns: Sequence[str] = COPIED_FILES) -> None:
    """Copy files that match `patterns`, except weight indexes (`*.index.json`): readers would look for their shards."""
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)


def json_objects(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, each with its location as text that begins with `label`; at least one.

    Raises ConfigError if the file cannot be read, holds nothing, or a line is not an object.
    """
    try:
        lines = expand(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label} cannot be read: {reason_of(error)}; give a JSONL file") from None
    if not any(map(str.strip, lines)):
        raise ConfigError(f"{label} holds no prompt; write a JSON object a line")
    for number, line in enumerate(lines, 1):
        where = f"{label}, line {number}"
        try:
            fields = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ConfigError(f"{where}: no JSON: {error}") from None
        if isinstance(fields, dict):
            yield where, fields
        elif line.strip():
            raise ConfigError(f'{where}: not an object; write it as {{"prompt": "text"}}')


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Make the folder of `path`, and turn errors of the block that writes it into ConfigError, which names `option`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        # safetensors has the error number only in its text.
        full = (errno.ENOSPC, errno.EDQUOT)
        is_full = getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full)
        fix = "make room there, then go on" if is_full else "choose another place"
        raise ConfigError(f"{option}: {path} cannot be written: {reason_of(error)}; {fix}") from None


def check_writable(option: str, path: Path) -> None:
    """Check before long work that `path`, its output named by `option`, can be written. Raises ConfigError if not."""
    with writing(option, path):
        there = path.exists()
        if not there or path.is_file() or path.is_dir():  # a pipe's reader would see its end
            path.open("ab").close()
        if not there:
            path.resolve().unlink()  # a link stays


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; the file written there replaces `path` at the end, in one step."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_new(out: Path, label: str) -> None:
    """Raise ConfigError, which begins with `label`, if `out` exists."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{label}: exists; remove it or choose another name")


@contextmanager
def whole_output(out: Path, label: str, num_bytes: int = 0) -> Iterator[Path]:
    """Yield a path beside `out` with its suffix; what is made there is renamed to `out` at the end, or else removed.

    Raises ConfigError, which begins with `label`, if `out` exists, cannot be written, or the disk lacks `num_bytes`.
    """
    check_new(out, label)
    work = out.parent / f".{out.name}.work{out.suffix}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(work)
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            raise ConfigError(f"{label}: needs {_size(num_bytes)}, and {_size(free)} are free there")
        yield work
        work.rename(out)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be written: {reason_of(error)}") from error
    finally:
        _remove(work)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
