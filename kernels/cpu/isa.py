"""The instruction sets that functions of kernels.cpu are compiled for."""

from __future__ import annotations

import platform
import sys
from enum import Enum
from functools import cache
from importlib.util import find_spec

import torch


class Isa(Enum):
    """Best first. The value is the processor's name that LLVM has for it."""

    AMX = "sapphirerapids"
    """Products by tiles; AVX-512 with instructions for bfloat16 besides."""
    AVX512 = "x86-64-v4"
    AVX2 = "x86-64-v3"

    @property
    def has_tiles(self) -> bool:
        """Whether products are made by tiles, else by multiplying and adding (`fma`) in float32."""
        return self is Isa.AMX

    @property
    def registers(self) -> int:
        """Vectors of 16 float32 numbers that registers hold."""
        return 8 if self is Isa.AVX2 else 32


@cache
def supported() -> tuple[Isa, ...]:
    """Those that run here, best first. They need Linux and llvmlite."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or find_spec("llvmlite") is None:
        return ()
    found = {Isa.AVX512: torch.cpu._is_avx512_supported(), Isa.AVX2: torch.cpu._is_avx2_supported()}
    found[Isa.AMX] = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return tuple(isa for isa in Isa if found[isa])


def best_isa() -> Isa | None:
    """The one that functions are compiled for here; None where none of them runs."""
    return next(iter(supported()), None)


def needed_isa() -> Isa:
    """The same; raises RuntimeError where there is none."""
    isa = best_isa()
    if isa is None:
        raise RuntimeError("the functions of kernels.cpu need Linux on x86-64, a processor with AVX2, and llvmlite")
    return isa
