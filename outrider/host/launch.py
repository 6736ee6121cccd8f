"""How an engine process begins, and how it ends.

    python -m outrider.host.launch PARENT_PID MODULE [ARGUMENT ...]

calls `MODULE.main` with the arguments, in a process that its parent does not leave behind (`outrider.cli.child`).
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

from outrider.cli.child import tie_to_parent
from outrider.host.worker import exit_process


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, run the module, and exit with the code that its `main` returns."""
    parent_pid, name, *rest = arguments
    tie_to_parent(int(parent_pid))
    module: Any = import_for_good(name)
    exit_process(module.main(rest))


def import_for_good(name: str) -> object:
    """Import a module whose process needs it to its end; returns it.

    What it imports stays: no collection walks it, neither while it is made nor later. With torch that is some 0.4 s of
    CPU time a start.
    """
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main(sys.argv[1:])
