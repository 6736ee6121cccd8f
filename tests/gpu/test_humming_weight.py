"""Four-bit products of humming-kernels against those of dequantized matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_runs import PagedRun
from tiny_models import relative_error, run_one, save_tiny, token_ids

from kernels.quant_weight import QuantWeight, packed, piece_of
from outrider.layers.humming_weight import humming_weight
from outrider.layers.linear import Linear
from outrider.models.loader import load_decoder
from outrider_tools.quantize import quantize

pytestmark = pytest.mark.gpu
pytest.importorskip("humming", reason="needs humming-kernels")


def matrix(num_out: int, size: int, group: int, zeros: bool = False) -> QuantWeight:
    """int4 with random codes and scales; those of two bytes, as checkpoints have them."""
    generator = torch.Generator("cuda").manual_seed(num_out + group)
    codes = torch.randint(16, (num_out, size), dtype=torch.uint8, device="cuda", generator=generator)
    shape = (size // group, num_out)
    scales = (torch.rand(shape, device="cuda", generator=generator) + 0.5).bfloat16() / 64
    found = torch.randint(16, shape, dtype=torch.uint8, device="cuda", generator=generator) if zeros else None
    piece = piece_of("int4", size, group)
    return QuantWeight("int4", packed(codes, "int4", piece), scales, group, piece, zeros=found)


def fp8_matrix(num_out: int, size: int) -> QuantWeight:
    """The same in fp8, with a scale for each block."""
    codes = torch.randn(num_out, size, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(size // 128, num_out // 128, device="cuda") + 0.5) / 64
    return QuantWeight("fp8", packed(codes, "fp8", 128), scales, 128, 128, 128)


def check(weight: QuantWeight, bias: torch.Tensor | None) -> None:
    """Products of few and many rows are those of the dequantized matrix."""
    product = humming_weight(weight, bias, torch.bfloat16)
    assert product is not None
    wide = weight.dequantized(torch.float64)
    for count in (1, 7, 8, 9, 33, 64, 200, 1500):
        rows = torch.randn(count, weight.size, device="cuda").bfloat16()
        expected = rows.double() @ wide.T + (0.0 if bias is None else bias.double())
        found = product(rows)
        assert found.shape == expected.shape and found.dtype == torch.bfloat16
        # Results are rounded to bfloat16.
        assert relative_error(found, expected) < 0.01, count


@pytest.mark.parametrize(("group", "zeros"), [(0, False), (32, True), (128, False)])
def test_int4_products_are_those_of_the_dequantized_matrix(group: int, zeros: bool) -> None:
    bias = torch.randn(256, device="cuda").bfloat16() if zeros else None
    check(matrix(256, 384, group or 384, zeros), bias)


def test_fp8_products_are_those_of_the_dequantized_matrix() -> None:
    check(fp8_matrix(256, 384), torch.randn(256, device="cuda").bfloat16())


def test_a_captured_product_reads_its_rows_anew() -> None:
    product = humming_weight(matrix(256, 384, 128), None, torch.bfloat16)
    assert product is not None
    rows = torch.randn(5, 384, device="cuda").bfloat16()
    product(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(rows)
    for _ in range(3):
        rows.copy_(torch.randn(5, 384, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, product(rows))


def test_a_product_in_float32_is_the_library_s_too() -> None:
    linear = Linear(384, 256, False, torch.bfloat16, torch.device("cuda"))
    linear.library = humming_weight(matrix(256, 384, 128), None, torch.bfloat16)
    rows = torch.randn(5, 384, device="cuda").bfloat16()
    assert torch.equal(linear.to_float32(rows), linear(rows).float())


@pytest.mark.parametrize(("num_out", "size", "group"), [(64, 384, 128), (256, 320, 32), (256, 384, 192)])
def test_what_it_does_not_take_is_left_to_ours(num_out: int, size: int, group: int) -> None:
    assert humming_weight(matrix(num_out, size, group), None, torch.bfloat16) is None


@pytest.mark.parametrize("name", ["int4", "fp8-block"])
def test_a_decoder_is_near_its_dequantized_matrices(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", hidden_size=128, intermediate_size=384, head_dim=32)
    folder = tmp_path / name
    quantize(tmp_path / "source", folder, name, 32, torch.device("cuda"), 1 << 30, lambda *_: None)
    wide, model = load_decoder(folder), load_decoder(folder, torch.bfloat16, "cuda")
    mlp = model.layers[0].mlp
    assert mlp.gate_up.library is not None and mlp.down.linear.library is not None
    ids = token_ids(40)
    expected = run_one(wide, wide.new_kv(40), ids, torch.arange(40)).cuda()
    run, ids = PagedRun(model), ids.cuda()
    assert relative_error(run.prompt(ids[:10], 0), expected[:10]) <= 0.12
    assert relative_error(run.prompt(ids[10:11], 10), expected[10:11]) <= 0.12
    own = load_decoder(folder, torch.bfloat16, "cuda", own_products=True)
    assert all(layer.mlp.gate_up.library is None for layer in own.layers)
