"""Products over whole rows, with norm, gate, residual and rotation in the same launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear import norm_linear, norm_qkv
from kernels.linear_configs import (
    MAX_ROWS,
    MAX_SIZE,
    RowConfig,
    fits_qkv_kernel,
    fits_row_kernel,
    pieces,
    qkv_config,
    row_config,
    row_kernel_pays,
)
from kernels.reference import elementwise as rope_reference
from kernels.reference import linear as reference

# Triton's interpreter multiplies the bit patterns of bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SIZES = [16, 24, 64, 72, 112, 144]
EPS = 1e-5


def near(dtype: torch.dtype, steps: int = 4) -> dict[str, float]:
    """Values of up to a hundred, summed in another order; a normed row that rounds the other way is a step off."""
    step = torch.finfo(dtype).eps
    return {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": steps * step, "atol": steps * step}


def operands(num_rows: int, num_out: int, size: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Rows of very different sizes, as a residual stream has."""
    generator = torch.Generator().manual_seed(num_rows * num_out + size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = normal(num_rows, size) * torch.logspace(-2, 1, num_rows).unsqueeze(1)
    given = {
        "rows": rows, "weight": normal(num_out, size) / size**0.5, "norm": normal(size).abs() + 0.5,
        "bias": normal(num_out),
    }  # fmt: skip
    return {name: tensor.to(dtype).to(device) for name, tensor in given.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_a_product_with_all_around_it_equals_the_reference(
    size: int, dtype: torch.dtype, gated: bool, normed: bool, device: str
) -> None:
    num_rows, num_out = 5, 40
    given = operands(num_rows, num_out * (2 if gated else 1), size, dtype, device)
    rows, weight, norm = given["rows"], given["weight"], given["norm"] if normed else None
    residual = torch.randn(num_rows, num_out, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    for bias, added in ((None, None), (given["bias"], residual)):
        expected = reference.norm_linear(rows, weight, norm, EPS, bias, added, gated)
        result = norm_linear(rows, weight, norm=norm, eps=EPS, bias=bias, residual=added, gated=gated)
        torch.testing.assert_close(result, expected, **near(dtype, 16))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40, MAX_ROWS])
@pytest.mark.parametrize("config", [RowConfig(), RowConfig(tile=16, parts=4), RowConfig(tile=32, parts=2, block_m=64)])
def test_any_number_of_rows_and_any_cut(num_rows: int, config: RowConfig, device: str) -> None:
    given = operands(num_rows, 56, 40, torch.float32, device)
    bias = given.pop("bias")
    expected = reference.norm_linear(given["rows"], given["weight"], given["norm"], EPS, bias, None, False)
    result = norm_linear(**given, eps=EPS, bias=bias, config=config)
    torch.testing.assert_close(result, expected, **near(torch.float32, 16))


@pytest.mark.parametrize("size", [40, 64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_columns_may_be_cut_among_programs(size: int, dtype: torch.dtype, device: str) -> None:
    given = operands(20, 72, size, dtype, device)
    rows, weight, config = given["rows"], given["weight"], RowConfig(tile=32, cut=32)
    residual = torch.randn(20, 72, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    for bias, added in ((None, None), (given["bias"], residual)):
        expected = reference.norm_linear(rows, weight, None, EPS, bias, added, False)
        # Twice: what programs meet with has to be left as it was found.
        for _ in range(2):
            result = norm_linear(rows, weight, bias=bias, residual=added, config=config)
            torch.testing.assert_close(result, expected, **near(dtype, 16))


def test_a_row_depends_on_itself_alone(device: str) -> None:
    given = operands(32, 64, 72, HALF, device)
    together = norm_linear(given["rows"], given["weight"], norm=given["norm"], eps=EPS)
    moved = norm_linear(given["rows"].flip(0)[:19].contiguous(), given["weight"], norm=given["norm"], eps=EPS)
    assert torch.equal(moved, together.flip(0)[:19])


def heads(
    num_rows: int, shape: tuple[int, int, int], size: int, dtype: torch.dtype, device: str
) -> tuple[dict[str, Any], list[Tensor]]:
    """Operands of `norm_qkv` and two caches; the last token has no slot."""
    num_heads, kv_heads, dim = shape
    given = operands(num_rows, (num_heads + 2 * kv_heads) * dim, size, dtype, device)
    positions = torch.randint(0, 5000, (num_rows,), generator=torch.Generator().manual_seed(7)).to(device)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    given["cos"], given["sin"] = rope_reference.rotary_angles(positions, inv_freq, 1.3)
    slots = torch.randperm(3 * num_rows, generator=torch.Generator().manual_seed(8))[:num_rows].to(torch.int32)
    slots[-1] = -1
    given["slots"] = slots.to(device)
    given["qk_norm"] = (torch.rand(num_heads + kv_heads, dim) + 0.5).to(dtype).to(device)
    caches = [torch.randn(3 * num_rows, kv_heads, dim).to(dtype).to(device) for _ in range(2)]
    return given, caches


@pytest.mark.parametrize("shape", [(9, 3, 64), (3, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rotated_and_written_as_by_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, head_norm: bool, normed: bool, device: str
) -> None:
    check_heads(7, shape, 72, dtype, head_norm, normed, device)


def check_heads(
    num_rows: int, shape: tuple[int, int, int], size: int, dtype: torch.dtype, head_norm: bool, normed: bool,
    device: str,
) -> None:  # fmt: skip
    given, caches = heads(num_rows, shape, size, dtype, device)
    norm, qk_norm = given["norm"] if normed else None, given["qk_norm"] if head_norm else None
    where = [given[name] for name in ("rows", "weight", "cos", "sin", "slots")]
    for bias in (None, given["bias"]):
        expected = [cache.clone() for cache in caches]
        expected_q = torch.empty(num_rows, shape[0], shape[2], dtype=dtype, device=device)
        reference.norm_qkv(*where, *expected, norm, EPS, bias, qk_norm, EPS, expected_q)
        written = [cache.clone() for cache in caches]
        q = norm_qkv(*where, *written, shape[0], norm=norm, eps=EPS, bias=bias, qk_norm=qk_norm, qk_eps=EPS)
        for result, wanted in zip((q, *written), (expected_q, *expected), strict=True):
            torch.testing.assert_close(result, wanted, **near(dtype, 32))


def test_tokens_without_a_slot_write_nothing(device: str) -> None:
    given, caches = heads(3, (4, 2, 64), 48, torch.float32, device)
    given["slots"].fill_(-1)
    for cache in caches:
        cache.fill_(7.0)
    norm_qkv(*[given[name] for name in ("rows", "weight", "cos", "sin", "slots")], *caches, 4)
    assert all(bool((cache == 7.0).all()) for cache in caches)


@pytest.mark.parametrize("size", [16, 17, 31, 32, 576, 896, 960, 1024, 1536])
@pytest.mark.parametrize("wanted", [1, 4])
def test_pieces_hold_every_column(size: int, wanted: int) -> None:
    parts, first, rest = pieces(size, wanted)
    assert first <= size <= first + rest
    assert all(piece & (piece - 1) == 0 for piece in (first, rest))
    assert rest == 0 or (rest // parts >= 16 and size > first)
    assert 1 <= parts <= wanted and first // parts >= 16


def test_what_fits() -> None:
    assert fits_row_kernel(1, 16) and fits_row_kernel(MAX_ROWS, MAX_SIZE)
    assert (
        not fits_row_kernel(MAX_ROWS + 1, 576) and not fits_row_kernel(1, MAX_SIZE + 1) and not fits_row_kernel(0, 576)
    )
    assert (
        fits_qkv_kernel(32, 576, 64, True)
        and fits_qkv_kernel(32, 1024, 128, False)
        and fits_qkv_kernel(32, 576, 32, False)
    )
    assert not fits_qkv_kernel(32, 1024, 128, True) and not fits_qkv_kernel(32, MAX_SIZE + 1, 128, False)


@pytest.mark.parametrize("size", [64, 576, 640, 896, 1024, 1536])
def test_the_usual_cuts_fit_a_processor(size: int) -> None:
    assert row_config(MAX_ROWS, size, size, whole=True).holds(MAX_ROWS, size)
    assert qkv_config(size, 64, False).holds(MAX_ROWS, size)


def test_products_pay_where_they_were_measured_to() -> None:
    assert row_kernel_pays(64, 576, 576, whole=True) and row_kernel_pays(64, 3072, 576, whole=True, gated=True)
    assert row_kernel_pays(32, 576, 1536, whole=False) and row_kernel_pays(64, 1024, 3072, whole=False)
    assert not row_kernel_pays(32, 6144, 1024, whole=True, gated=True) and not row_kernel_pays(
        64, 4096, 1024, whole=True
    )
    assert row_kernel_pays(32, 4096, 1024, whole=True) and row_kernel_pays(8, 5120, 1024, whole=True, gated=True)
    assert not row_kernel_pays(1, 4096, 4096, whole=False) and not row_kernel_pays(1, 64, MAX_SIZE + 1, whole=True)


def test_more_programs_than_run_at_once_take_more_rows() -> None:
    assert row_config(32, 576, 1536, whole=False).block_m == 16
    assert row_config(32, 2048, 2048, whole=False).block_m == 32


def test_shapes_are_checked() -> None:
    rows, weight = torch.zeros(2, 32), torch.zeros(64, 32)
    with pytest.raises(ValueError, match="norm of"):
        norm_linear(rows, weight, norm=torch.zeros(31))
    with pytest.raises(ValueError, match="bias of"):
        norm_linear(rows, weight, bias=torch.zeros(32), gated=True)
    with pytest.raises(ValueError, match="residual is"):
        norm_linear(rows, weight, residual=torch.zeros(2, 32))
    with pytest.raises(ValueError, match="product of"):
        norm_linear(rows, weight.half())
    with pytest.raises(ValueError, match="1 to 64 of 16 to"):
        norm_linear(torch.zeros(65, 32), weight)
    wide = torch.zeros(2, MAX_SIZE + 16)
    with pytest.raises(ValueError, match=f"of 16 to {MAX_SIZE} columns"):
        norm_linear(wide, torch.zeros(64, MAX_SIZE + 16), gated=True)
    with pytest.raises(ValueError, match=f"of 16 to {MAX_SIZE} columns"):
        cache, angles = torch.zeros(4, 1, 16), torch.zeros(2, 8)
        norm_qkv(wide, torch.zeros(64, MAX_SIZE + 16), angles, angles, torch.zeros(2), cache, cache, 2)
    cache, angles, slots = torch.zeros(4, 1, 8), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="from 16 on"):
        norm_qkv(rows, weight, angles, angles, slots, cache, cache, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8, 32, 64])
@pytest.mark.parametrize("size", [576, 896, 960, 1024])
def test_real_shapes(size: int, num_rows: int, dtype: torch.dtype) -> None:
    given = operands(num_rows, 3072, size, dtype, "cuda")
    for gated in (False, True):
        residual = torch.randn(num_rows, 1536 if gated else 3072, device="cuda").to(dtype)
        expected = reference.norm_linear(given["rows"], given["weight"], given["norm"], EPS, None, residual, gated)
        result = norm_linear(
            given["rows"], given["weight"], norm=given["norm"], eps=EPS, residual=residual, gated=gated
        )
        torch.testing.assert_close(result, expected, **near(dtype, 8))
    check_heads(num_rows, (9, 3, 64), size, dtype, False, True, "cuda")
    check_heads(num_rows, (14, 2, 64), size, dtype, True, True, "cuda")


@pytest.mark.gpu
def test_a_chain_in_a_graph_sees_what_the_launch_before_wrote() -> None:
    """Each launch reads its weights before the one in front has ended, and its rows after."""
    layers = [operands(32, 576, 576, torch.bfloat16, "cuda") for _ in range(30)]
    start = torch.randn(32, 576, device="cuda").bfloat16()

    def chain() -> list[Tensor]:
        stages = [start]
        for layer in layers:
            rows = stages[-1]
            stages.append(norm_linear(rows, layer["weight"], norm=layer["norm"], eps=EPS, residual=rows))
        return stages

    first = chain()
    for index, layer in enumerate(layers):
        expected = reference.norm_linear(first[index], layer["weight"], layer["norm"], EPS, None, first[index], False)
        torch.testing.assert_close(first[index + 1], expected, **near(torch.bfloat16, 8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stages = chain()
    for _ in range(20):
        for stage in stages[1:]:
            stage.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, stages, first))
