"""The API key with which tools ask a gateway."""

from __future__ import annotations

import argparse
import os

from outrider.config.service import read_secret

KEY_FIX = "set OUTRIDER_API_KEY or --api-key-file"
"""What helps where a gateway refuses what it was sent."""


def gateway_key(arguments: argparse.Namespace) -> str:
    """The key of the environment or of --api-key-file; empty without either. Raises ConfigError."""
    return read_secret(os.environ.get("OUTRIDER_API_KEY", ""), arguments.api_key_file, "OUTRIDER_API_KEY")
