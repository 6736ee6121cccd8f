"""Loading of Triton's kernels: by several threads at once, and with more of L1 as shared memory."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.compile_workers import compiles_aside, prepare

_patch_lock = threading.Lock()
_load_lock = threading.RLock()
_init_locks = tuple(threading.RLock() for _ in range(64))
"""Locks by kernel: threads wait for each other only if they initialize the same kernel or kernels that share a lock."""
_VARIANT = ("self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup")
"""Parameters of Triton's method that compiles a variant of a kernel."""
_compile_locks: dict[tuple[int, str], threading.Lock] = {}
"""Locks by function and variant."""


def allow_threads() -> bool:
    """Patch Triton so that several threads may launch kernels for the first time at once.

    Returns False if Triton is missing or its internals are not the expected ones; then launch kernels in one thread.
    """
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime import JITFunction, build
    except ImportError:
        return False
    with _patch_lock:
        if getattr(build, "_outrider_patched", False):
            return True
        if not _is_known(CompiledKernel, build, JITFunction):
            return False
        _serialize_loads(build)
        _serialize_init(CompiledKernel)
        _compile_once(JITFunction)
        build._outrider_patched = True
    return True


def _is_known(kernel: Any, build: Any, function: Any) -> bool:
    run, load = vars(kernel).get("run"), getattr(build, "compile_module_from_src", None)
    if not isinstance(run, property) or run.fget is None or load is None:
        return False
    loads = "_load_module_from_path" in load.__code__.co_names
    readies = "_init_handles" in run.fget.__code__.co_names and "_init_handles" in vars(kernel)
    compiles = vars(function).get("_do_compile")
    if compiles is None or compiles.__code__.co_varnames[:8] != _VARIANT:
        return False
    caches = {"device_caches", "compile"} <= set(compiles.__code__.co_names)
    return loads and readies and caches and hasattr(build, "_load_module_from_path")


def _serialize_loads(build: Any) -> None:
    """Load C modules one after the other, each into its own module object."""
    load = build._load_module_from_path

    def load_locked(name: str, path: str) -> ModuleType:
        with _load_lock:
            own = ModuleType(name)
            vars(own).update(vars(load(name, path)))
            return own

    build._load_module_from_path = load_locked


def _serialize_init(kernel: Any) -> None:
    """Let one thread initialize a kernel while others wait until its function is on the device."""
    init = kernel._init_handles

    def init_locked(self: Any) -> None:
        with _init_locks[(id(self) >> 6) % len(_init_locks)]:
            init(self)

    def run(self: Any) -> Any:
        if self.function is None:
            self._init_handles()
        return self._run

    kernel._init_handles = init_locked
    kernel.run = property(run)


def _compile_once(function: Any) -> None:
    """Let one thread compile a variant of a kernel while others that need it wait; each would take as long."""
    compile_variant = function._do_compile

    def compile_locked(self: Any, key: str, signature: Any, device: Any, *rest: Any) -> Any:
        with _compile_locks.setdefault((id(self), key), threading.Lock()):
            found = self.device_caches[device][0].get(key)
            if found is not None:
                return found
            if _left_out is not None:
                # A kernel is launched many times; look into Triton's cache only the first time.
                if (id(self), key) not in _left_out:
                    _left_out[id(self), key] = prepare(self, device, signature, *rest, ahead=True)
                return None
            prepare(self, device, signature, *rest)
            return compile_variant(self, key, signature, device, *rest)

    function._do_compile = compile_locked


_left_out: dict[tuple[int, str], bool] | None = None
"""While launches are left out: their functions and variants, and whether other processes compile these."""


@contextmanager
def compile_ahead() -> Iterator[Callable[[], int] | None]:
    """Leave out Triton's launches in all threads, and compile variants that its cache lacks ahead.

    Kernels that are launched one after the other are thus compiled at the same time. This needs `compile_aside`, and
    that `allow_threads` has returned True. Everything but launches runs, on outputs that were never written: new
    tensors hold zeros, which are valid indices.

    Yields a function that counts the variants compiled ahead so far, or None if launches happen as usual.
    """
    global _left_out
    if not compiles_aside():
        yield None
        return
    from triton.runtime import JITFunction

    run = JITFunction.run

    def leave_out(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = leave_out
    left_out: dict[tuple[int, str], bool] = {}
    _left_out = left_out
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            yield lambda: sum(left_out.values())
    finally:
        _left_out = None
        JITFunction.run = run


class _Zeros(TorchDispatchMode):
    """Fill new tensors with zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket in _EMPTY else found


_EMPTY = frozenset(
    (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)
)

log = logging.getLogger(__name__)

LAYER_KERNELS = frozenset(("_norm_linear", "_cut_linear", "_norm_qkv", "attend_short"))
"""Kernels of a small model's layer in a draft step."""
CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of CUDA's driver."""


def share_l1() -> bool:
    """Make kernels of small layers ask for all of L1 as shared memory, unless they are loaded already.

    A processor has one division of L1 at a time. By default it follows the needs of each kernel, and a program that
    needs another division waits until the processor is empty, so overlapping launches delay each other. Other kernels
    overlap less, and use the rest of L1 as a cache.

    Returns:
        False if Triton is missing or has no hook for loaded kernels; then nothing changes.
    """
    try:
        from triton import knobs

        knobs.runtime.kernel_load_end_hook.add(_set_all_shared)
    except (ImportError, AttributeError):
        return False
    return True


def _set_all_shared(module: Any, function: int, name: str, metadata: Any, hash: str) -> None:
    """Set the attribute on a kernel that Triton has just loaded. Without it the kernel is slower, not wrong."""
    if name not in LAYER_KERNELS:
        return
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, 100)
    if error:
        log.warning("%s runs with less shared memory than it could: CUDA's driver says error %d", name, error)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
