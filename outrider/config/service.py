"""Options that every service has, the secrets and TLS files that they name, and the key that tools send a gateway."""

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
"""Bearer tokens that one door may take."""


def read_secret(value: str, file: str | Path | None, flag: str) -> str:
    """The secret of `flag` or, if that is empty, of `flag`-file; empty when neither is set. Raises ConfigError."""
    tokens = read_secrets(value, file, flag)
    if len(tokens) > 1:
        raise ConfigError(f"{flag}-file: {file} has {len(tokens)} lines; one token is sent, so write one")
    return tokens[0] if tokens else ""


KEY_FIX = "set OUTRIDER_API_KEY or --api-key-file"
"""What helps where a gateway asks for no key, or refuses what it was sent."""


def gateway_key(arguments: argparse.Namespace) -> str:
    """The key of the environment or of --api-key-file, a gateway's own file included; empty without either.

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
    """The secrets of `flag` or those of `flag`-file, one a line; none when neither is set. Raises ConfigError."""
    if not file:
        return (value,) if value else ()
    if value:
        raise ConfigError(f"{flag}-file: {flag} is set too; use one of them")
    try:
        # Not by Path, which has RuntimeError for a home that is not there.
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
    """The keys of --api-key or --api-key-file, each with the name of its tenant; empty: the key is a tenant of its own.

    A line of the file is a key or, behind white space, a key and its tenant's name. Raises ConfigError.
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
    """Raise ConfigError, naming `option`, where one of several replicas is there twice."""
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"{option}: an address is named twice; name each replica once")


def check_token(token: str, option: str) -> None:
    """Raise ConfigError, naming `option` but not the token, unless it is empty or can travel in a header."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{option} holds a space or a character beyond ASCII; use letters, digits, ._~+/-=")


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one end; empty text is no file."""

    cert: str = ""
    """Own certificate, with those between it and the root behind it."""
    key: str = ""
    """Its private key, not encrypted."""
    ca: str = ""
    """Certificates that the other end's must be signed with."""
    name: str = ""
    """What the other end's certificate must be made out to, if that is not its address."""
    prefix: str = "--tls"
    """What error messages call the options."""

    def flag(self, word: str) -> str:
        """The option that names a file."""
        return f"{self.prefix}-{word}"


def door_tls(options: object) -> TlsFiles | None:
    """The files of a service's own door; None where it is open. Raises ConfigError where they do not go together."""
    files = _read(options, "tls_", "--tls")
    if files.ca and not files.cert:
        missing = f"set {files.flag('cert')} and {files.flag('key')} too"
        raise ConfigError(f"{files.flag('ca')}: clients can show a certificate over TLS only; {missing}")
    return files if files.cert else None


def peer_token(options: object, peer: str) -> str:
    """The bearer token that is sent to `peer`, "verify" or "draft"; empty without one. Raises ConfigError."""
    value, file = (str(getattr(options, f"{peer}_auth_token{end}")) for end in ("", "_file"))
    token = read_secret(value, file, f"--{peer}-auth-token")
    check_token(token, f"--{peer}-auth-token{f'-file: {file}' if file else ''}")
    return token


def peer_tls(options: object, peer: str) -> TlsFiles | None:
    """The files for channels to `peer`: "verify", "draft", or "connect" for a tool's way to a gateway.

    None where they are plain. Raises ConfigError.
    """
    files = _read(options, f"{peer}_tls_", f"--{peer}-tls")
    if not files.ca and (files.cert or files.name):
        given = files.flag("cert" if files.cert else "name")
        raise ConfigError(f"{given}: {files.flag('ca')} is not set; name what the other end's must be signed with")
    return files if files.ca else None


def _read(options: object, field: str, prefix: str) -> TlsFiles:
    words = ("cert", "key", "ca", "name")
    files = TlsFiles(**{word: str(getattr(options, field + word, "")) for word in words}, prefix=prefix)
    if bool(files.cert) != bool(files.key):
        given, missing = ("cert", "key") if files.cert else ("key", "cert")
        raise ConfigError(f"{files.flag(given)}: {files.flag(missing)} is not set; a certificate goes with its key")
    return files


def check_device(name: str) -> None:
    """Raise ConfigError for a --device that no machine has."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f'--device: {name!r} is no device; use "auto", "cpu", "cuda" or "cuda:0"')


GRPC_DOOR = "Address of the gRPC door: host:port (port 0 takes a free one) or unix:/path."


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service. A service's own options inherit them and set the default addresses."""

    address: str = option("127.0.0.1:0", GRPC_DOOR)
    metrics_address: str = option("", "Address of the Prometheus page, host:port; empty turns it off.")
    ready_file: str = option(
        "",
        "Written when the service serves: a file with the addresses really bound; verify's tells its model, too, and "
        "those of verify and draft their drafters.",
    )
    log_level: str = option("INFO", "Least important lines to log.", choices=LEVELS)
    drain_seconds: float = option(
        20.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0, maximum=3600
    )
    tls_cert: str = option("", "PEM file with this service's certificate and those up to its root; empty: no TLS.")
    tls_key: str = option("", "PEM file with the private key of --tls-cert, not encrypted.")
    tls_ca: str = option(
        "", "PEM file with the certificates that clients' must be signed with (mTLS); empty asks them for none."
    )
    reflection: bool = option(False, "Let gRPC clients ask which methods and messages there are.")
    max_connection_age_seconds: float = option(
        0.0, "Seconds after which a gRPC connection takes no new calls; 0 for any age.", minimum=0, maximum=31536000
    )
    key_fix: ClassVar[str] = "set a bearer token (docs/security.md)"
    """What helps where the doors are open to all; options are called differently by `outrider up`."""

    @property
    def is_guarded(self) -> bool:
        """Whether callers have to show a token or a certificate."""
        names = ("api_key", "api_key_file", "auth_token", "auth_token_file", "tls_ca")
        return any(getattr(self, name, None) for name in names)


@dataclass(frozen=True)
class PeerServiceOptions(ServiceOptions):
    """Options of a service that other services call."""

    auth_token: str = option("", "Bearer token that callers must send; empty lets everybody in.", secret=True)
    auth_token_file: str = option("", "File that holds the bearer token, instead of --auth-token.")
    engine_cpus: str = option(
        "", "Cores that the engine's process runs on, such as 4 or 0,8-11; empty leaves that to the system."
    )
    watchdog_timeout: float = option(
        300.0,
        "Seconds without the end of a round, while there are requests, or without an answer of a draft engine, after "
        "which the engine is killed and the service ends, to be started again: a GPU may have stopped answering. "
        "0 waits for ever.",
        minimum=0,
        maximum=86400,
    )

    def read_auth_tokens(self) -> dict[str, str]:
        """The tokens that open the door, of no tenant; none when everybody may come in. Raises ConfigError."""
        tokens = read_secrets(self.auth_token, self.auth_token_file, "--auth-token")
        for token in tokens:
            check_token(token, f"--auth-token-file: {self.auth_token_file}" if self.auth_token_file else "--auth-token")
        return dict.fromkeys(tokens, "")
