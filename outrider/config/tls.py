"""Which files a service's TLS uses: the same words for every door and for every channel to a peer.

A door: `tls_cert`, `tls_key`, and `tls_ca` to ask clients for a certificate. A channel: the same with the peer's name
before them (`verify_tls_ca`, ...), and `tls_name` where the peer's certificate names another host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError


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

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are named."""
        return tuple(Path(text).expanduser() for text in (self.cert, self.key, self.ca) if text)


def door_tls(options: object) -> TlsFiles | None:
    """The files of a service's own door; None where it is open. Raises ConfigError where they do not go together."""
    files = _read(options, "tls_", "--tls")
    if files.ca and not files.cert:
        raise ConfigError("--tls-ca: clients can show a certificate over TLS only; set --tls-cert and --tls-key too")
    return files if files.cert else None


def peer_tls(options: object, peer: str) -> TlsFiles | None:
    """The files for channels to `peer` ("verify", "draft"); None where they are plain. Raises ConfigError."""
    files = _read(options, f"{peer}_tls_", f"--{peer}-tls")
    if not files.ca and (files.cert or files.name):
        given = files.flag("cert" if files.cert else "name")
        raise ConfigError(f"{given}: {files.flag('ca')} is not set; name the certificates that {peer} is trusted by")
    return files if files.ca else None


def _read(options: object, field: str, prefix: str) -> TlsFiles:
    words = ("cert", "key", "ca", "name")
    files = TlsFiles(**{word: str(getattr(options, field + word, "")) for word in words}, prefix=prefix)
    if bool(files.cert) != bool(files.key):
        given, missing = ("cert", "key") if files.cert else ("key", "cert")
        raise ConfigError(f"{files.flag(given)}: {files.flag(missing)} is not set; a certificate goes with its key")
    return files
