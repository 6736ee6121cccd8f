"""Where a kernel runs: Triton on CUDA devices, its interpreter on a CPU on request, torch references elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_interpreting = False


def use_triton(tensor: Tensor) -> bool:
    """Whether functions of this package run their Triton kernels on `tensor`'s device."""
    return tensor.is_cuda or _interpreting


def backend(tensor: Tensor, name: str) -> Any:
    """Return kernels.jit.`name` or kernels.reference.`name`, whichever runs on `tensor`'s device."""
    return _module("jit" if use_triton(tensor) else "reference", name)


@contextmanager
def triton_on_cpu() -> Iterator[None]:
    """Run Triton kernels on CPU tensors in this context. TRITON_INTERPRET=1 must be set before triton is imported."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def supports_pdl(tensor: Tensor) -> bool:
    """Whether a kernel on this device may start before the previous one ends (programmatic dependent launch)."""
    return tensor.is_cuda and _capability(tensor.device.index or 0) >= (9, 0)


def starts_early(tensor: Tensor) -> dict[str, bool]:
    """Return launch options that let a kernel start before the previous one ends, where `supports_pdl`."""
    pdl = supports_pdl(tensor)
    return {"PDL": pdl, "launch_pdl": pdl}


def has_wgmma(where: Tensor | torch.device) -> bool:
    """Whether this device has wgmma, Hopper's matrix instructions for four warps, which no other architecture has."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type == "cuda" and _capability(device.index or 0) == (9, 0)


def num_processors(where: Tensor | torch.device) -> int:
    """Return how many streaming multiprocessors a device (or a tensor's device) has; for a CPU a small stand-in."""
    device = where.device if isinstance(where, Tensor) else where
    return _num_processors(device.index or 0) if device.type == "cuda" else 4


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError for a head size that the kernels do not support."""
    if head_dim < 16 or head_dim != power_of_two(head_dim):
        raise ValueError(f"head_dim must be a power of two from 16 on, got {head_dim}")


def ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


@cache
def _module(package: str, name: str) -> Any:
    return importlib.import_module(f"kernels.{package}.{name}")


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _num_processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
