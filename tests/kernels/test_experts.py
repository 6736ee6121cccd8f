"""Products of a mixture of experts against their reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.expert_tiles import SWIGLU, Gating, Routes, max_tiles, tile_of
from kernels.experts import combine, expert_linear, gate, in_tiles, route
from kernels.quant_weight import QuantWeight
from kernels.reference import experts as reference
from outrider.layers.formats import decode, weight_tensors
from outrider.models.quantization import Scheme

GPT_OSS = Gating(1.702, 7.0, 1.0)
# The interpreter does not multiply bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def random_logits(num_tokens: int, num_experts: int, device: str) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(3)).to(device)


def routed(num_tokens: int, num_experts: int, num_active: int, device: str, padding: int = 0) -> Routes:
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    slots[num_tokens - padding :] = -1
    return route(random_logits(num_tokens, num_experts, device), num_active, True, slots)


def check_places(routes: Routes) -> None:
    """Every pair stands once, in a tile of its expert."""
    tile_experts, flat = routes.tile_experts.cpu(), routes.experts.cpu().flatten()
    places = routes.places.cpu().view(-1, routes.tile)
    assert sorted(places[tile_experts >= 0][places[tile_experts >= 0] >= 0].tolist()) == (
        (flat >= 0).nonzero().flatten().tolist()
    )
    for expert, row in zip(tile_experts.tolist(), places, strict=True):
        if expert >= 0:
            assert all(flat[pair] == expert for pair in row.tolist() if pair >= 0)
    used = tile_experts[tile_experts >= 0]
    assert routes.num_places.tolist() == [len(used) * routes.tile]
    assert len(used) == sum(-(-count // routes.tile) for count in flat[flat >= 0].bincount().tolist())
    assert len(routes.experts) == 1 or torch.equal(tile_experts[: len(used)], used.sort().values)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), [(1, 8, 2), (5, 60, 4), (9, 128, 8), (3, 4, 4)])
def test_routes_are_the_largest_logits(
    device: str, num_tokens: int, num_experts: int, num_active: int, normed: bool
) -> None:
    logits = random_logits(num_tokens, num_experts, device)
    logits[0, :3] = logits[0].max() + 1  # equal ones: the lower number is first
    routes = route(logits, num_active, normed)
    expected = reference.route(logits, num_active, normed, None, 0)
    assert torch.equal(routes.experts, expected.experts)
    torch.testing.assert_close(routes.weights, expected.weights)
    check_places(routes)


def test_routes_of_many_tokens_take_tiles_of_their_experts(device: str) -> None:
    routes = routed(300, 7, 3, device, padding=5)
    assert routes.tile == tile_of(300, 3, 7) == 128
    assert len(routes.tile_experts) == max_tiles(300, 3, 7, 128)
    assert bool((routes.experts[-5:] == -1).all())
    check_places(routes)


def test_routes_are_laid_out_in_tiles_of_a_size_that_is_asked_for(device: str) -> None:
    logits = random_logits(20, 6, device)
    slots = torch.arange(20, dtype=torch.int32, device=device) - 2
    routes = route(logits, 2, True, slots, 8)
    check_places(routes)
    again = in_tiles(routes, 6, 24)
    check_places(again)
    assert (routes.tile, again.tile) == (8, 24)
    check_places(route(logits[:1], 2, True, None, 24))


def test_a_lone_token_of_padding_takes_no_places(device: str) -> None:
    slots = torch.full((1,), -1, dtype=torch.int32, device=device)
    assert route(random_logits(1, 6, device), 2, True, slots).num_places.tolist() == [0]


@pytest.mark.parametrize("gating", [SWIGLU, GPT_OSS])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_gating_of_its_own_is_the_products(device: str, gating: Gating, interleaved: bool) -> None:
    gate_up = (torch.randn(7, 2 * 96, device=device) * 5).to(HALF)
    expected = reference.gate(gate_up.float(), gating, interleaved).to(HALF)
    torch.testing.assert_close(gate(gate_up, gating, interleaved), expected)


def test_what_is_no_number_still_names_experts(device: str) -> None:
    logits = random_logits(2, 6, device)
    logits[0] = float("nan")
    logits[1, :5] = float("-inf")
    routes = route(logits, 3, False)
    assert routes.experts.tolist() == [[0, 1, 2], [5, 0, 1]]
    check_places(routes)


CASES = {
    "plain": (False, None, False),
    "gated": (False, SWIGLU, False),
    "gpt-oss": (True, GPT_OSS, True),
    "bias": (True, None, False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_active", "num_out", "size"), [(1, 4, 2, 40, 96), (9, 12, 4, 96, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_products_are_the_references(
    device: str, case: str, num_tokens: int, num_experts: int, num_active: int, num_out: int, size: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    has_bias, gating, interleaved = CASES[case]
    routes = routed(num_tokens, num_experts, num_active, device, padding=num_tokens // 5)
    height = num_out * (2 if gating else 1)
    weight = (torch.randn(num_experts, height, size, device=device) * size**-0.5 * 3).to(dtype)
    bias = torch.randn(num_experts, height, device=device).to(dtype) if has_bias else None
    real = routes.experts.flatten() >= 0
    for count in (num_tokens, num_tokens * num_active):
        rows = torch.randn(count, size, device=device).to(dtype)
        result = expert_linear(rows, weight, routes, bias=bias, gating=gating, interleaved=interleaved)
        wide_bias = None if bias is None else bias.float()
        expected = reference.expert_linear(rows.float(), weight.float(), routes, wide_bias, gating, interleaved)
        # Sums and gates are float32; what is written is rounded once.
        rtol = torch.finfo(dtype).eps / 2 if dtype == HALF else 1e-4
        torch.testing.assert_close(result[real].float(), expected[real], rtol=rtol, atol=1e-4)


def quantized(scheme: Scheme, count: int, num_out: int, size: int, device: str) -> QuantWeight:
    """Random experts in a layout of checkpoints."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        stored = weight_tensors(scheme, num_out, size, torch.device("cpu"))
        for name, tensor in stored.items():
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif tensor.dtype == torch.float32:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2 + 0.1)
            elif name in ("scales", "weight_scale"):
                tensor.copy_(torch.randint(118, 124, tensor.shape, generator=generator))
            else:
                high = 256 if tensor.dtype == torch.uint8 else 2**31 - 1
                tensor.copy_(torch.randint(0, high, tensor.shape, generator=generator))
        made.append(decode(scheme, stored))
    parts = {name: [getattr(one, name) for one in made] for name in ("codes", "scales", "zeros")}
    if any(zeros is None for zeros in parts["zeros"]):
        # Those of eight everywhere say none.
        eight = torch.full_like(parts["scales"][0], 8, dtype=torch.uint8)
        given = any(zeros is not None for zeros in parts["zeros"])
        parts["zeros"] = [eight if zeros is None else zeros for zeros in parts["zeros"]] if given else []
    together = {name: torch.stack(tensors).to(device) if tensors else None for name, tensors in parts.items()}
    return replace(made[0], **together)


