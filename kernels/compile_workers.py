"""Processes that compile kernels for another one: Triton's compiler holds a process's interpreter most of the time.

What they compile is found by the other process in Triton's cache on disk.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

log = logging.getLogger(__name__)

MAX_WORKERS = 16
_LEAST_CORES = 4
"""With fewer there is nothing to gain."""


class CompileJob(NamedTuple):
    """A variant of a kernel, as Triton's compiler takes it."""

    module: str
    name: str
    signature: Any
    constexprs: Any
    attrs: Any
    options: dict[str, Any]
    target: tuple[Any, ...]
    """Backend, architecture and threads of a warp."""

    @classmethod
    def parse(cls, line: bytes) -> CompileJob:
        """A job from its line. Raises ValueError or SyntaxError for what no literal tells."""
        return cls(*ast.literal_eval(line.decode()))

    def line(self) -> bytes:
        """The job as a line of literals."""
        return repr(tuple(self)).encode() + b"\n"

    def compile(self) -> None:
        """Compile it, and leave it in Triton's cache."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        function = getattr(importlib.import_module(self.module), self.name)
        source = ASTSource(function, self.signature, self.constexprs, self.attrs)
        triton.compile(source, target=GPUTarget(*self.target), options=self.options)


class _Workers:
    """Processes that begin with the first job; each does one at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._free = threading.Semaphore(count)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []

    def do(self, job: CompileJob) -> None:
        """Have a job done, and wait for it.

        Raises ValueError or SyntaxError for one that cannot be told, OSError where no process is left, and RuntimeError
        with what the compiler says.
        """
        line = job.line()
        CompileJob.parse(line)
        with self._free:
            with self._lock:
                if not self._processes:
                    self._processes = [_begin() for _ in range(self._count)]
                    self._idle = self._processes[:]
                if not self._idle:
                    raise OSError("all processes that compile are gone")
                process = self._idle.pop()
            stdin, stdout = process.stdin, process.stdout
            if stdin is None or stdout is None:
                raise OSError("a process that compiles has no pipes")
            stdin.write(line)
            stdin.flush()
            answer = stdout.readline().decode()
            if not answer.endswith("\n"):
                raise OSError("a process that compiles has ended")
            with self._lock:
                self._idle.append(process)
        if answer != "\n":
            raise RuntimeError(answer.rstrip())

    def end(self) -> None:
        """End the processes, which have nothing to do by now."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with process:
                pass


_workers: _Workers | None = None


@contextmanager
def compile_aside() -> Iterator[None]:
    """Variants of kernels that are launched meanwhile, in several threads, are compiled on as many cores.

    Without effect for those that Triton's cache has, and where there are few cores.
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


def prepare(function: Any, device: int, signature: Any, *variant: Any) -> None:
    """See to it that Triton's cache has a variant of a kernel, if it is a time to compile aside.

    `variant`: constexprs, options and attributes. It is compiled in this process, as ever, where that fails.
    """
    workers = _workers
    if workers is None:
        return
    try:
        constexprs, options, attrs = variant[:3]
        _, _, target, backend, _ = function.device_caches[device]
        if _is_cached(function.ASTSource(function, signature, constexprs, attrs), backend, options):
            return
        where = (target.backend, target.arch, target.warp_size)
        workers.do(CompileJob(function.module, function.__name__, signature, constexprs, attrs, vars(options), where))
    except Exception as error:  # whatever it is, there is another way
        log.debug("%s is compiled here: %s", getattr(function, "__name__", function), error)


def _is_cached(source: Any, backend: Any, options: Any) -> bool:
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {}
    return name in group


def _begin() -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        # An interrupt from a terminal is for the other process, whose end ends this one.
        start_new_session=True,
    )


def work(jobs: IO[bytes], results: IO[bytes]) -> None:
    """Compile what the other process asks for, until it ends."""
    for line in jobs:
        answer = ""
        try:
            CompileJob.parse(line).compile()
        except Exception as error:  # told; the other process meets the same one if there is no way around
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        results.write(answer.encode() + b"\n")
        results.flush()


if __name__ == "__main__":
    # What compilers print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work(sys.stdin.buffer, answers)
