"""Products of each instruction set against products in float64."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_rows import rows_as_read
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import products
from kernels.cpu.isa import Isa
from kernels.cpu.layout import COUNTERS, GROUP, TILE, prepared_size
from kernels.cpu.products import MAX_ROWS, Packed, packed_eight, packed_four, packed_half, tile_product

on_each_isa = pytest.mark.usefixtures("isa")
KINDS = ("four", "eight", "half")


def made(kind: str, num_out: int, size: int, seed: int = 0) -> tuple[Packed, Tensor]:
    """Packed weights, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "half":
        weight = (0.05 * torch.randn(num_out, size, generator=generator)).bfloat16()
        return packed_half(weight), weight.double()
    if kind == "eight":
        codes = torch.randint(-127, 128, (num_out, size), generator=generator, dtype=torch.int8)
        scales = 0.0001 + 0.001 * torch.rand(num_out, size // GROUP, generator=generator)
        return packed_eight(codes, scales), codes * scales.double().repeat_interleave(GROUP, 1)
    codes = torch.randint(0, 16, (num_out, size), generator=generator, dtype=torch.int32)
    scales = 0.001 + 0.01 * torch.rand(num_out, size // GROUP, generator=generator)
    middles = 0.02 * torch.randn(num_out, size // GROUP, generator=generator)
    wide = [groups.half().double().repeat_interleave(GROUP, 1) for groups in (scales, middles)]
    return packed_four(codes, scales, middles), wide[0] * (codes - 8) + wide[1]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    tiles=st.integers(1, 9),
    groups=st.integers(1, 12),
    count=st.integers(1, MAX_ROWS) | st.integers(1, 4 * MAX_ROWS),
    threads=st.integers(1, 3),
)
@example(kind="four", tiles=1, groups=1, count=149, threads=1)  # some numbers are half of their group's largest
@example(kind="four", tiles=1, groups=1, count=100, threads=1)  # one is, and 127 times a reciprocal rounds another way
def test_products_are_those_of_the_wide_weights(
    isa: Isa, kind: str, tiles: int, groups: int, count: int, threads: int
) -> None:
    num_out, size = tiles * TILE, groups * GROUP
    weight, wide = made(kind, num_out, size, seed=tiles)
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(count)).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = tile_product(rows, weight)
    finally:
        torch.set_num_threads(before)
    exact = rows_as_read(rows, kind, isa) @ wide.T
    assert (found - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-5
    for row in range(count):
        assert torch.equal(tile_product(rows[row : row + 1], weight)[0], found[row]), "by itself"


@on_each_isa
@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_lie_within_wider_ones_and_threads_may_call_at_once(kind: str) -> None:
    weight, _ = made(kind, 96, 128)
    wider = torch.randn(7, 256).bfloat16()
    rows = wider[:, 128:]
    expected = tile_product(rows.contiguous(), weight)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: tile_product(rows, weight), range(50)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lay_on_the_stack_is_in_no_result(isa: Isa, kind: str) -> None:
    weight, wide = made(kind, 32, 64)
    rows = torch.randn(3, 64).bfloat16()
    nothing = torch.full((3, 64), float("nan")).bfloat16()
    assert tile_product(nothing, weight).isnan().all()
    exact = rows_as_read(rows, kind, isa) @ wide.T
    assert (tile_product(rows, weight) - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-5
    assert tile_product(rows[:0], weight).shape == (0, 32)


def between_walls(size: int, at_end: bool) -> Tensor:
    """So many bytes, right behind a page that nobody may touch, or right before one."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    pages = -(-size // page) * page
    memory = torch.frombuffer(mmap.mmap(-1, pages + 2 * page), dtype=torch.uint8)
    for wall in (0, page + pages):
        assert libc.mprotect(ctypes.c_void_p(memory.data_ptr() + wall), ctypes.c_size_t(page), 0) == 0
    first = page + pages - size if at_end else page
    return memory[first : first + size]


@on_each_isa
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_beside_rows_results_and_what_is_prepared_is_touched(kind: str, at_end: bool, isa: Isa) -> None:
    weight, _ = made(kind, 48, 64)
    for count in (1, 3, 17, 33):
        rows = torch.randn(count, 64).bfloat16()
        sizes = {"x": 2 * rows.numel(), "y": 2 * count * 48, "prepared": prepared_size(kind, count, 64, isa)}
        memory = {name: between_walls(size, at_end) for name, size in (sizes | {"counters": COUNTERS}).items()}
        memory["x"].copy_(rows.view(torch.uint8).flatten())
        pointers = {name: part.data_ptr() for name, part in memory.items()} | {
            "row_stride": 128, "w": weight.blocks.data_ptr(), "out_stride": 96, "blocks": 2, "tiles": 3, "count": count,
            "chunk": 2, "chunks": 2, "counter_bytes": COUNTERS,
        }  # fmt: skip
        products._compiled(isa, kind, False)(*(pointers[name] for name in products._PRODUCT), *products.pool(1))
        assert torch.equal(memory["y"].view(torch.bfloat16).view(count, 48), tile_product(rows, weight))


def test_rows_that_it_does_not_take_are_refused() -> None:
    weight = packed_four(torch.zeros(16, 64, dtype=torch.int32), torch.ones(16, 2), torch.ones(16, 2))
    for rows in (torch.zeros(1, 32).bfloat16(), torch.zeros(1, 64), torch.zeros(64, 2).bfloat16().T):
        with pytest.raises(ValueError, match=r"rows for weights \[16, 64\]"):
            tile_product(rows, weight)


@pytest.mark.parametrize("isa", Isa)
def test_no_instruction_is_used_that_is_not_asked_for(isa: Isa) -> None:
    """Conversions of float16 are AVX-512's or F16C's, not those of AVX-512 FP16."""
    code = pytest.importorskip("kernels.cpu.code", exc_type=ImportError)
    row_code = pytest.importorskip("kernels.cpu.row_code", exc_type=ImportError)
    module = code.Module(isa)
    row_code._write_find(code.Code(module, "find", row_code._FIND_ARGS))
    text = code.machine(isa).emit_assembly(code.optimized(module))
    assert "vcvtps2ph" in text and "vcvtss2sh" not in text


@pytest.mark.parametrize("isa", Isa)
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_on_any_processor(kind: str, isa: Isa) -> None:
    code = pytest.importorskip("kernels.cpu.code", exc_type=ImportError)
    text = code.machine(isa).emit_assembly(products.products_module(isa, kind))
    if isa.has_tiles:
        assert text.count("tdpbssd" if kind == "eight" else "tdpbf16ps") >= 4
    else:
        assert text.count("vfmadd") >= 40 and "tile" not in text.replace(f"tiles_{kind}", "")
        assert ("vpdpbusd" in text) is isa.has_dots(kind) and ("%zmm" in text) is (isa is not Isa.AVX2)
