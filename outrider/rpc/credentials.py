"""Credentials from files that may change while a service runs, and the bearer tokens among them.

What a service does next follows the files' new content.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from outrider.config.service import PeerServiceOptions, check_token, peer_token
from outrider.errors import ConfigError
from outrider.logs import get_logger, hide_secret

Tokens = Mapping[bytes, str]
"""Bearer tokens of a door, each with its tenant's name; none if it is open."""
Content = TypeVar("Content")
_Stamp = tuple[tuple[int, ...], ...]
"""Inode, size and times of each file. They change when one is replaced, is written, or may be read from now on."""

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
            found.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return tuple(found)


def local_path(text: str) -> Path:
    """Return the path that an option names."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises RuntimeError for a home that does not exist


def unreadable(option: str, text: str, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(f"{option}: {text} cannot be read: {error.strerror}; name a file that this process may read")


def _read(option: str, read: Callable[[], Mapping[str, str]]) -> Tokens:
    tokens = read()
    for token in tokens:
        check_token(token, option)
        hide_secret(token)
    return {token.encode(): tenant for token, tenant in tokens.items()}


class TokenSource:
    """The tokens that open a door now. Those of a file follow the file: no restart is needed to add or revoke one.

    A door that has tokens keeps some, because a file without any cannot be used.
    """

    def __init__(self, option: str, file: str | Path | None, read: Callable[[], Mapping[str, str]]) -> None:
        """`read` returns the tokens and their tenants. Raises ConfigError, naming `option`."""
        files = {option: str(file)} if file else {}
        self._source = FileSource(option, files, partial(_read, option, read))

    def __bool__(self) -> bool:
        """Whether the door asks for a token."""
        return bool(self.current())

    def current(self) -> Tokens:
        """Return the tokens to accept now."""
        return self._source.current()[1]


def fixed_tokens(*tokens: str) -> TokenSource:
    """Return tokens that stay, each a tenant of its own."""
    return TokenSource("--auth-token", None, lambda: dict.fromkeys(tokens, ""))


NO_TOKENS = fixed_tokens()
"""Those of a door that is open."""


def door_tokens(options: PeerServiceOptions) -> TokenSource:
    """Return the tokens that open a door for other services. Raises ConfigError."""
    return TokenSource("--auth-token-file", options.auth_token_file, options.read_auth_tokens)


def peer_tokens(options: object, peer: str) -> Callable[[], str]:
    """Return what gives the token to send to `peer`, "verify" or "draft", now; empty if none is set.

    Raises ConfigError.
    """
    file = getattr(options, f"{peer}_auth_token_file")
    sent = TokenSource(f"--{peer}-auth-token-file", file, lambda: {peer_token(options, peer): ""})
    return lambda: next(iter(sent.current())).decode()


def matching_token(authorization: bytes, tokens: Tokens) -> bytes | None:
    """Return the one of `tokens` that "Bearer TOKEN" carries; None for any other text.

    All tokens are always compared, each in a time that does not depend on where the two differ.
    """
    scheme, _, given = authorization.partition(b" ")
    given = given.strip()
    found = [token for token in tokens if hmac.compare_digest(given, token)]
    return found[0] if found and scheme.lower() == b"bearer" else None
