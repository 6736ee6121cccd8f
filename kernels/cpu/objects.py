"""Object code of functions of kernels.cpu, kept on disk, since those of a model take seconds to compile.

A file's name is a hash of all that its code depends on: the sources of this package, LLVM, the instruction set and the
function's name with its parameters. It lies in $OUTRIDER_HOME/code, by default ~/.cache/outrider/code; if that cannot
be written, a warning says so, and functions are compiled at each start. Code from a file is executed, so a file is used
only if this user wrote it, for this name: a home may be shared with others. Files of older versions stay: some 150 KB a
model.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import llvmlite
from llvmlite import binding as llvm

from kernels import outrider_home
from kernels.cpu import SOURCES, sources
from kernels.cpu.isa import Isa

log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 32
"""Bytes of the checksum at the start of a file: see `_checksum`."""


def kept_object(isa: Isa, name: str, compiled: Callable[[], bytes]) -> bytes:
    """Return the result of `compiled`, or its result in an earlier process for the same name."""
    path = _path(isa, name)
    if path is not None and (found := _read(path)) is not None:
        return found
    made = compiled()
    # If sources have changed meanwhile, it is not known which version was compiled.
    if path is not None and sources() == SOURCES:
        _write(path, made)
    return made


def _path(isa: Isa, name: str) -> Path | None:
    """Return where an object is kept; None if it cannot be kept, or not be told apart from those of other versions."""
    try:
        folder = outrider_home()
    except RuntimeError:  # there is no home
        return None
    if not SOURCES:
        return None
    key = (SOURCES, llvmlite.__version__, llvm.llvm_version_info, isa.value, name)
    return folder / "code" / f"{sha256(repr(key).encode()).hexdigest()}.o"


def _read(path: Path) -> bytes | None:
    """Return the object in a file; None if it is missing or is not as this user wrote it."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
                return None
            data = file.read()
    except OSError:
        return None
    rest = data[_CHECKSUM_BYTES:]
    return rest if _checksum(path, rest) == data[:_CHECKSUM_BYTES] else None


def _checksum(path: Path, rest: bytes) -> bytes:
    """Return a checksum of a file's content and name, so that no other file of this user can take its place."""
    return sha256(path.name.encode() + rest).digest()


def _write(path: Path, rest: bytes) -> None:
    """Write the object if possible. Concurrent readers never see half a file."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_checksum(path, rest) + rest)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror or str(error))


@cache
def _warn_not_kept(folder: Path, reason: str) -> None:
    """Log, once, that every start compiles again."""
    log.warning(
        "compiled code cannot be kept in %s: %s; every start compiles it again, which takes seconds: make that folder "
        "writable, or name another with OUTRIDER_HOME",
        folder,
        reason,
    )
