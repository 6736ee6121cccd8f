"""How an engine process begins, and how it ends.

    python -m outrider.host.launch PARENT_PID MODULE [ARGUMENT ...]

calls `MODULE.main` with the arguments, in a process that its parent does not leave behind (`outrider.host.parent`).
"""

from __future__ import annotations

import sys

from outrider import import_for_good
from outrider.host.parent import tie_to_parent
from outrider.host.worker import exit_process


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, run the module, and exit with the code that its `main` returns."""
    parent_pid, name, *rest = arguments
    tie_to_parent(int(parent_pid))
    exit_process(import_for_good(name).main(rest))


if __name__ == "__main__":
    main(sys.argv[1:])
