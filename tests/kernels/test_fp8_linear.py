"""Products of rows in bfloat16 with fp8 weights, as the sum of two products in fp8."""

from __future__ import annotations

import pytest
import torch
from test_quant_gemm import exact_product, made
from torch import Tensor

from kernels.jit import gemm as jit
from kernels.linear import fits_fp8_linear, fp8_linear
from kernels.quant_weight import packed

SIZE = 192


def random_rows(count: int, depth: int, device: str) -> Tensor:
    """bfloat16 [count, SIZE] with all mantissas, and as many powers of two from one down as `depth`."""
    torch.manual_seed(0)
    # Where e4m3 rounds to the next power of two, the interpreter takes this one.
    mantissas = torch.randint(128, 256 if device == "cuda" else 248, (count, SIZE))
    signs, powers = torch.randn(count, SIZE).sign(), torch.randint(1 - depth, 1, (count, SIZE)).exp2()
    return (signs * mantissas / 128 * powers).bfloat16().to(device)


def test_parts_of_rows_hold_all_their_bits(device: str) -> None:
    """From the largest number down to 2^-13 of it; in rows of zeros, and of one number, too."""
    rows = random_rows(5, 14, device)
    rows[3], rows[4] = 0.0, 3.0
    rows *= torch.tensor([1.0, 2**40, 2**-60, 1.0, 1.0], device=device).bfloat16()[:, None]
    parts = torch.empty(10, SIZE, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(10, 1, device=device)
    jit.split(rows, 64, parts, scales)
    # Columns lie as codes do.
    back = (parts.double() * scales.double()).view(2, 5, SIZE).sum(0)
    lies = packed(torch.arange(SIZE, dtype=torch.uint8)[None], "fp8", 64).view(torch.uint8)[0].long()
    assert torch.equal(back, rows.double()[:, lies.to(device)])
    assert parts.float().abs().max() < 448


def test_numbers_beside_much_larger_ones_are_near(device: str) -> None:
    rows = torch.tensor([[300.0, 0.0101, -0.0007, 2**-30] + [0.0] * 60], device=device).bfloat16()
    parts = torch.empty(2, 64, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(2, 1, device=device)
    jit.split(rows, 2, parts, scales)
    error = (parts.float() * scales).sum(0) - rows.float()[0]
    assert error.abs().max() <= 300 * 2**-20


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows_are_multiplied_like_others(device: str, gated: bool, around: bool, dtype: torch.dtype) -> None:
    count, num_out = 70, 48
    weight = made("fp8", num_out * (2 if gated else 1), SIZE, 0, device)
    # With a last bit of one, no number lies halfway between two of e4m3, where the interpreter rounds up.
    rows = random_rows(count, 4, device).view(torch.int16).bitwise_or(1).view(torch.bfloat16)
    fractions, exponents = rows.float().frexp()
    rounded = torch.ldexp((fractions * 16).round() / 16, exponents).bfloat16()
    assert 0.01 < (rounded - rows).float().norm() / rows.float().norm() < 0.04
    bias = torch.randn(weight.num_out, device=device) if around else None
    residual = torch.randn(count, num_out, device=device) if around else None
    expected = exact_product(rounded, weight, bias, gated)
    if residual is not None:
        expected += residual.double()
    found = fp8_linear(rows, weight, bias=bias, residual=residual, gated=gated, out_dtype=dtype, rounds_rows=True)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_it_is_the_product_with_the_dequantized_matrix(device: str, gated: bool, around: bool) -> None:
    count, num_out = 70, 48
    weight = made("fp8", num_out * (2 if gated else 1), SIZE, 0, device)
    rows = random_rows(count, 4, device)
    bias = torch.randn(weight.num_out, device=device) if around else None
    residual = torch.randn(count, num_out, device=device) if around else None
    expected = exact_product(rows, weight, bias, gated)
    if residual is not None:
        expected += residual.double()
    found = fp8_linear(rows, weight, bias=bias, residual=residual, gated=gated, out_dtype=torch.float32)
    # Both products are rounded to bfloat16. With rows rounded to e4m3 it would be off by 2.6 %.
    assert (found.double() - expected).norm() <= 2**-8 * expected.norm()


def test_what_it_does_not_take_is_refused(device: str) -> None:
    weight = made("fp8", 48, SIZE, 0, device)
    assert fits_fp8_linear(weight, torch.bfloat16) == (device == "cuda")
    for other, dtype in [
        (made("fp8", 48, SIZE, 64, device), torch.bfloat16),
        (made("fp8", 40, SIZE, 0, device), torch.bfloat16),
        (made("int4", 48, SIZE, 0, device), torch.bfloat16),
        (weight, torch.float16),
    ]:
        assert not fits_fp8_linear(other, dtype)
    with pytest.raises(ValueError, match=r"contiguous rows \[M, 192\]"):
        fp8_linear(torch.zeros(70, 64, device=device).bfloat16(), weight)
    with pytest.raises(ValueError, match="residual is"):
        rows = torch.zeros(70, SIZE, device=device).bfloat16()
        fp8_linear(rows, weight, residual=torch.zeros(70, 40, device=device).bfloat16())
