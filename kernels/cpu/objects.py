"""Object code of functions of kernels.cpu, kept on disk: those of a model take seconds to compile.

A file is found by all that its code follows from: the sources of this package, LLVM, the instruction set and the
function's name with what it was written for. It lies in $OUTRIDER_HOME/code, or else in ~/.cache/outrider/code; where
that cannot be written, functions are compiled at each start. What is read there is run, so a file counts only if this
user wrote it, for this name: a home may be shared with others. Files of older versions stay: some 150 KB of each model.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import llvmlite
from llvmlite import binding as llvm

from kernels.cpu import SOURCES, sources
from kernels.cpu.isa import Isa
from kernels.home import outrider_home

_SUM, _LENGTH = 32, 8
"""Bytes in front of a file, see `_sum`, and in front of each object in it."""


def kept_objects(isa: Isa, name: str, compile_all: Callable[[], Sequence[bytes]]) -> list[bytes]:
    """What `compile_all` returns, or has returned to an earlier process for the same name."""
    path = _path(isa, name)
    if path is not None and (found := _read(path)) is not None:
        return found
    objects = list(compile_all())
    # Sources that were changed meanwhile may be those that it was compiled from, or not.
    if path is not None and sources() == SOURCES:
        _write(path, objects)
    return objects


def _path(isa: Isa, name: str) -> Path | None:
    """Where they are kept; None where they cannot be, or not be told from those of other versions."""
    try:
        folder = outrider_home()
    except RuntimeError:  # there is no home
        return None
    if not SOURCES:
        return None
    key = (SOURCES, llvmlite.__version__, llvm.llvm_version_info, isa.value, name)
    return folder / "code" / f"{sha256(repr(key).encode()).hexdigest()}.o"


def _read(path: Path) -> list[bytes] | None:
    """The objects in a file; None where there is none, or not as this user wrote it."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
                return None
            data = file.read()
    except OSError:
        return None
    objects, rest = [], data[_SUM:]
    if _sum(path, rest) != data[:_SUM]:
        return None
    while rest:
        end = _LENGTH + int.from_bytes(rest[:_LENGTH], "little")
        objects.append(rest[_LENGTH:end])
        rest = rest[end:]
    return objects


def _sum(path: Path, rest: bytes) -> bytes:
    """Of what a file holds and its name, under which nobody can have put another one of this user's."""
    return sha256(path.name.encode() + rest).digest()


def _write(path: Path, objects: Sequence[bytes]) -> None:
    """Keep them if that can be; who reads meanwhile never sees half a file."""
    rest = b"".join(len(part).to_bytes(_LENGTH, "little") + part for part in objects)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_sum(path, rest) + rest)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
