"""Products of experts by humming-kernels against those of dequantized matrices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tiny_models import relative_error, save_tiny

from kernels.expert_tiles import Gating
from kernels.experts import gate, route
from kernels.quant_weight import QuantWeight, packed, piece_of
from kernels.reference.experts import expert_linear as reference
from outrider.attention.base import AttentionPlan
from outrider.layers.experts import ExpertMlp
from outrider.layers.humming_weight import humming_experts
from outrider.models.loader import load_decoder
from outrider_tools.quantize import quantize

pytestmark = pytest.mark.gpu
pytest.importorskip("humming", reason="needs humming-kernels")
EXPERTS, ACTIVE = 12, 3
GROUPS = {"int4": 128, "mxfp4": 32}


def matrices(name: str, num_out: int, size: int) -> QuantWeight:
    """Random codes and scales of all experts; scales are numbers of two bytes, as checkpoints have them."""
    group = GROUPS[name]
    scales = (torch.rand(EXPERTS, size // group, num_out, device="cuda") + 0.5) / 64
    scales = (scales.log2().round().exp2() if name == "mxfp4" else scales).bfloat16()
    codes = torch.randint(16, (EXPERTS, num_out, size), dtype=torch.uint8, device="cuda")
    piece = piece_of(name, size, group)
    return QuantWeight(name, packed(codes, name, piece), scales, group, piece)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("num_out", [256, 320])
def test_products_are_those_of_the_dequantized_matrices(name: str, num_out: int) -> None:
    weight = matrices(name, num_out, 384)
    bias = torch.randn(EXPERTS, num_out, device="cuda").bfloat16()
    product = humming_experts(weight, bias, torch.bfloat16)
    assert product is not None
    wide = weight.dequantized(torch.float32)
    for count in (1, 2, 9, 64, 700):
        slots = torch.arange(count, dtype=torch.int32, device="cuda")
        slots[count - count // 5 :] = -1
        # Tiles of our own products are laid out anew.
        for tile in (0, product.tile(count * ACTIVE)):
            routes = route(torch.randn(count, EXPERTS, device="cuda"), ACTIVE, True, slots, tile)
            real = routes.experts.flatten() >= 0
            for num_rows in (count, count * ACTIVE):
                rows = torch.randn(num_rows, 384, device="cuda").bfloat16()
                expected = reference(rows.float(), wide, routes, bias.float(), None, False)
                found = product(rows, routes)
                assert found.shape == expected.shape and found.dtype == torch.bfloat16
                assert relative_error(found[real], expected[real]) < 0.01, (count, tile, num_rows)


def test_a_captured_product_finds_its_experts_anew() -> None:
    gate_up = humming_experts(matrices("int4", 256, 384), None, torch.bfloat16)
    assert gate_up is not None
    rows = torch.randn(5, 384, device="cuda").bfloat16()
    logits = torch.randn(5, EXPERTS, device="cuda")

    def gated() -> torch.Tensor:
        routes = route(logits, ACTIVE, True, None, gate_up.tile(5 * ACTIVE))
        return gate(gate_up(rows, routes), Gating(1.702, 7.0, 1.0), True)

    gated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated()
    for _ in range(3):
        rows.copy_(torch.randn(5, 384, device="cuda"))
        logits.copy_(torch.randn(5, EXPERTS, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, gated())


def test_a_mixture_is_near_the_one_by_our_products(tmp_path: Path) -> None:
    changes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    save_tiny(tmp_path / "source", "Qwen3Moe", hidden_size=128, head_dim=32, **changes)
    folder = tmp_path / "int4"
    quantize(tmp_path / "source", folder, "int4", 32, torch.device("cuda"), 1 << 30, lambda *_: None)
    model = load_decoder(folder, torch.bfloat16, "cuda")
    own = load_decoder(folder, torch.bfloat16, "cuda", own_products=True)
    mixture, own_mixture = model.layers[0].mlp, own.layers[0].mlp
    assert isinstance(mixture, ExpertMlp) and isinstance(own_mixture, ExpertMlp)
    assert mixture.gate_up.library is not None and mixture.down.library is not None
    assert own_mixture.gate_up.library is None and own_mixture.down.library is None
    plan = cast(AttentionPlan, SimpleNamespace(token_slots=None))
    for count in (1, 7, 300):
        stream = torch.randn(count, 128, device="cuda").bfloat16()
        assert relative_error(mixture(stream, None, plan), own_mixture(stream, None, plan)) <= 0.02
