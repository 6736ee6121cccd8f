"""Certificates for a test: an authority of its own, and files as the options name them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from outrider.config.service import TlsFiles


class Authority:
    """Signs certificates and writes them into a folder."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def files(
        self,
        name: str,
        *,
        trust: Authority | None = None,
        hosts: Sequence[str] = ("localhost", "127.0.0.1"),
        days: float | None = None,
    ) -> TlsFiles:
        """Files `name`.pem and `name`.key, new each time, and the certificate of the authority to trust."""
        ends = None if days is None else datetime.now(UTC) + timedelta(days=days)
        issued = self.ca.issue_cert(*hosts, not_after=ends)
        files = TlsFiles(*(str(self.folder / f"{name}{end}") for end in (".pem", ".key", ".ca")))
        replace(files.key, issued.private_key_pem.bytes())
        replace(files.cert, b"".join(part.bytes() for part in issued.cert_chain_pems))
        replace(files.ca, (trust or self).ca.cert_pem.bytes())
        return files


def replace(path: str, data: bytes) -> None:
    """Write a file as an administrator does: in one step, for its owner alone."""
    new = f"{path}.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(new, path)
