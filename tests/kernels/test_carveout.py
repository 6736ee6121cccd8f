"""Kernels of small layers ask for one division of L1, other ones for none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from kernels.compiling import CARVEOUT, share_l1
from kernels.elementwise import rms_norm
from kernels.linear import norm_linear

pytestmark = pytest.mark.gpu


def test_kernels_that_are_loaded_afterwards_have_it() -> None:
    from triton import knobs

    asked: dict[str, int] = {}

    def note(module: Any, function: int, name: str, metadata: Any, hash: str) -> None:
        value = ctypes.c_int()
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuFuncGetAttribute(ctypes.byref(value), CARVEOUT, ctypes.c_void_p(function)) == 0
        asked[name] = value.value

    # Hooks are called from the last one to the first.
    hooks = knobs.runtime.kernel_load_end_hook
    hooks.calls.insert(0, note)
    before = list(hooks.calls)
    try:
        assert share_l1()
        # Sizes that nothing else has: kernels that were loaded before are as they were.
        rows, weight = torch.randn(3, 272, device="cuda").bfloat16(), torch.randn(80, 272, device="cuda").bfloat16()
        found = norm_linear(rows, weight)
        rms_norm(torch.randn(3, 20_000, device="cuda").bfloat16(), torch.ones(20_000, device="cuda").bfloat16(), 1e-5)
    finally:
        hooks.calls[:] = before
        hooks.remove(note)
    assert asked.pop("_norm_linear") == 100
    assert asked and set(asked.values()) == {-1}
    torch.testing.assert_close(found, rows @ weight.t(), rtol=2e-2, atol=0.2)
