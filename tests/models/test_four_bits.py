"""Matrices that were stored in four bits are multiplied in four bits where rows are few, on a CPU."""

from __future__ import annotations

import pytest
import torch
from cpu_rows import rows_as_read
from torch import Tensor

from kernels.cpu.isa import Isa
from kernels.cpu.layout import GROUP
from kernels.cpu.products import MAX_ROWS, tile_product
from kernels.quant_weight import QuantWeight, packed
from outrider.layers.cpu_weight import CpuWeight, four_bits, four_bits_of
from outrider.layers.linear import Linear

CPU = torch.device("cpu")


on_each_isa = pytest.mark.usefixtures("isa")


def on_levels(num_out: int, size: int) -> Tensor:
    """float32 [num_out, size]: 16 even levels in each group, both ends among them, as Q4_1 stores them."""
    generator = torch.Generator().manual_seed(num_out)
    codes = torch.randint(0, 16, (num_out, size // GROUP, GROUP), generator=generator)
    codes[..., 3], codes[..., 20] = 0, 15
    steps = 0.01 * (0.5 + torch.rand(num_out, size // GROUP, 1, generator=generator))
    lowest = -steps * (7 + torch.rand(num_out, size // GROUP, 1, generator=generator))
    return (steps * codes + lowest).view(num_out, size)


def test_few_rows_get_the_product_and_each_the_same_bits_whatever_is_beside_it(isa: Isa) -> None:
    weight = on_levels(48, 96)
    found_weight = CpuWeight.of(weight.bfloat16())
    assert found_weight is not None and found_weight.of_few is not None and found_weight.of_few.kind == "four"
    rows = torch.randn(MAX_ROWS, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, exact = found_weight.product(rows, None), rows_as_read(rows, "four", isa) @ weight.double().t()
    assert (found - exact).norm() < 0.003 * exact.norm()
    for count in range(1, MAX_ROWS):
        assert torch.equal(found_weight.product(rows[:count], None), found[:count])
    logits = found_weight.to_float32(torch.cat((rows, rows[:5])))
    assert torch.equal(logits, torch.cat((found, found[:5])).float()), "of more rows, too"
    wider = torch.cat((rows, rows), 1)
    assert torch.equal(found_weight.product(wider[:, 96:], None), found), "rows that do not lie side by side"


def test_a_matrix_of_other_weights_has_no_codes() -> None:
    assert four_bits(on_levels(48, 96).bfloat16()) is not None
    assert four_bits(torch.randn(48, 96).bfloat16()) is None
    weight = on_levels(48, 96)
    weight[40, 50] += 0.004  # nearly half a step
    assert four_bits(weight.bfloat16()) is None


@on_each_isa
def test_other_matrices_lie_in_tiles_and_those_of_float32_as_they_did() -> None:
    found = CpuWeight.of(torch.randn(48, 96).bfloat16())
    assert found is not None and found.of_few is not None and found.of_few.kind == "half"
    exact = CpuWeight.of(on_levels(48, 96))
    assert exact is None or exact.of_few is None, "float32 is the reference, and stays exact"
    odd = CpuWeight.of(torch.randn(20, 96).bfloat16())
    assert odd is None or odd.of_few is None, "20 rows are no tiles"


@on_each_isa
def test_groups_of_equal_weights_are_zeros_of_a_scale() -> None:
    weight = torch.zeros(16, 64)
    weight[:, GROUP:] = 0.5
    found = four_bits(weight.bfloat16())
    assert found is not None
    rows = torch.ones(1, 64, dtype=torch.bfloat16)
    assert torch.equal(tile_product(rows, found), torch.full((1, 16), 16.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("has_zeros", [False, True])
def test_codes_of_a_checkpoint_are_taken_as_they_are(isa: Isa, has_zeros: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (48, 128), generator=generator, dtype=torch.uint8)
    scales = 0.01 + torch.rand(2, 48, generator=generator) * 0.01
    zeros = torch.randint(0, 16, (2, 48), generator=generator, dtype=torch.uint8) if has_zeros else None
    quantized = QuantWeight("int4", packed(codes, "int4", 64), scales, 64, 64, zeros=zeros)
    found = four_bits_of(quantized)
    assert found is not None
    rows = torch.randn(2, 128, generator=generator).bfloat16()
    exact = rows_as_read(rows, "four", isa) @ quantized.dequantized(torch.float32).double().t()
    assert (tile_product(rows, found) - exact).norm() < 0.006 * exact.norm()


@on_each_isa
def test_a_layer_multiplies_few_rows_and_many_alike_but_for_rounding() -> None:
    linear = Linear(64, 32, True, torch.bfloat16, CPU)
    linear.weight.copy_(on_levels(32, 64))
    assert linear.bias is not None
    linear.bias.copy_(torch.arange(32))
    linear.pack()
    rows, stream = torch.randn(MAX_ROWS + 1, 64).bfloat16(), torch.randn(MAX_ROWS + 1, 32).bfloat16()
    many, few = linear(rows), linear(rows[:MAX_ROWS])
    torch.testing.assert_close(few, many[:MAX_ROWS], atol=0.02, rtol=0.02)
    torch.testing.assert_close(
        linear.add_to(stream, rows)[:2], linear.add_to(stream[:2], rows[:2]), atol=0.03, rtol=0.02
    )
