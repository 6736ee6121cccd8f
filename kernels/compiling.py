"""Kernels launched for the first time by several threads at once, which compiles them on all cores.

Triton compiles in any thread, but what follows is written for one:

- Arguments reach a kernel through a small C module. There is a file for each signature, and all of them are imported
  under one name. When such a file is loaded a second time in a process (for the same signature with other constants),
  Python fills, and returns, the module that lies in `sys.modules` under that name: that of whichever signature was
  loaded last. A thread that is about to take `launch` out of that module gets another kernel's. If counts of arguments
  differ, the launch fails; if they do not, the kernel finds numbers where it expects pointers.
- A kernel has its launcher before it has its function on the device. A thread that comes in between launches nothing.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

_mending = threading.Lock()
_loading = threading.RLock()
_readying = tuple(threading.RLock() for _ in range(64))
"""Threads wait for each other only if they are about to make the same kernel ready, or one that shares its lock."""


def allow_threads() -> bool:
    """Have Triton bear first launches in several threads at once.

    False if there is no Triton, or one whose workings are not those that are known here: launch in one thread then.
    """
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime import build
    except ImportError:
        return False
    with _mending:
        if getattr(build, "_outrider_mended", False):
            return True
        if not _is_known(CompiledKernel, build):
            return False
        _load_in_turn(build)
        _make_ready_once(CompiledKernel)
        build._outrider_mended = True
    return True


def _is_known(kernel: Any, build: Any) -> bool:
    run, load = vars(kernel).get("run"), getattr(build, "compile_module_from_src", None)
    if not isinstance(run, property) or run.fget is None or load is None:
        return False
    loads = "_load_module_from_path" in load.__code__.co_names
    readies = "_init_handles" in run.fget.__code__.co_names and "_init_handles" in vars(kernel)
    return loads and readies and hasattr(build, "_load_module_from_path")


def _load_in_turn(build: Any) -> None:
    """Whoever loads a C module gets one of its own, made before anybody else loads another."""
    load = build._load_module_from_path

    def load_alone(name: str, path: str) -> ModuleType:
        with _loading:
            own = ModuleType(name)
            vars(own).update(vars(load(name, path)))
            return own

    build._load_module_from_path = load_alone


def _make_ready_once(kernel: Any) -> None:
    """A kernel is made ready by one thread, and launched when it has its function."""
    init = kernel._init_handles

    def make_ready(self: Any) -> None:
        with _readying[(id(self) >> 6) % len(_readying)]:
            init(self)

    def run(self: Any) -> Any:
        if self.function is None:
            self._init_handles()
        return self._run

    kernel._init_handles = make_ready
    kernel.run = property(run)
