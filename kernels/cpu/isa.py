"""The instruction sets that functions of kernels.cpu are compiled for."""

from __future__ import annotations

import platform
import sys
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
_AVX512 = _AVX2 | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
_VNNI = _AVX512 | {"avx512_vnni"}
_AMX = _VNNI | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}


class Isa(Enum):
    """Instruction sets, best first. The value names it for LLVM: a processor, and changes to its features."""

    AMX = "sapphirerapids", "-avx512fp16"
    """Products by tiles, and AVX-512 with bfloat16. A virtual machine may hide instructions for float16."""
    VNNI = "x86-64-v4", "+avx512vnni"
    """AVX-512 with dot products of bytes."""
    AVX512 = "x86-64-v4", ""
    AVX2 = "x86-64-v3", ""

    @property
    def has_tiles(self) -> bool:
        """Whether products use tile instructions."""
        return self is Isa.AMX

    def has_dots(self, kind: str) -> bool:
        """Whether products with weights of `kind` use dot products of bytes. Others without tiles use float32."""
        return self is Isa.VNNI and kind != "half"

    @property
    def registers(self) -> int:
        """Number of vectors of 16 float32 numbers that fit in registers."""
        return 8 if self is Isa.AVX2 else 32


@cache
def cpu_flags() -> frozenset[str]:
    """Return the processor's features, such as instruction sets, by Linux's names; empty on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    words = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(words.split())


@cache
def supported() -> tuple[Isa, ...]:
    """Return the instruction sets that can be used here, best first. They need Linux and llvmlite."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or find_spec("llvmlite") is None:
        return ()
    needed = {Isa.AMX: _AMX, Isa.VNNI: _VNNI, Isa.AVX512: _AVX512, Isa.AVX2: _AVX2}
    found = [isa for isa in Isa if needed[isa] <= cpu_flags()]
    # The system must permit this process to use tiles.
    return tuple(isa for isa in found if isa is not Isa.AMX or torch.cpu._init_amx())


def best_isa() -> Isa | None:
    """Return the instruction set that functions are compiled for here, or None if none can be used."""
    return next(iter(supported()), None)


def needed_isa() -> Isa:
    """Return `best_isa()`. Raises RuntimeError if there is none."""
    isa = best_isa()
    if isa is None:
        raise RuntimeError("the functions of kernels.cpu need Linux on x86-64, a processor with AVX2, and llvmlite")
    return isa
