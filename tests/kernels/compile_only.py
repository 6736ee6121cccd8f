"""Compiles kernels for a GPU that is not there: the interpreter takes what the compiler refuses.

A process of its own, since in the test's Triton may be its interpreter: `compile_only.py MODULE ...` calls `main` of
each module and prints as JSON, for each, the kernels that were compiled, or what the compiler says.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
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


def _compile_only() -> set[str]:
    """From now on each launch is a compilation, as for a Hopper GPU; its kernel's name comes to the set returned."""
    triton.runtime.driver.set_active(_Driver())  # type: ignore[no-untyped-call]
    compiled: set[str] = set()
    run = JITFunction.run

    def compiled_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.add(self.__name__)
        on_gpu = {name: True for name in ("ON_GPU", "PDL", "ASM") if name in options}
        return run(self, *arguments, grid=grid, warmup=True, **(options | on_gpu))

    JITFunction.run = compiled_only  # type: ignore[method-assign]
    return compiled


def main() -> None:
    """Compile what the modules named on the command line launch."""
    compiled, found = _compile_only(), {}
    for module in sys.argv[1:]:
        compiled.clear()
        try:
            importlib.import_module(module).main()
            found[module] = sorted(compiled)
        except Exception:
            found[module] = traceback.format_exc()[-3000:]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
