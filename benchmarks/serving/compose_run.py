"""Runs planned services of compose.yaml as processes: starts them in order, checks, kills and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.serving.compose_plan import ROOT, Planned

_FROM_HERE = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV", "LANG")
"""Variables that a container would have from its image, taken from this environment."""
_LOOK_SECONDS = 0.5
_CHECK_SECONDS = 10.0
_TAIL = 3000


class Namespaces:
    """Namespaces held by a process, as far as this machine allows making them."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.words = "in the namespaces of this process: no others can be made here"
        self.enter: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        for kinds in (["ipc", "pid"], ["ipc"]):
            for user in ([], ["--user", "--map-root-user"]):
                pid = ["--pid", "--fork", "--mount-proc", "--kill-child"] if "pid" in kinds else []
                if self._make(["unshare", *user, "--ipc", *pid], kinds, bool(user), command, env):
                    self.words = f"in {' and '.join(kinds)} namespaces of their own" + ", by a user's" * bool(user)
                    return

    def _make(
        self, make: list[str], kinds: list[str], by_user: bool, command: list[str], env: Mapping[str, str]
    ) -> bool:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            if subprocess.run([*make, "true"], check=False, **quiet).returncode:  # type: ignore[call-overload]
                return False
            self.process = subprocess.Popen([*make, *command], env=dict(env), start_new_session=True, **quiet)  # type: ignore[call-overload]
        except OSError:  # no such program
            return False
        parts = [f"--{kind}" for kind in kinds] + ["--mount"] * ("pid" in kinds)
        parts += ["--user", "--preserve-credentials"] * by_user
        holder = _innermost(self.process.pid) if "pid" in kinds else self.process.pid
        self.enter = ["nsenter", f"--target={holder}", *parts, "--"]
        if not subprocess.run([*self.enter, "true"], check=False, **quiet).returncode:  # type: ignore[call-overload]
            return True
        self.close()
        return False

    def close(self) -> None:
        """End the holder, and all processes that are still in the namespaces."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self.enter = None, []


class ProfileRun:
    """All services of a profile. Inside the context they run and are healthy."""

    def __init__(self, planned: Mapping[str, Planned], folder: Path) -> None:
        self._planned = planned
        self._folder = folder
        self.by_role = {one.role: one for one in planned.values() if one.role}
        self.healthy_after: dict[str, float] = {}
        """Seconds from a service's start until it was healthy."""
        self.exit_codes: dict[str, int] = {}
        """Exit codes of services that were asked to end."""
        self.namespaces = "in the namespaces of this process, as containers of a profile that shares none"
        self._held: dict[str, Namespaces] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}

    def __enter__(self) -> ProfileRun:
        try:
            for name, one in self._planned.items():
                for other, condition in one.waits_for.items():
                    if condition == "service_healthy":
                        self.wait_healthy(other)
                self.start(name)
            for one in self.by_role.values():
                self.wait_healthy(one.name)
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for name in () if error else reversed([one.name for one in self.by_role.values()]):
                self._end(name)
        finally:
            self._kill_all()

    def log(self, name: str) -> Path:
        """Return the file of a service's log."""
        return self._folder / "logs" / f"{name}.log"

    def start(self, name: str) -> None:
        """Start a service as its container would. A service without a role only holds namespaces."""
        one = self._planned[name]
        env = self._env(one)
        if not one.role:
            self._held[name] = held = Namespaces(one.command, env)
            self.namespaces = held.words
            return
        for value in one.env.values():
            if value.startswith(f"{self._folder}/"):
                Path(value).mkdir(parents=True, exist_ok=True)
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        self._started[name] = time.monotonic()
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*self._enter(one), *one.command],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self, name: str) -> None:
        """Wait until the service's own check succeeds. RuntimeError if it ends or exceeds its start period."""
        one = self._planned[name]

        def check() -> bool:
            if not self.runs(name):
                raise RuntimeError(f"{name} ended: {self.log(name).read_text()[-_TAIL:]}")
            command = [*self._enter(one), *one.health]
            done = subprocess.run(
                command, cwd=ROOT, env=self._env(one), capture_output=True, timeout=_CHECK_SECONDS * 3, check=False
            )
            return done.returncode == 0

        self.wait_for(f"{name} is healthy", check, one.start_period)
        self.healthy_after.setdefault(name, time.monotonic() - self._started[name])

    def wait_for(self, what: str, happened: Callable[[], bool], seconds: float = 120.0) -> None:
        """Poll `happened`. Raises RuntimeError if it does not become true in time."""
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {seconds:g} s: {what}")
            time.sleep(_LOOK_SECONDS)

    def runs(self, name: str) -> bool:
        """Whether the service's process exists."""
        return self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        """Send SIGKILL to all processes of a service at once."""
        os.killpg(self._processes[name].pid, signal.SIGKILL)
        self._processes[name].wait()

    def shared_namespaces(self) -> set[str]:
        """Return the kinds of namespaces that verify and draft share, and the gateway does not."""
        gateway, verify, draft = (
            _innermost(self._processes[self.by_role[role].name].pid) for role in ("gateway", "verify", "draft")
        )

        def of(pid: int, kind: str) -> str:
            return os.readlink(f"/proc/{pid}/ns/{kind}")

        return {kind for kind in ("ipc", "pid") if of(verify, kind) == of(draft, kind) != of(gateway, kind)}

    def _env(self, one: Planned) -> dict[str, str]:
        paths = [one.env["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        here = {name: os.environ[name] for name in _FROM_HERE if name in os.environ}
        return {**here, **one.env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def _enter(self, one: Planned) -> list[str]:
        held = [self._held[other] for other in one.namespaces.values() if other in self._held]
        return held[0].enter if held else []

    def _end(self, name: str) -> None:
        """Send SIGTERM to the service, and SIGKILL after its grace period, as an engine does."""
        process = self._processes[name]
        os.kill(_innermost(process.pid) if self._enter(self._planned[name]) else process.pid, signal.SIGTERM)
        try:
            self.exit_codes[name] = process.wait(self._planned[name].grace)
        except subprocess.TimeoutExpired:
            self.exit_codes[name] = -signal.SIGKILL

    def _kill_all(self) -> None:
        for process in self._processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()
        for held in self._held.values():
            held.close()


def _innermost(pid: int) -> int:
    """Return the service's own pid if unshare or nsenter stands in front of it: these wait for one child."""
    process = psutil.Process(pid)
    while process.name() in ("unshare", "nsenter") and process.status() != psutil.STATUS_ZOMBIE:
        process = next(iter(process.children()), process)
        time.sleep(_LOOK_SECONDS / 50)
    return process.pid
