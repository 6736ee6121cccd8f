"""How processors divide their L1 cache while the layers of a small model run."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

LAYER_KERNELS = frozenset(("_norm_linear", "_cut_linear", "_norm_qkv", "attend_short"))
"""The launches of a small model's layer in a draft step."""
CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of CUDA's driver."""
_ALL = 100
"""Percent."""


def share_l1() -> bool:
    """Have the kernels of small layers, as far as they are not loaded yet, ask for all of L1 as shared memory.

    A processor has one division at a time. By default that is what each kernel seems to need, and a program that needs
    another waits until the processor is empty: launches that overlap hold each other up. Other kernels do not overlap
    as much, and use what is left as a cache.

    Returns:
        False if there is no Triton, or one that does not tell of the kernels that it loads: all stays as it is then.
    """
    try:
        from triton import knobs

        knobs.runtime.kernel_load_end_hook.add(_ask)
    except (ImportError, AttributeError):
        return False
    return True


def ask_for(function: int, percent: int) -> None:
    """Have a kernel, CUDA's `function`, ask for so much of L1 as shared memory; -1 leaves it to the driver.

    Raises:
        OSError: CUDA's driver is not there, or refuses.
    """
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, percent)
    if error:
        raise OSError(f"CUDA's driver refuses {percent} % of L1 as shared memory: error {error}")


def _ask(module: Any, function: int, name: str, metadata: Any, hash: str) -> None:
    """Called by Triton when it has loaded a kernel. One that is refused is slower and no worse."""
    if name not in LAYER_KERNELS:
        return
    try:
        ask_for(function, _ALL)
    except OSError as error:
        log.warning("%s runs with less shared memory than it could: %s", name, error)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
