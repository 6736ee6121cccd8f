"""Matrices that were made of eight-bit integers are found, and multiplied as such where rows are few, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.layout import GROUP, TILE
from kernels.cpu.products import MAX_ROWS, eight_bits, round_to_eight_bits, tile_product
from outrider.layers.cpu_weight import CpuWeight

pytestmark = pytest.mark.usefixtures("isa")


def stored(num_out: int, size: int, seed: int, largest: float = 0.3) -> tuple[Tensor, Tensor]:
    """Weights as GGUF's Q8_0 stores them, in float64, and rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    groups = largest * torch.randn(num_out, size // GROUP, GROUP, generator=generator)
    exact = groups.abs().amax(2, keepdim=True) / 127
    scales = exact.half().double()
    weight = ((groups / exact).round() * scales).view(num_out, size)
    return weight, weight.bfloat16()


@settings(max_examples=30)
@given(tiles=st.integers(1, 4), groups=st.integers(1, 6), seed=st.integers(0, 1000), power=st.integers(-8, 8))
def test_codes_are_found_of_what_q8_0_stored(tiles: int, groups: int, seed: int, power: int) -> None:
    exact, weight = stored(tiles * TILE, groups * GROUP, seed, 2.0**power)
    weight[3, :GROUP] = exact[3, :GROUP] = 0.0
    found = eight_bits(weight)
    assert found is not None and found.kind == "eight"
    rows = torch.randn(5, groups * GROUP, generator=torch.Generator().manual_seed(seed)).bfloat16()
    product, wanted = tile_product(rows, found, torch.float32), rows.double() @ exact.t()
    # What bfloat16 rounds weights by is 2^-9: scales and codes must be those that were rounded, or as good.
    assert (product - wanted).norm() <= 2**-9 * wanted.norm()


def test_other_weights_have_no_codes() -> None:
    _, weight = stored(3 * TILE, 96, 1)
    assert eight_bits(torch.randn(48, 96).bfloat16()) is None
    weight[40, 50] *= 1.25
    assert eight_bits(weight) is None
    weight[40, 50] = float("nan")
    assert eight_bits(weight) is None


def test_rounding_lays_weights_on_levels_and_leaves_what_lies_there() -> None:
    weight = (0.1 * torch.randn(48, 96)).bfloat16()
    before = weight.clone()
    round_to_eight_bits(weight)
    # Half a level of the largest weight, and what bfloat16 rounds it by.
    assert (weight - before).abs().max() <= (0.5 / 127 + 2**-8) * before.abs().max()
    once = weight.clone()
    round_to_eight_bits(weight)
    assert torch.equal(weight, once) and eight_bits(weight) is not None


def test_few_rows_take_codes_and_logits_of_many_do() -> None:
    exact, weight = stored(64, 128, 2)
    found = CpuWeight.of(weight)
    assert found is not None and found.of_few is not None and found.of_few.kind == "eight"
    rows = torch.randn(MAX_ROWS + 1, 128).bfloat16()
    wanted = rows.double() @ exact.t()
    for count in (1, MAX_ROWS, MAX_ROWS + 1):
        assert (found.to_float32(rows[:count]) - wanted[:count]).norm() < 0.003 * wanted.norm()
    assert torch.equal(found.to_float32(rows[:MAX_ROWS])[3], found.to_float32(rows[3:4])[0]), "by itself"
