"""Norm, activation and rotary positions against plain torch."""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, example, settings
from hypothesis import given as given_any
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from kernels.elementwise import (
    add_rms_norm,
    gate_mul,
    norm_pairs,
    recur,
    rms_norm,
    rope_write,
    rotary_angles,
    write_keys,
)
from kernels.reference import elementwise as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 72), (2, 600)])
def test_rms_norm_is_in_float32_rounded_once(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = (3 * torch.randn(num_rows, size, generator=generator)).to(dtype)
    weight = (1 + torch.randn(size, generator=generator)).to(dtype)
    wide = rows.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = rms_norm(rows.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(result.cpu(), expected.to(dtype))


def test_rows_that_are_columns_of_a_wider_matrix_are_normed(device: str) -> None:
    """As queries and keys of a fused product are, where a norm goes over all heads."""
    wide, weight = torch.randn(3, 112).to(device), torch.randn(72).to(device)
    rows = wide[:, 40:]
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), functional.rms_norm(rows, (72,), weight, 1e-5))


def test_without_triton_the_norm_is_the_same() -> None:
    rows, weight = torch.randn(3, 40), torch.randn(40)
    expected = torch.nn.functional.rms_norm(rows, (40,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), expected)


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.ones(2, 8), torch.ones(9), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 72), (2, 600)])
def test_embeddings_and_a_stream_are_normed_side_by_side(
    device: str, dtype: torch.dtype, ids: torch.dtype, num_rows: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    table, stream = (3 * torch.randn(count, size, generator=generator) for count in (7, num_rows))
    table, stream = table.to(device, dtype), stream.to(device, dtype)
    first, second = (1 + torch.randn(2, size, generator=generator)).to(device, dtype)
    tokens = torch.tensor([6, 0, 3], dtype=ids, device=device)[:num_rows]
    found = norm_pairs(table, tokens, first, stream, second, 1e-5)
    torch.testing.assert_close(found[:, :size], rms_norm(table[tokens.long()], first, 1e-5), rtol=0, atol=0)
    torch.testing.assert_close(found[:, size:], rms_norm(stream, second, 1e-5), rtol=0, atol=0)


def test_pairs_of_other_sizes_are_refused() -> None:
    table, weight = torch.ones(4, 8), torch.ones(8)
    for stream in (torch.ones(2, 9), torch.ones(3, 8)):
        with pytest.raises(ValueError, match="norm_pairs of"):
            norm_pairs(table, torch.zeros(2, dtype=torch.int32), weight, stream, weight, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 72), (2, 600)])
def test_a_sum_is_rounded_once_and_then_normed(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    stream, part = (3 * torch.randn(2, num_rows, size, generator=generator)).to(dtype)
    weight = (1 + torch.randn(size, generator=generator)).to(dtype)
    total, normed = add_rms_norm(stream.to(device), part.to(device), weight.to(device), 1e-5)
    expected = (stream.double() + part.double()).to(dtype)
    torch.testing.assert_close(total.cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(normed.cpu(), rms_norm(expected, weight, 1e-5))
    with pytest.raises(ValueError, match="plus"):
        add_rms_norm(stream.to(device), part[:, 1:].to(device), weight.to(device), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [576, 4096, 5120, 8192])
def test_norms_of_real_sizes(size: int) -> None:
    rows = torch.randn(33, size, device="cuda").bfloat16()
    weight = torch.randn(size, device="cuda").bfloat16()
    wide = rows.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), expected.bfloat16())


