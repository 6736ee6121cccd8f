"""Compiles kernels for a GPU that is not there: the interpreter takes what the compiler refuses.

For processes of their own: in the test's, Triton may be its interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.jit import JITFunction


class _Driver:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(CudaDriver, name)


def compile_only() -> list[str]:
    """From now on each launch is a compilation, as for a Hopper GPU; its kernel's name comes to the list returned."""
    triton.runtime.driver.set_active(_Driver())  # type: ignore[no-untyped-call]
    compiled: list[str] = []
    run = JITFunction.run

    def compiled_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(self.__name__)
        on_gpu = {name: True for name in ("ON_GPU", "PDL", "ASM") if name in options}
        return run(self, *arguments, grid=grid, warmup=True, **(options | on_gpu))

    JITFunction.run = compiled_only  # type: ignore[method-assign]
    return compiled
