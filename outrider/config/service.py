"""Options that every service has, the secrets and TLS files they name, and the key that tools send to a gateway."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outrider.config.base import option
from outrider.errors import ConfigError
from outrider.logs import LEVELS

MAX_TOKENS = 1024
"""Most bearer tokens of one door."""


def read_secret(value: str, file: str | Path | None, flag: str) -> str:
    """Return the secret of `flag`, or that in `flag`-file; empty if neither is set. Raises ConfigError."""
    tokens = read_secrets(value, file, flag)
    if len(tokens) > 1:
        raise ConfigError(f"{flag}-file: {file} has {len(tokens)} lines; one token is sent, so write one")
    return tokens[0] if tokens else ""


KEY_FIX = "set OUTRIDER_API_KEY or --api-key-file"
"""Advice for a gateway that asks for no key, or refuses the key that it was sent."""


def gateway_key(arguments: argparse.Namespace) -> str:
    """Return the key in OUTRIDER_API_KEY or in --api-key-file, which may be a gateway's own file; empty without either.

    Raises ConfigError.
    """
    value, file = os.environ.get("OUTRIDER_API_KEY", ""), arguments.api_key_file
    if value and file:
        raise ConfigError("--api-key-file: OUTRIDER_API_KEY is set too; use one of them")
    keys = list(read_api_keys(value, file))
    if len(keys) > 1:
        raise ConfigError(f"--api-key-file: {file} has {len(keys)} keys; one is sent, so write one")
    return keys[0] if keys else ""


def read_secrets(value: str, file: str | Path | None, flag: str) -> tuple[str, ...]:
    """Return the secret of `flag`, or those in `flag`-file, one a line; none if neither is set. Raises ConfigError."""
    if not file:
        return (value,) if value else ()
    if value:
        raise ConfigError(f"{flag}-file: {flag} is set too; use one of them")
    try:
        # Not Path.expanduser, which raises RuntimeError for a home that does not exist.
        text = Path(os.path.expanduser(file)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{flag}-file: {file} cannot be read: {reason}") from None
    lines = (line.strip() for line in text.splitlines())
    tokens = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not tokens:
        raise ConfigError(f"{flag}-file: {file} is empty; write the bearer token into it")
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"{flag}-file: {file} has {len(tokens)} lines; write at most {MAX_TOKENS}")
    return tokens


def read_api_keys(value: str, file: str | Path | None) -> dict[str, str]:
    """Return the keys of --api-key or --api-key-file, each with its tenant's name.

    An empty name makes the key a tenant of its own. A line of the file is KEY or KEY TENANT. Raises ConfigError.
    """
    if not file:
        check_token(value, "--api-key")
        return {value: ""} if value else {}
    keys: dict[str, str] = {}
    for line in read_secrets(value, file, "--api-key"):
        key, *names = line.split()
        if len(names) > 1:
            raise ConfigError(f"--api-key-file: a line of {file} has {len(names) + 1} words; write KEY or KEY TENANT")
        check_token(key, f"--api-key-file: {file}")
        if keys.setdefault(key, tenant := "".join(names)) != tenant:
            raise ConfigError(f"--api-key-file: {file} gives one key two tenants; write each key once")
    return keys


def check_named_once(addresses: Sequence[str], option: str) -> None:
    """Raise ConfigError, naming `option`, if an address of a replica is listed twice."""
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"{option}: an address is named twice; name each replica once")


def check_token(token: str, option: str) -> None:
    """Raise ConfigError, naming `option` but not the token, unless the token is empty or can travel in a header."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{option} holds a space or a character beyond ASCII; use letters, digits, ._~+/-=")


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one end of a connection; empty text means no file."""

    cert: str = ""
    """This end's certificate, followed by those between it and the root."""
    key: str = ""
    """Private key of `cert`, not encrypted."""
    ca: str = ""
    """Certificates that the other end's certificate must be signed with."""
    name: str = ""
    """Name that the other end's certificate must be issued for, if that is not its address."""
    prefix: str = "--tls"
    """How the options' flags begin in error messages."""

    def flag(self, word: str) -> str:
        """Return the flag of the option that names a file; `word` is "cert", "key", "ca" or "name"."""
        return f"{self.prefix}-{word}"


def door_tls(options: object) -> TlsFiles | None:
    """Return the TLS files of a service's own door; None if it has no TLS. Raises ConfigError if they do not fit."""
    files = _read(options, "tls_", "--tls")
    if files.ca and not files.cert:
        missing = f"set {files.flag('cert')} and {files.flag('key')} too"
        raise ConfigError(f"{files.flag('ca')}: clients can show a certificate over TLS only; {missing}")
    return files if files.cert else None


