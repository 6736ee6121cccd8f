"""Which machine this is."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Names this host and this start of it, also in containers; empty where the system does not tell.

    The kernel draws it at random when it boots.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
