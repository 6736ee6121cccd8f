"""Processes that compile kernels for a parent process, since Triton's compiler holds the GIL most of the time.

The parent finds the kernels, and the launchers that a C compiler makes, in Triton's cache on disk.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import os
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

log = logging.getLogger(__name__)

MAX_WORKERS = 16
_LEAST_CORES = 4
"""With fewer cores there is nothing to gain."""


class CompileJob(NamedTuple):
    """A variant of a kernel, as Triton's compiler takes it."""

    module: str
    name: str
    key: str
    """The function's part of the cache key. It is sent along because Triton's depends on the order in which keys are
    made: constants of a callee count only if the callee's key came first."""
    signature: Any
    constexprs: Any
    attrs: Any
    options: dict[str, Any]
    target: tuple[Any, ...]
    """Backend, architecture and threads of a warp."""

    @classmethod
    def parse(cls, line: bytes) -> CompileJob:
        """Parse a job from its line. Raises ValueError or SyntaxError if the line is not made of literals."""
        return cls(*ast.literal_eval(line.decode()))

    def line(self) -> bytes:
        """Return the job as a line of literals. Raises the errors of `parse` if the line cannot be parsed again."""
        line = repr(tuple(self)).encode() + b"\n"
        self.parse(line)
        return line

    def compile(self) -> None:
        """Compile the variant into Triton's cache."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        function = getattr(importlib.import_module(self.module), self.name)
        function.hash = self.key
        kind = GluonASTSource if function.is_gluon() else ASTSource
        source = kind(function, self.signature, self.constexprs, self.attrs)
        launcher = threading.Thread(target=_make_launcher, args=(source,))
        launcher.start()
        try:
            triton.compile(source, target=GPUTarget(*self.target), options=self.options)
        finally:
            launcher.join()


def _make_launcher(source: Any) -> None:
    """Compile the launcher of a kernel with this signature, unless Triton's cache has it."""
    # If this fails, the parent compiles the launcher. It also fails after compiling, for lack of a compiled kernel.
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, SimpleNamespace())


class _Workers:
    """Processes that start with the first job; each does one job at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._beginning: list[threading.Thread] = []
        self._num_ready = 0
        self._has_begun = False
        self._num_left = 0
        """Processes that are ready or may still become ready."""
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        """Ready processes without a job; None once all processes are gone."""
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compile-ahead")
        self._started: dict[bytes, Future[None]] = {}
        """Jobs compiled ahead, by their lines."""

    def start(self, job: CompileJob) -> None:
        """Start a job without waiting for it. Raises ValueError or SyntaxError for one that literals cannot express."""
        line = job.line()
        self._begin()
        if line not in self._started:
            self._started[line] = self._threads.submit(self._run, line)

    def run(self, job: CompileJob) -> None:
        """Run a job and wait for it. Does nothing if no process is ready, unless `start` has started the job.

        Raises ValueError or SyntaxError for a job that literals cannot express, OSError if the process is gone, and
        RuntimeError with the compiler's message.
        """
        line = job.line()
        self._begin()
        started = self._started.get(line)
        if started is not None:
            started.result()
        elif self._num_ready:
            self._run(line)

    def _run(self, line: bytes) -> None:
        process = self._idle.get()
        if process is None:
            self._idle.put(None)
            raise OSError("all processes that compile are gone")
        try:
            answer = _ask(process, line)
        except (OSError, ValueError) as error:  # the second once `end` has closed its pipes
            self._note_gone(was_ready=True)
            raise OSError(str(error)) from error
        self._idle.put(process)
        if answer:
            raise RuntimeError(answer)

    def _begin(self) -> None:
        with self._lock:
            if self._has_begun:
                return
            self._has_begun = True
            # With fewer processes, or none, the others and the parent compile more.
            with suppress(OSError):
                while len(self._processes) < self._count:
                    self._processes.append(_start_process())
            self._num_left = len(self._processes)
            if not self._num_left:
                self._idle.put(None)
            self._beginning = [threading.Thread(target=self._await, args=(p,), daemon=True) for p in self._processes]
        for thread in self._beginning:
            thread.start()

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        """Make a process available once it has imported its modules."""
        if process.stdout is not None and process.stdout.readline():
            with self._lock:
                self._num_ready += 1
            self._idle.put(process)
        else:
            self._note_gone(was_ready=False)

    def _note_gone(self, *, was_ready: bool) -> None:
        with self._lock:
            self._num_ready -= was_ready
            self._num_left -= 1
            if not self._num_left:
                self._idle.put(None)

    def end(self) -> None:
        """End the processes, and drop jobs that are not done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            # Closing the pipe of a process that is gone fails if there is something left to write.
            with suppress(BrokenPipeError), process:
                pass


_workers: _Workers | None = None


@contextmanager
def compile_aside() -> Iterator[None]:
    """Compile variants of kernels that several threads launch in this context on as many cores.

    Has no effect for variants in Triton's cache, or if there are few cores.
    """
    global _workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _workers is not None or cores < _LEAST_CORES:
        yield
        return
    _workers = own = _Workers(min(cores, MAX_WORKERS))
    try:
        yield
    finally:
        _workers = None
        own.end()


def prepare(function: Any, device: int, signature: Any, *variant: Any, ahead: bool = False) -> bool:
    """Within `compile_aside`, make sure that Triton's cache has a variant of a kernel.

    `variant`: constexprs, options and attributes. If this fails, and while other processes import the compiler, the
    caller compiles the variant as usual. `ahead`: do not wait; a later call for the same variant does. Returns whether
    the cache lacked the variant and other processes compile it.
    """
    workers = _workers
    if workers is None:
        return False
    try:
        constexprs, options, attrs = variant[:3]
        _, _, target, backend, _ = function.device_caches[device]
        if _is_cached(function.ASTSource(function, signature, constexprs, attrs), backend, options):
            return False
        where = (target.backend, target.arch, target.warp_size)
        identity = (function.module, function.__name__, function.cache_key)
        job = CompileJob(*identity, signature, constexprs, attrs, vars(options), where)
        (workers.start if ahead else workers.run)(job)
    except Exception as error:  # the caller can always compile by itself
        log.debug("%s is compiled here: %s", getattr(function, "__name__", function), error)
        return False
    return True


def compiles_aside() -> bool:
    """Whether other processes compile, i.e. a `compile_aside` is active."""
    return _workers is not None


def _is_cached(source: Any, backend: Any, options: Any) -> bool:
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {}
    return name in group


def _ask(process: subprocess.Popen[bytes], line: bytes) -> str:
    """Return the compiler's error for a job, empty on success. Raises OSError if the process is gone."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise OSError("a process that compiles has no pipes")
    stdin.write(line)
    stdin.flush()
    answer = stdout.readline().decode()
    if not answer.endswith("\n"):
        raise OSError("a process that compiles has ended")
    return answer.rstrip()


def _start_process() -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        # An interrupt from a terminal is meant for the parent, whose end ends this process.
        start_new_session=True,
    )


def work(jobs: IO[bytes], results: IO[bytes]) -> None:
    """Write an empty line when ready, then compile the parent's jobs until it ends."""
    import kernels.jit

    for module in pkgutil.iter_modules(kernels.jit.__path__, "kernels.jit."):
        importlib.import_module(module.name)
    results.write(b"\n")
    results.flush()
    for line in jobs:
        answer = ""
        try:
            CompileJob.parse(line).compile()
        except Exception as error:  # reported; the parent gets the same error if it needs the variant
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        results.write(answer.encode() + b"\n")
        results.flush()


if __name__ == "__main__":
    # Output of compilers must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work(sys.stdin.buffer, answers)