def peer_token(options: object, peer: str) -> str:
    """Return the bearer token to send to `peer`, "verify" or "draft"; empty if none is set. Raises ConfigError."""
    value, file = (str(getattr(options, f"{peer}_auth_token{end}")) for end in ("", "_file"))
    token = read_secret(value, file, f"--{peer}-auth-token")
    check_token(token, f"--{peer}-auth-token{f'-file: {file}' if file else ''}")
    return token


def peer_tls(options: object, peer: str) -> TlsFiles | None:
    """Return the TLS files for channels to `peer`: "verify", "draft", or "connect" for a tool's channel to a gateway.

    None if the channels have no TLS. Raises ConfigError.
    """
    files = _read(options, f"{peer}_tls_", f"--{peer}-tls")
    if not files.ca and (files.cert or files.name):
        given = files.flag("cert" if files.cert else "name")
        raise ConfigError(f"{given}: {files.flag('ca')} is not set; name the CA that signs the other end's certificate")
    return files if files.ca else None


def _read(options: object, field: str, prefix: str) -> TlsFiles:
    words = ("cert", "key", "ca", "name")
    files = TlsFiles(**{word: str(getattr(options, field + word, "")) for word in words}, prefix=prefix)
    if bool(files.cert) != bool(files.key):
        given, missing = ("cert", "key") if files.cert else ("key", "cert")
        raise ConfigError(f"{files.flag(given)}: {files.flag(missing)} is not set; a certificate goes with its key")
    return files


def check_device(name: str) -> None:
    """Raise ConfigError for a --device that cannot exist on any machine."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f'--device: {name!r} is no device; use "auto", "cpu", "cuda" or "cuda:0"')


GRPC_DOOR = "Address of the gRPC door: host:port (port 0: any free port) or unix:/path."


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service. A service's own options inherit them and set the default addresses."""

    address: str = option("127.0.0.1:0", GRPC_DOOR)
    metrics_address: str = option("", "Address of the Prometheus page, host:port; empty: no page.")
    ready_file: str = option(
        "",
        "File that the service writes once it is ready, with the addresses that it bound; verify also writes its "
        "model, and verify and draft write their drafters.",
    )
    log_level: str = option("INFO", "Lowest level of the lines to log.", choices=LEVELS)
    drain_seconds: float = option(
        20.0, "Seconds that running requests have to finish after SIGTERM.", minimum=0, maximum=3600
    )
    tls_cert: str = option(
        "", "PEM file with this service's certificate, followed by those up to its root; empty: no TLS."
    )
    tls_key: str = option("", "PEM file with the private key of --tls-cert, not encrypted.")
    tls_ca: str = option(
        "",
        "PEM file with the CA certificates that must have signed clients' certificates (mTLS); empty: no client "
        "certificate is asked for.",
    )
    reflection: bool = option(False, "Let gRPC clients list methods and messages (server reflection).")
    max_connection_age_seconds: float = option(
        0.0, "Seconds after which a gRPC connection takes no new calls; 0: no limit.", minimum=0, maximum=31536000
    )
    key_fix: ClassVar[str] = "set a bearer token (docs/security.md)"
    """Advice for doors that are open to everybody; `outrider up` has other names for the options."""

    @property
    def is_guarded(self) -> bool:
        """Whether callers have to show a token or a certificate."""
        names = ("api_key", "api_key_file", "auth_token", "auth_token_file", "tls_ca")
        return any(getattr(self, name, None) for name in names)


@dataclass(frozen=True)
class PeerServiceOptions(ServiceOptions):
    """Options of a service that other services call."""

    auth_token: str = option("", "Bearer token that callers must send; empty: no token is needed.", secret=True)
    auth_token_file: str = option("", "File with the bearer token, instead of --auth-token.")
    engine_cpus: str = option(
        "", "Cores that the engine's process runs on, such as 4 or 0,8-11; empty: the system decides."
    )
    watchdog_timeout: float = option(
        300.0,
        "Seconds without a finished round, while there are requests, or without an answer from a draft engine, after "
        "which the engine is killed and the service exits to be restarted: a GPU may have stopped responding. 0 waits "
        "forever.",
        minimum=0,
        maximum=86400,
    )

    def read_auth_tokens(self) -> dict[str, str]:
        """Return the tokens that open the door, each without a tenant; none if it is open. Raises ConfigError."""
        tokens = read_secrets(self.auth_token, self.auth_token_file, "--auth-token")
        for token in tokens:
            check_token(token, f"--auth-token-file: {self.auth_token_file}" if self.auth_token_file else "--auth-token")
        return dict.fromkeys(tokens, "")
