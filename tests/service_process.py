"""Services as processes: how tests start them, and what they see of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from outrider.config.base import options_to_argv


def wait_until(happened: Callable[[], object], seconds: float = 60) -> None:
    """Look again and again, at most so long."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if happened():
            return
        pause.wait(0.02)
    pytest.fail(f"did not happen within {seconds} s")


def start_door(module: str, options: object) -> subprocess.Popen[str]:
    """The service as from a terminal: a process group of its own."""
    command = [sys.executable, "-m", module, *options_to_argv(options)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def engine_of(door: subprocess.Popen[str]) -> psutil.Process:
    """The engine process that belongs to a door."""
    children: list[psutil.Process] = []

    def found() -> bool:
        children[:] = psutil.Process(door.pid).children()
        return bool(children)

    wait_until(found)
    (engine,) = children
    return engine


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
