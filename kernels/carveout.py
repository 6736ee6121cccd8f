"""How processors divide their L1 cache while the layers of a small model run."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

LAYER_KERNELS = frozenset(("_norm_linear", "_cut_linear", "_norm_qkv", "attend_short"))
"""The launches of a small model's layer in a draft step."""
_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of CUDA's driver."""
_ALL = 100
"""Percent."""


def share_l1() -> None:
    """Have the kernels of small layers, as far as they are not loaded yet, ask for all of L1 as shared memory.

    A processor has one division at a time. By default that is what each kernel seems to need, and a program that needs
    another waits until the processor is empty: launches that overlap hold each other up. Other kernels do not overlap
    as much, and use what is left as a cache.
    """
    from triton import knobs

    knobs.runtime.kernel_load_end_hook.add(_ask)


def _ask(module: Any, function: int, name: str, metadata: Any, hash: str) -> None:
    """Called by Triton when it has loaded a kernel. Raises RuntimeError if CUDA does not take it."""
    if name not in LAYER_KERNELS:
        return
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, _ALL)
    if error:
        raise RuntimeError(f"CUDA refuses {_ALL} % of L1 as shared memory for {name}: error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
