"""Start of an engine process, which is tied to its parent's life, and its end.

    python -m outrider.host.launch PARENT_PID MODULE [ARGUMENT ...]

calls `MODULE.main` with the arguments. On Linux the kernel kills the child when the thread that started it ends.
Elsewhere a thread of the child waits for the end of its standard input, a pipe whose other end the parent holds and
never writes to.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from outrider import import_for_good

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, run the module, and exit with the code that its `main` returns."""
    parent_pid, name, *rest = arguments
    tie_to_parent(int(parent_pid))
    code = import_for_good(name).main(rest)
    # Exit without cleanup: it takes a tenth of a second with torch, and freeing what a broken CUDA context holds may
    # hang or abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tie_to_parent(parent_pid: int) -> None:
    """Make sure that this process is killed when its parent dies; exit at once if it is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_die_at_end_of_input, name="parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:
        os._exit(1)


def _die_at_end_of_input() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
