"""Secrets that may be given as a value or as a file."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError

MAX_TOKENS = 1024
"""Bearer tokens that one door may take."""


def read_secret(value: str, file: str | Path | None, flag: str) -> str:
    """The secret of `flag` or, if that is empty, of `flag`-file; empty when neither is set. Raises ConfigError."""
    tokens = read_secrets(value, file, flag)
    if len(tokens) > 1:
        raise ConfigError(f"{flag}-file: {file} has {len(tokens)} lines; one token is sent, so write one")
    return tokens[0] if tokens else ""


def read_secrets(value: str, file: str | Path | None, flag: str) -> tuple[str, ...]:
    """The secrets of `flag` or those of `flag`-file, one a line; none when neither is set. Raises ConfigError."""
    if not file:
        return (value,) if value else ()
    if value:
        raise ConfigError(f"{flag}-file: {flag} is set too; use one of them")
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{flag}-file: {file} cannot be read: {reason}") from None
    lines = (line.strip() for line in text.splitlines())
    tokens = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not tokens:
        raise ConfigError(f"{flag}-file: {file} is empty; write the bearer token into it")
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"{flag}-file: {file} has {len(tokens)} lines; write at most {MAX_TOKENS}")
    return tokens


def read_api_keys(value: str, file: str | Path | None, flag: str) -> dict[str, str]:
    """The keys of `flag` or of `flag`-file, each with the name of its tenant; empty: the key is a tenant of its own.

    A line of the file is a key or, behind white space, a key and its tenant's name. Raises ConfigError.
    """
    if not file:
        return dict.fromkeys(read_secrets(value, file, flag), "")
    keys: dict[str, str] = {}
    for line in read_secrets(value, file, flag):
        key, *names = line.split()
        if len(names) > 1:
            raise ConfigError(f"{flag}-file: a line of {file} has {len(names) + 1} words; write KEY or KEY TENANT")
        if keys.setdefault(key, tenant := "".join(names)) != tenant:
            raise ConfigError(f"{flag}-file: {file} gives one key two tenants; write each key once")
    return keys
