"""Exit codes of processes."""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


def exit_text(code: int) -> str:
    """Return a process's exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # real-time signals have no names
        return f"signal {-code}"
