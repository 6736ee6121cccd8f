"""A file or folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ConfigError


@contextmanager
def whole_output(out: Path, said: str, num_bytes: int = 0) -> Iterator[Path]:
    """A path beside `out` of the same suffix; what is made there takes its name at the end, or is removed.

    Raises:
        ConfigError: `out` exists or cannot be written, or the disk has not got `num_bytes`; begins with `said`.
    """
    if out.exists():
        raise ConfigError(f"{said}: exists; remove it or choose another name")
    work = out.parent / f".{out.name}.work{out.suffix}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(work)
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            raise ConfigError(f"{said}: needs {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")
        yield work
        work.rename(out)
    except OSError as error:
        raise ConfigError(f"{said}: cannot be written: {error}") from error
    finally:
        _remove(work)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
