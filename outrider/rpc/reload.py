"""Files that may be replaced while a service runs: what it does next follows their new content."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from outrider.errors import ConfigError
from outrider.logs import get_logger

Content = TypeVar("Content")
_Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and modification time of each file, which change when one is replaced or written."""

_logger = get_logger(__name__)


class FileSource(Generic[Content]):
    """The current content of files. Thread-safe; each access costs one stat call per file.

    If new content cannot be used, the former one stays in use and the log says so.
    """

    def __init__(self, name: str, files: Mapping[str, str], load: Callable[[], Content]) -> None:
        """`files` maps options to paths; the log calls them `name`. Raises ConfigError that names option, file and fix.

        `load` reads them and raises ConfigError if what they hold cannot be used.
        """
        self._name = name
        self._files = dict(files)
        self._load = load
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._refused: _Stamp | None = None
        self._version = 1
        self._content = load()
        self._taken()

    def current(self) -> tuple[int, Content]:
        """Return a version that rises with each change, and the content to use now."""
        with self._lock:
            self._reload()
            return self._version, self._content

    def _taken(self) -> None:
        """Look at content that is used from now on."""

    def _reload(self) -> None:
        stamp: _Stamp = ()
        try:
            stamp = self._look()
            if stamp in (self._stamp, self._refused):
                return
            content = self._load()
            settled = self._look() == stamp
        except ConfigError as error:
            if stamp != self._refused:
                _logger.warning("a change cannot be used, and the previous content stays in use: %s", error.message)
            self._refused = stamp
            return
        if settled:  # else a file is still being written: the next access tries again
            self._stamp, self._content, self._refused = stamp, content, None
            self._version += 1
            _logger.info("%s: changes are used from now on", self._name)
            self._taken()

    def _look(self) -> _Stamp:
        """Return the stamp of the files. Raises ConfigError if one is missing."""
        found = []
        for option, text in self._files.items():
            try:
                status = local_path(text).stat()
            except OSError as error:
                raise unreadable(option, text, error) from None
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)


def local_path(text: str) -> Path:
    """Return the path that an option names."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises RuntimeError for a home that does not exist


def unreadable(option: str, text: str, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(f"{option}: {text} cannot be read: {error.strerror}; name a file that this process may read")
