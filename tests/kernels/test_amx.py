"""Products with weights of four bits by AMX against products in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import amx
from kernels.amx import GROUP, MAX_ROWS, TILE, assembly, four_bit_product, has_amx, packed_blocks

with_amx = pytest.mark.skipif(not has_amx(), reason="no AMX here")


def made(num_out: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Packed weights, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (num_out, size), generator=generator, dtype=torch.int32)
    scales = 0.001 + 0.01 * torch.rand(num_out, size // GROUP, generator=generator)
    middles = 0.02 * torch.randn(num_out, size // GROUP, generator=generator)
    wide = [groups.half().double().repeat_interleave(GROUP, 1) for groups in (scales, middles)]
    return packed_blocks(codes, scales, middles), wide[0] * (codes - 8) + wide[1]


@with_amx
@settings(max_examples=30)
@given(tiles=st.integers(1, 9), groups=st.integers(1, 12), count=st.integers(1, MAX_ROWS), threads=st.integers(1, 3))
def test_products_are_those_of_the_wide_weights(tiles: int, groups: int, count: int, threads: int) -> None:
    num_out, size = tiles * TILE, groups * GROUP
    blocks, wide = made(num_out, size, seed=tiles)
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(count)).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = four_bit_product(rows, blocks, num_out)
    finally:
        torch.set_num_threads(before)
    exact = rows.double() @ wide.T
    assert (found - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-5
    for row in range(count):
        assert torch.equal(four_bit_product(rows[row : row + 1], blocks, num_out)[0], found[row]), "by itself"


@with_amx
def test_rows_may_lie_within_wider_ones_and_threads_may_call_at_once() -> None:
    blocks, _ = made(96, 128)
    wider = torch.randn(7, 256).bfloat16()
    rows = wider[:, 128:]
    expected = four_bit_product(rows.contiguous(), blocks, 96)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: four_bit_product(rows, blocks, 96), range(50)):
            assert torch.equal(found, expected)


@with_amx
def test_what_lay_on_the_stack_is_in_no_result() -> None:
    blocks, wide = made(32, 64)
    rows = torch.randn(3, 64).bfloat16()
    nothing = torch.full((3, 64), float("nan")).bfloat16()
    assert four_bit_product(nothing, blocks, 32).isnan().all()
    torch.testing.assert_close(
        four_bit_product(rows, blocks, 32).double(), rows.double() @ wide.T, rtol=0.02, atol=0.01
    )


def test_rows_that_it_does_not_take_are_refused() -> None:
    blocks = torch.zeros(0, dtype=torch.uint8)
    for rows in (torch.zeros(MAX_ROWS + 1, 64).bfloat16(), torch.zeros(1, 64), torch.zeros(64, 2).bfloat16().T):
        with pytest.raises(ValueError, match=f"1 to {MAX_ROWS} in bfloat16 can be taken"):
            four_bit_product(rows, blocks, 16)
    for num_out, size in ((32, 32), (16, 64), (20, 32), (16, 40)):
        with pytest.raises(ValueError, match=rf"320 bytes of blocks are no weights of \[{num_out}, {size}\]"):
            four_bit_product(torch.zeros(1, size).bfloat16(), torch.zeros(320, dtype=torch.uint8), num_out)


def test_it_compiles_on_any_processor() -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(assembly())
    module.verify()
    code = amx._machine().emit_assembly(module)
    assert code.count("tdpbf16ps") >= 8 and code.count("vpermw") >= 64