def expected_of(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 32), (3, 1030)])
def test_silu_mul_is_silu_times_up_rounded_once(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = (4 * torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)
    torch.testing.assert_close(gate_mul(gate_up.to(device)).cpu(), expected_of(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; exp(200) is infinity
def test_large_gates_do_not_overflow(device: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 0.0, 3.0, 3.0, 3.0, 3.0]], device=device)
    torch.testing.assert_close(gate_mul(gate_up).cpu(), torch.tensor([[0.0, 3e4, 0.0, 0.0]]))


def test_without_triton_the_activation_is_the_same() -> None:
    gate_up = torch.randn(2, 20)
    torch.testing.assert_close(gate_mul(gate_up), expected_of(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [6, 700])
def test_a_cell_keeps_some_of_its_memory(device: str, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    joint = (3 * torch.randn(3, 3 * size, generator=generator)).to(dtype)
    memory = torch.randn(3, size + 5, generator=generator).to(dtype)[:, :size]
    keep, fresh, output = joint.double().chunk(3, 1)
    expected = keep.sigmoid() * memory.double() + (1 - keep.sigmoid()) * fresh.tanh()
    for found in (recur(joint.to(device), memory.to(device)), reference.recur(joint, memory)):
        torch.testing.assert_close(found[0].cpu(), output.tanh().to(dtype), **near(dtype))
        torch.testing.assert_close(found[1].cpu(), expected.to(dtype), **near(dtype))
    with pytest.raises(ValueError, match="a cell"):
        recur(joint, memory[:, 1:])


def test_odd_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="gate_mul"):
        gate_mul(torch.ones(2, 5))


@pytest.mark.gpu
def test_activation_of_real_size() -> None:
    gate_up = torch.randn(64, 2 * 14336, device="cuda").bfloat16()
    torch.testing.assert_close(gate_mul(gate_up), expected_of(gate_up))


SHAPES = [(4, 2, 16), (9, 3, 64), (5, 1, 32)]


def near(dtype: torch.dtype) -> dict[str, float]:
    """Both compute in float32 and round once: at most one step of the dtype apart."""
    step = torch.finfo(dtype).eps
    return {"rtol": 2 * step, "atol": 4 * step}


def rotated_exactly(heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Heads [M, H, D] normed and rotated in float64, and how far from that a computation in float32 may be.

    The bound counts roundings, each of at most 2^-24 of what is rounded. The norm: squares, a sum whose lanes (eight or
    more) add D / 8 squares and then each other in pairs, and eps, all that halved by the root; the root itself, which
    devices compute to 2^-22.9, 2.2 roundings; two products. The rotation: products and their sum, which may nearly
    cancel, so what is rounded is as large as the products. Last, a rounding to two bytes, of a whole step, since the
    interpreter cuts numbers off.
    """
    wide, roundings = heads.double(), 2.0
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.double()
        roundings += (1 + heads.shape[-1] / 8 + 3 + 1) / 2 + 2.2 + 2
    low, high = wide.chunk(2, -1)
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    exact = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    products = torch.cat([(low * cos).abs() + (high * sin).abs(), (high * cos).abs() + (low * sin).abs()], -1)
    bound = roundings * 2.0**-24 * products
    if heads.dtype != torch.float32:
        kind = torch.finfo(heads.dtype)
        bound += kind.eps * ((exact.abs() + bound).clamp(min=kind.smallest_normal))
    return exact, bound


def assert_within(found: Tensor, exact: Tensor, bound: Tensor) -> None:
    worst = ((found.double() - exact).abs() / bound).max() if found.numel() else torch.zeros(())
    assert worst <= 1, f"{float(worst):.2f} times as far off as roundings take it"


def assert_written(cache: Tensor, before: Tensor, slots: Tensor, exact: Tensor, bound: Tensor) -> None:
    """A cache [S, KVH, D] holds these rows in their slots, and elsewhere what it held."""
    written = slots >= 0
    places = slots[written].long()
    assert_within(cache[places], exact[written], bound[written])
    untouched = torch.ones(cache.shape[0], dtype=torch.bool, device=cache.device).index_fill(0, places, False)
    assert torch.equal(cache[untouched], before[untouched])


def inputs(shape: tuple[int, int, int], count: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    num_heads, kv_heads, dim = shape
    torch.manual_seed(count)
    positions = torch.randint(0, 5000, (count,), dtype=torch.int32, device=device)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    slots = torch.randperm(3 * count)[:count].to(torch.int32).to(device)
    slots[-1] = -1
    heads = torch.randn(count, num_heads + 2 * kv_heads, dim, device=device).to(dtype)
    norm = torch.randn(num_heads + kv_heads, dim, device=device).to(dtype)
    return {"positions": positions, "inv_freq": inv_freq, "slots": slots, "heads": heads, "norm": norm}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_write_equals_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, normed: bool, device: str, count: int = 5
) -> None:
    num_heads, kv_heads, dim = shape
    given = inputs(shape, count, dtype, device)
    norm = given["norm"] if normed else None
    cos, sin = reference.rotary_angles(given["positions"], given["inv_freq"], 1.3)
    before = [torch.randn(3 * count, kv_heads, dim, device=device).to(dtype) for _ in range(2)]
    caches, expected = ([cache.clone() for cache in before] for _ in range(2))
    expected_q = torch.empty(count, num_heads, dim, dtype=dtype, device=device)
    reference.rope_write(given["heads"], cos, sin, given["slots"], *expected, norm, 1e-5, expected_q)
    q = rope_write(given["heads"], cos, sin, given["slots"], *caches, num_heads, norm, 1e-5)
    exact, bound = rotated_exactly(given["heads"][:, : num_heads + kv_heads], cos, sin, norm, 1e-5)
    for queries, keys in ((q, caches[0]), (expected_q, expected[0])):
        assert_within(queries, exact[:, :num_heads], bound[:, :num_heads])
        assert_written(keys, before[0], given["slots"], exact[:, num_heads:], bound[:, num_heads:])
    assert torch.equal(caches[1], expected[1])


@given_any(
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 9),
    dim=st.sampled_from([16, 64]),
    count=st.integers(1, 5),
    normed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(layers=3, kv_heads=4, dim=64, count=4, normed=True, dtype=torch.float32)  # large numbers
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_of_all_layers_are_those_of_each(
    layers: int, kv_heads: int, dim: int, count: int, normed: bool, dtype: torch.dtype, device: str
) -> None:
    given = inputs((0, kv_heads, dim), count, dtype, device)
    heads = torch.randn(count, layers, 2 * kv_heads, dim, device=device).to(dtype)
    norm = torch.randn(layers, kv_heads, dim, device=device).to(dtype) if normed else None
    cos, sin = reference.rotary_angles(given["positions"], given["inv_freq"], 1.3)
    before = [torch.randn(layers, 3 * count, kv_heads, dim, device=device).to(dtype) for _ in range(2)]
    found, expected = ([cache.clone() for cache in before] for _ in range(2))
    write_keys(heads, cos, sin, given["slots"], *found, norm, 1e-5)
    for layer in range(layers):
        caches = [cache[layer] for cache in expected]
        no_q = torch.empty(count, 0, dim, dtype=dtype, device=device)
        weight = None if norm is None else norm[layer]
        reference.rope_write(heads[:, layer], cos, sin, given["slots"], *caches, weight, 1e-5, no_q)
        exact, bound = rotated_exactly(heads[:, layer, :kv_heads], cos, sin, weight, 1e-5)
        for keys in (found[0][layer], caches[0]):
            assert_written(keys, before[0][layer], given["slots"], exact, bound)
    assert torch.equal(found[1], expected[1])


def test_caches_of_eight_bits_get_the_nearest_numbers(device: str) -> None:
    num_heads, kv_heads, dim = SHAPES[0]
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    given = inputs(SHAPES[0], 5, dtype, device)
    # Numbers that need no rounding, which the interpreter gets wrong, or are too large.
    given["heads"] = given["heads"].to(torch.float8_e4m3fn).to(dtype)
    given["heads"][0] *= 512
    cos, sin = reference.rotary_angles(torch.zeros_like(given["positions"]), given["inv_freq"], 1.0)
    expected = [torch.zeros(15, kv_heads, dim, device=device, dtype=torch.float8_e4m3fn) for _ in range(2)]
    found = [cache.clone() for cache in expected]
    q = torch.empty(5, num_heads, dim, dtype=dtype, device=device)
    reference.rope_write(given["heads"], cos, sin, given["slots"], *expected, None, 0.0, q)
    rope_write(given["heads"], cos, sin, given["slots"], *found, num_heads)
    for mine, other in zip(found, expected, strict=True):
        assert other.float().abs().max() == 448
        assert torch.equal(mine.float(), other.float())


def test_padding_writes_nothing(device: str) -> None:
    given = inputs(SHAPES[0], 3, torch.float32, device)
    given["slots"].fill_(-1)
    cos, sin = reference.rotary_angles(given["positions"], given["inv_freq"], 1.0)
    caches = [torch.full((4, 2, 16), 7.0, device=device) for _ in range(2)]
    rope_write(given["heads"], cos, sin, given["slots"], *caches, 4)
    assert all(bool((cache == 7.0).all()) for cache in caches)


def test_angles_of_far_positions(device: str) -> None:
    positions = torch.tensor([0, 1, 31, 4097, 131071], dtype=torch.int32, device=device)
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, 24, dtype=torch.float32, device=device) / 24)
    cos, sin = rotary_angles(positions, inv_freq, 0.9)
    # The product is rounded to float32 in either case; what is made of it must be right to its last bits.
    angles = (positions.float().unsqueeze(1) * inv_freq).double()
    torch.testing.assert_close(cos.double(), angles.cos() * 0.9, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angles.sin() * 0.9, rtol=0, atol=2e-7)


def test_wrong_shapes_are_refused(device: str) -> None:
    given = inputs(SHAPES[0], 3, torch.float32, device)
    cos, sin = reference.rotary_angles(given["positions"], given["inv_freq"], 1.0)
    caches = [torch.zeros(9, 2, 16, device=device) for _ in range(2)]
    with pytest.raises(ValueError, match="query heads"):
        rope_write(given["heads"], cos, sin, given["slots"], *caches, 5)
    with pytest.raises(ValueError, match="norm weights"):
        rope_write(given["heads"], cos, sin, given["slots"], *caches, 4, given["norm"][:5])
    with pytest.raises(ValueError, match="2 layers for 1"):
        write_keys(torch.zeros(3, 2, 4, 16, device=device), cos, sin, given["slots"], *(one[None] for one in caches))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 8, 128), (40, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("count", [1, 64, 700])
def test_large_write(shape: tuple[int, int, int], count: int, device: str) -> None:
    test_write_equals_reference(shape, torch.bfloat16, True, device, count)
