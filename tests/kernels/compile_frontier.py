"""Compiles the kernels of a draft step for a GPU that is not there: the interpreter takes what the compiler refuses.

Run by test_frontier.py, as a process of its own: in the test's, Triton may be its interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
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


def main() -> None:
    """Call every launcher once; each launch is a compilation."""
    from frontier_burst import BRANCHING, Burst, Entry

    triton.runtime.driver.set_active(_Driver())  # type: ignore[no-untyped-call]
    compiled: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(self.__name__)
        return run(self, *arguments, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only  # type: ignore[method-assign]
    from kernels.jit import frontier

    for width, region in ((8, 64), (32, 512)):
        burst = Burst([Entry(0, 3, 0.0, 5)], [[1, 2, 3], [4]], width, region=region, device="cpu")
        told = torch.zeros(2, 4 + region, dtype=torch.int32)
        frontier.begin_burst(burst.header, burst.seeds, burst.pool, burst.rows, burst.plan)
        frontier.reroot_pool(burst.header, burst.pool, burst.rows, burst.plan, told, width * BRANCHING)
        frontier.add_seeds(burst.pool, torch.zeros(4 + 8 * 64, dtype=torch.int32))
        frontier.choose_entries(burst.header, burst.pool, burst.rows, burst.step, BRANCHING)
        frontier.place_entries(burst.pool, burst.rows, burst.step, burst.plan)
        tokens = torch.zeros(width, BRANCHING, dtype=torch.int32)
        frontier.append_candidates(
            burst.header, burst.pool, burst.step, tokens, torch.zeros(width, BRANCHING), burst.results
        )
    sys.stdout.write(" ".join(sorted(set(compiled))))


if __name__ == "__main__":
    main()
