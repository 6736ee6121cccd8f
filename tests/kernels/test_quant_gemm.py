"""Products with quantized weights against their dequantized matrices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.experts import expert_linear, route
from kernels.linear import dequantize, stream_linear
from kernels.linear_configs import MAX_ROWS, GemmConfig
from kernels.quant_weight import QuantWeight, codes_per_word, joined, packed, piece_of, unpacked

# Triton's interpreter multiplies the bit patterns of bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def made(kind: str, num_out: int, size: int, group: int, device: str = "cpu", span: int = 1) -> QuantWeight:
    """Random codes and scales. Groups of 0 columns: a scale a row."""
    torch.manual_seed(num_out * size + group)
    group = group or size
    shape = (-(-size // group), -(-num_out // span))
    scales = (torch.rand(shape) + 0.5) / size**0.5 / (30 if kind == "fp8" else 4)
    name = kind.removesuffix("z")
    piece = piece_of(name, size, group)
    if kind == "fp8":
        floats = (torch.randn(num_out, size) * 30).to(torch.float8_e4m3fn)
        edges = torch.tensor([0.0, -0.0, 448.0, -448.0, 2**-9, -(2**-9), 7 * 2**-9, 2**-6]).to(floats.dtype)
        floats[0, :8] = floats[1, size // 2 : size // 2 + 8] = edges
        codes = packed(floats.view(torch.uint8), name, piece)
        return QuantWeight(name, codes.to(device), scales.to(device), group, piece, span)
    codes = packed(torch.randint(16, (num_out, size), dtype=torch.uint8), name, piece)
    zeros = torch.randint(16, shape, dtype=torch.uint8).to(device) if kind == "int4z" else None
    if kind == "mxfp4":
        scales = scales.log2().round().exp2()
    return QuantWeight(name, codes.to(device), scales.to(HALF).to(device), group, piece, zeros=zeros)


def exact_product(rows: Tensor, weight: QuantWeight, bias: Tensor | None, gated: bool) -> Tensor:
    """What products are held against, without a residual: float64."""
    product = rows.double() @ weight.dequantized(torch.float64).T
    if bias is not None:
        product += bias.double()
    if not gated:
        return product
    gate, up = product.chunk(2, 1)
    return functional.silu(gate) * up


WEIGHTS = {
    "fp8, a scale a row": ("fp8", 0, 1),
    "fp8, blocks": ("fp8", 128, 16),
    "fp8, small groups": ("fp8", 32, 1),
    "int4": ("int4", 64, 1),
    "int4, small groups": ("int4", 32, 1),
    "int4 with zeros": ("int4z", 64, 1),
    "int4 with zeros, small groups": ("int4z", 32, 1),
    "mxfp4": ("mxfp4", 32, 1),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("num_rows", "split_k", "gated"), [(5, 1, False), (5, 0, True), (1, 1, True), (1, 0, False)])
def test_it_is_the_product_with_the_dequantized_matrix(
    device: str, name: str, gated: bool, num_rows: int, split_k: int
) -> None:
    kind, group, span = WEIGHTS[name]
    num_out, size = 48, 192
    weight = made(kind, num_out * (2 if gated else 1), size, group, device, span)
    rows = torch.randn(num_rows, size, device=device).to(HALF)
    bias, residual = torch.randn(weight.num_out, device=device), torch.randn(num_rows, num_out, device=device)
    expected = exact_product(rows, weight, bias, gated)
    config = GemmConfig(block_n=32, block_k=weight.piece, stages=2, split_k=split_k)
    result = stream_linear(
        rows, weight, bias=bias, residual=residual, gated=gated, out_dtype=torch.float32, config=config
    )
    torch.testing.assert_close(result.double(), expected + residual.double(), rtol=1e-4, atol=1e-3)
    if num_rows == 1:
        return
    moved = stream_linear(
        rows.flip(0)[:3].contiguous(), weight, bias=bias, residual=residual.flip(0)[:3].contiguous(), gated=gated,
        out_dtype=torch.float32, config=config,
    )  # fmt: skip
    assert torch.equal(moved, result.flip(0)[:3])


@pytest.mark.parametrize("name", ["fp8, a scale a row", "int4 with zeros"])
@pytest.mark.parametrize("gated", [False, True])
def test_many_rows_are_multiplied_as_few_are(device: str, name: str, gated: bool) -> None:
    """The chosen cuts fit, and what several launches leave is what each of them would have left alone."""
    kind, group, span = WEIGHTS[name]
    count, size, num_out = MAX_ROWS + 6, 128, 40
    weight = made(kind, num_out * (2 if gated else 1), size, group, device, span)
    rows = torch.randn(count, size, device=device).to(HALF)
    bias, residual = torch.randn(weight.num_out, device=device), torch.randn(count, num_out, device=device)
    expected = exact_product(rows, weight, bias, gated)

    def product(rows: Tensor, residual: Tensor) -> Tensor:
        return stream_linear(rows, weight, bias=bias, residual=residual, gated=gated, out_dtype=torch.float32)

    found = product(rows, residual)
    torch.testing.assert_close(found.double(), expected + residual.double(), rtol=1e-4, atol=1e-3)
    parts = zip(rows.split(MAX_ROWS), residual.split(MAX_ROWS), strict=True)
    assert torch.equal(found, torch.cat([product(*part) for part in parts]))


@pytest.mark.parametrize("name", WEIGHTS)
def test_made_wide_on_the_device_it_is_the_same(device: str, name: str) -> None:
    kind, group, span = WEIGHTS[name]
    weight = made(kind, 40, 192, group, device, span)
    assert torch.equal(dequantize(weight, torch.float32), weight.dequantized(torch.float32))


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_packing_is_undone(kind: str) -> None:
    codes = torch.randint(256 if kind == "fp8" else 16, (3, 192), dtype=torch.uint8)
    for piece in (32, 64):
        words = packed(codes, kind, piece)
        assert torch.equal(unpacked(words, kind, piece), codes)
        # The first codes of words are neighbours.
        assert torch.equal(words[:, 0].int() & (255 if kind == "fp8" else 15), codes[:, 0].int())
        assert torch.equal(words[:, 1].int() & (255 if kind == "fp8" else 15), codes[:, 1].int())
        assert words.shape[1] == 192 // codes_per_word(kind)


def test_sizes_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide"):
        piece_of("int4", 202, 202)
    weight = made("int4", 8, 96, 16)
    assert not weight.streams
    with pytest.raises(ValueError, match="make them wide"):
        stream_linear(torch.zeros(1, 96), weight)


def test_what_no_kernel_takes_is_refused_by_all_of_them(device: str) -> None:
    weight = made("int4", 8, 96, 16, device)
    with pytest.raises(ValueError, match="make them wide"):
        dequantize(weight, torch.float32)
    experts = QuantWeight("int4", weight.codes[None], weight.scales[None], weight.group, weight.piece)
    routes = route(torch.zeros(2, 1, device=device), 1, True)
    with pytest.raises(ValueError, match="make them wide"):
        expert_linear(torch.zeros(2, 96, device=device), experts, routes)


def test_joined_matrices_are_below_each_other() -> None:
    def both(first: QuantWeight, second: QuantWeight) -> tuple[Tensor, Tensor]:
        wide = torch.cat([first.dequantized(torch.float32), second.dequantized(torch.float32)])
        return joined([first, second]).dequantized(torch.float32), wide

    assert torch.equal(*both(made("int4z", 16, 64, 32), made("int4z", 8, 64, 32)))
    assert torch.equal(*both(made("fp8", 32, 64, 32, span=16), made("fp8", 16, 64, 32, span=16)))
    # The first matrix ends in the midst of a block.
    assert torch.equal(*both(made("fp8", 24, 64, 32, span=16), made("fp8", 16, 64, 32, span=16)))
    assert joined([dataclasses.replace(made("fp8", 8, 64, 0))] * 2).num_out == 16
