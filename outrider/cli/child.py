"""One service as a child process: starts it, reads its log lines, sends it signals, and makes sure that it ends.

    python -m outrider.cli.child PARENT_PID MODULE [ARGUMENT ...]

runs a module in a child that cannot outlive its parent (see `outrider.host.launch`). The parent holds the other end of
the child's standard input.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.errors import OutriderError, exit_text
from outrider.host.launch import tie_to_parent

# Log lines kept for the message about a failed start.
NUM_TAIL_LINES = 40
POLL_SECONDS = 0.05

LineSink = Callable[[str, str], None]


class ServiceFailedError(OutriderError):
    """A service ended while starting, or did not get ready in time. The message holds its last log lines."""

    code = "service_failed"


class Child:
    """A service that runs as `python -m MODULE`, in a process group of its own so that Ctrl-C reaches only the parent.

    Call `start` from a thread that outlives the child: on Linux the thread's end kills the child (see `tie_to_parent`).
    `on_line(name, line)` gets every line that the child writes, from a thread of its own.
    """

    def __init__(self, name: str, module: str, ready_file: Path, on_line: LineSink) -> None:
        self.name = name
        self.module = module
        self.ready_file = ready_file
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._reaping = threading.Lock()
        self.started_at = 0.0
        self.ready_info: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """Process id of the current or last process; 0 before the first start."""
        return self._process.pid if self._process else 0

    def start(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process. `wait_ready` waits until it serves."""
        self.ready_file.unlink(missing_ok=True)
        self._tail.clear()
        self.ready_info = {}
        command = [sys.executable, "-m", "outrider.cli.child", str(os.getpid()), self.module, *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.started_at = time.monotonic()
        reader = threading.Thread(target=self._read, args=(self._process,), name=f"{self.name}-log", daemon=True)
        try:
            reader.start()
        except RuntimeError:  # the thread limit is reached
            if self._process.stdout is not None:
                self._process.stdout.close()
            raise
        self._reader = reader

    def wait_ready(self, timeout: float, cancelled: threading.Event) -> None:
        """Wait up to `timeout` seconds until the service has written its ready file, and store that in `ready_info`.

        Raises ServiceFailedError if the service ends first, is not ready in time, or `cancelled` is set.
        """
        deadline = time.monotonic() + timeout
        while not self._read_ready_file():
            code = self.poll()
            if code is not None:
                raise ServiceFailedError(f"{self.name} ended at its start ({exit_text(code)}).{self.tail_text()}")
            if time.monotonic() > deadline:
                raise ServiceFailedError(f"{self.name} was not ready after {timeout:.0f} s.{self.tail_text()}")
            if cancelled.wait(POLL_SECONDS):
                raise ServiceFailedError(f"the start of {self.name} was cancelled")

    def poll(self) -> int | None:
        """Return the exit code of the ended process (negative: the signal that ended it), or None while it runs."""
        process = self._process
        if process is None:
            return None
        with self._reaping:
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if process.returncode is None and os.waitid(os.P_PID, process.pid, look) is not None:
                # Kill the group before its leader is reaped: later the group's number may belong to another process.
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
        return process.returncode

    @property
    def running(self) -> bool:
        """Whether the process lives, even if it is paused."""
        return self._process is not None and self.poll() is None

    def terminate(self) -> None:
        """Ask the service to drain and end."""
        self._signal(signal.SIGTERM, group=False)

    def kill(self, timeout: float = 10.0) -> None:
        """Kill the process and all that it has started, and wait for its end."""
        self._signal(signal.SIGKILL, group=True)
        self.wait(timeout)

    def pause(self) -> None:
        """Stop the process and all it has started, as a hung machine would (SIGSTOP)."""
        self._signal(signal.SIGSTOP, group=True)

    def resume(self) -> None:
        """Let a paused process and all that it has started continue."""
        self._signal(signal.SIGCONT, group=True)

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the process to end; return whether it has, all its log lines delivered."""
        deadline = time.monotonic() + timeout
        while self.running:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=2)
        return True

    def tail_text(self) -> str:
        """Return the last log lines, indented below a heading; empty if there are none."""
        if self._reader is not None and not self.running:
            self._reader.join(timeout=2)
        return "".join(["\nIts last lines:", *(f"\n    {line}" for line in self._tail)]) if self._tail else ""

    def _read_ready_file(self) -> bool:
        try:
            ready = json.loads(self.ready_file.read_text("utf-8"))
        except FileNotFoundError:
            return False
        self.ready_info = {key: value for key, value in ready.items() if isinstance(value, str)}
        return True

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        process = self._process
        with self._reaping:
            if process is None or process.returncode is not None:
                return
            if group:
                _signal_group(process.pid, number)
            else:
                os.kill(process.pid, number)

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            return
        with process.stdout as lines:
            for raw in lines:
                line = raw.rstrip("\n")
                self._tail.append(line)
                self._on_line(self.name, line)


def _signal_group(group: int, number: signal.Signals) -> None:
    # The group is gone, or (on macOS) only a zombie is left of it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, then run the module as `__main__`."""
    parent_pid, module, *rest = arguments
    tie_to_parent(int(parent_pid))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