SCHEMES = {
    "fp8 channel": Scheme("fp8", "fp8"),
    "fp8 block": Scheme("fp8-inverse", "fp8", 128, 128),
    "mxfp4": Scheme("mxfp4-blocks", "mxfp4", 32),
    "awq": Scheme("awq", "int4", 128, symmetric=False),
    "int4 g32": Scheme("packed", "int4", 32, symmetric=False),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("gating", [None, GPT_OSS])
def test_quantized_experts_are_their_dequantized_ones(device: str, name: str, gating: Gating | None) -> None:
    size, num_out = 256, 48
    routes = routed(9, 5, 2, device, padding=1)
    weight = quantized(SCHEMES[name], 5, num_out * (2 if gating else 1), size, device)
    rows = (torch.randn(9, size, device=device) * 0.1).to(HALF)
    result = expert_linear(rows, weight, routes, gating=gating, interleaved=gating is not None)
    wide = torch.stack([weight.of_expert(expert).dequantized(torch.float32) for expert in range(5)])
    expected = reference.expert_linear(rows.float(), wide, routes, None, gating, gating is not None)
    real = routes.experts.flatten() >= 0
    torch.testing.assert_close(result[real].float(), expected[real], rtol=2e-2, atol=2e-2 * float(expected.std()))


def test_a_layer_is_a_loop_over_its_tokens(device: str) -> None:
    """Route, gate and up, down and sum, against the plainest computation there is; padding adds nothing."""
    num_tokens, num_experts, num_active, hidden, inner = 7, 5, 2, 32, 48
    logits = random_logits(num_tokens, num_experts, device)
    slots = torch.tensor([0, 1, -1, 3, 4, 5, -1], dtype=torch.int32, device=device)
    rows, residual = torch.randn(2, num_tokens, hidden, device=device)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, device=device) * 0.2
    down = torch.randn(num_experts, hidden, inner, device=device) * 0.2
    routes = route(logits, num_active, True, slots)
    inside = expert_linear(rows, gate_up, routes, gating=SWIGLU)
    result = combine(expert_linear(inside, down, routes), routes, residual)
    expected = residual.clone()
    for token in range(num_tokens):
        if slots[token] < 0:
            continue
        values, experts = logits[token].topk(num_active)
        for weight, expert in zip(values.softmax(0), experts.tolist(), strict=True):
            gate, up = (gate_up[expert] @ rows[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_row_depends_on_itself_alone(device: str) -> None:
    num_tokens, num_experts, num_active, hidden, inner = 16, 6, 2, 32, 48
    logits = random_logits(num_tokens, num_experts, device)
    rows = torch.randn(num_tokens, hidden, device=device).to(HALF)
    weight = (torch.randn(num_experts, 2 * inner, hidden, device=device) * 0.2).to(HALF)
    down = (torch.randn(num_experts, hidden, inner, device=device) * 0.2).to(HALF)

    def layer(order: Tensor, slots: Tensor | None = None) -> Tensor:
        routes = route(logits[order].contiguous(), num_active, True, slots)
        inside = expert_linear(rows[order].contiguous(), weight, routes, gating=SWIGLU)
        return combine(expert_linear(inside, down, routes), routes, rows[order].contiguous())

    order = torch.arange(num_tokens, device=device)
    together = layer(order)
    assert torch.equal(layer(order.flip(0)).flip(0), together)
    slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
    slots[3] = 0
    assert torch.equal(layer(order, slots)[3], together[3])


def test_what_does_not_fit_is_refused() -> None:
    logits = random_logits(3, 4, "cpu")
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route(logits, 5, True)
    with pytest.raises(ValueError, match="float32"):
        route(logits.bfloat16(), 2, True)
    with pytest.raises(ValueError, match="slots"):
        route(logits, 2, True, torch.zeros(2, dtype=torch.int32))
    routes, weight = route(logits, 2, True), torch.zeros(4, 6, 8)
    with pytest.raises(ValueError, match="4 rows for 3 tokens"):
        expert_linear(torch.zeros(4, 8), weight, routes)
    with pytest.raises(ValueError, match="product of"):
        expert_linear(torch.zeros(3, 7), weight, routes)
    with pytest.raises(ValueError, match="a bias of"):
        expert_linear(torch.zeros(3, 8), weight, routes, bias=torch.zeros(4, 5))
    with pytest.raises(ValueError, match="halved"):
        expert_linear(torch.zeros(3, 8), torch.zeros(4, 5, 8), routes, gating=SWIGLU)
    with pytest.raises(ValueError, match="contiguous"):
        expert_linear(torch.zeros(3, 8), weight.transpose(1, 2).contiguous().transpose(1, 2), routes)
    with pytest.raises(ValueError, match="pairs"):
        combine(torch.zeros(5, 8), routes, torch.zeros(3, 8))
