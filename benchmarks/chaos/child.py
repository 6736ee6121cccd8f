"""Run a service in a network namespace, or with its log on a separate disk. The chaos benchmark starts this instead.

CHAOS_NAMESPACE: file of the namespace to enter. CHAOS_LOGS: folder with the file that stdout and stderr append to.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path

MODULES = {"draft": "draft_service", "verify": "verify_service", "gateway": "gateway"}
_CLONE_NEWNET = 0x40000000


def main() -> None:
    """Enter namespace and log, then become the service, which is named by its ready file."""
    name = next(Path(text).stem for text in sys.argv if text.startswith("--ready-file="))
    if namespace := os.environ.get("CHAOS_NAMESPACE"):
        handle = os.open(namespace, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        os.close(handle)
    if folder := os.environ.get("CHAOS_LOGS"):
        log = Path(folder)
        target = os.open(
            log if log.is_char_device() else log / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        for stream in (1, 2):
            os.dup2(target, stream)
        os.close(target)
    sys.argv[0] = MODULES[name]
    runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
