"""TLS material as it lies in files: read, checked, and told apart from what lay there before."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.config.tls import TlsFiles
from outrider.errors import ConfigError
from outrider.logs import get_logger

_logger = get_logger(__name__)

_MAX_FILE_BYTES = 1 << 20
_MODE_OF_OTHERS = 0o077

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Material:
    """What was read at one time, and fits together."""

    cert: bytes
    key: bytes
    ca: bytes
    context: ssl.SSLContext
    """For an HTTP server; it has checked that certificate and key are a pair."""


def load(files: TlsFiles) -> Material:
    """Read the files. Raises ConfigError unless they can be read and fit together."""
    read = {word: _read(files, word) for word in ("cert", "key", "ca")}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # A resumed session would pass by the certificates of its time.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if files.cert:
        _attempt(
            f"{files.flag('cert')} and {files.flag('key')}: {files.cert} and {files.key} are no pair of a certificate "
            "and its unencrypted private key, both as PEM",
            lambda: context.load_cert_chain(_path(files.cert), _path(files.key), _no_password),
        )
    if files.ca:
        _attempt(
            f"{files.flag('ca')}: {files.ca} holds no certificates as PEM",
            lambda: context.load_verify_locations(cadata=read["ca"].decode("ascii")),
        )
        context.verify_mode = ssl.CERT_REQUIRED
    return Material(**read, context=context)


def _attempt(problem: str, action: Callable[[], None]) -> None:
    try:
        action()
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(f"{problem} ({reason}); see docs/operations.md for commands that make them") from None


def _no_password() -> bytes:
    # Without it OpenSSL would ask on the terminal.
    raise ValueError("the key is encrypted")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _read(files: TlsFiles, word: str) -> bytes:
    text = getattr(files, word)
    if not text:
        return b""
    try:
        with _path(text).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(files, word, error) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{files.flag(word)}: {text} is larger than {_MAX_FILE_BYTES} bytes; name a PEM file")
    return data


def _unreadable(files: TlsFiles, word: str, error: OSError) -> ConfigError:
    text = getattr(files, word)
    return ConfigError(
        f"{files.flag(word)}: {text} cannot be read: {error.strerror}; name a file that this process may read"
    )


def stamp_of(files: TlsFiles) -> Stamp:
    """What changes when a file is replaced or written. Raises ConfigError if one is not there."""
    found = []
    for word in ("cert", "key", "ca"):
        if text := getattr(files, word):
            try:
                status = _path(text).stat()
            except OSError as error:
                raise _unreadable(files, word, error) from None
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def warn_of_readable_key(files: TlsFiles) -> None:
    """Log if more than its owner may use the private key."""
    mode = 0
    if files.key:
        with suppress(OSError):
            mode = stat.S_IMODE(_path(files.key).stat().st_mode)
    if mode & _MODE_OF_OTHERS:
        _logger.warning(
            "%s: %s can be read or written by others (mode %03o); run chmod 600 on it",
            files.flag("key"),
            files.key,
            mode,
        )
