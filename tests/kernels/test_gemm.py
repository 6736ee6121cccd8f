from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import stream_linear
from kernels.linear_configs import MAX_ROWS, GemmConfig, choose_config, tile_rows

SMALL = GemmConfig(block_n=32, block_k=32, stages=2)
CUTS = {
    "one program a tile": SMALL,
    "rows on the left": dataclasses.replace(SMALL, swap=False),
    "split": dataclasses.replace(SMALL, split_k=2),
    "split into more programs than steps": dataclasses.replace(SMALL, split_k=64),
    "split unevenly": dataclasses.replace(SMALL, split_k=3),
    "stretches that cross tiles": dataclasses.replace(SMALL, split_k=0),
    "fewer programs than tiles": dataclasses.replace(SMALL, block_n=16, split_k=0, swap=False),
    "copy engine": dataclasses.replace(SMALL, tma=True, split_k=2),
    "copy engine, rows on the left": dataclasses.replace(SMALL, tma=True, split_k=0, swap=False),
}


# Triton's interpreter multiplies the bit patterns of bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def operands(num_rows: int, num_out: int, size: int, device: str, dtype: torch.dtype = HALF) -> Any:
    generator = torch.Generator().manual_seed(num_rows * num_out + size)
    rows = torch.randn(num_rows, size, generator=generator)
    weight = torch.randn(num_out, size, generator=generator) / size**0.5
    return rows.to(dtype).to(device), weight.to(dtype).to(device)


def exact(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.double() @ weight.double().T


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("num_rows", "num_out", "size"), [(1, 64, 128), (5, 96, 160), (17, 64, 96), (3, 40, 64), (2, 64, 72), (4, 20, 24)]
)
def test_every_cut_is_the_product(device: str, cut: str, num_rows: int, num_out: int, size: int) -> None:
    rows, weight = operands(num_rows, num_out, size, device)
    result = stream_linear(rows, weight, out_dtype=torch.float32, config=CUTS[cut])
    torch.testing.assert_close(result.double(), exact(rows, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("gated", [False, True])
def test_every_cut_does_all_that_stands_around_a_product(device: str, cut: str, gated: bool) -> None:
    num_rows, num_out, size = 5, 48, 96
    rows, weight = operands(num_rows, num_out * (2 if gated else 1), size, device)
    bias, residual = torch.randn(weight.shape[0], device=device), torch.randn(num_rows, num_out, device=device)
    expected = exact(rows, weight) + bias.double()
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = functional.silu(gate) * up
    expected += residual.double()
    result = stream_linear(
        rows, weight, bias=bias, residual=residual, gated=gated, out_dtype=torch.float32, config=CUTS[cut]
    )
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_other_dtypes_with_the_chosen_config(device: str, dtype: torch.dtype) -> None:
    rows, weight = operands(6, 80, 96, device, dtype)
    result = stream_linear(rows, weight)
    assert result.dtype == dtype
    torch.testing.assert_close(result, exact(rows, weight).to(dtype), rtol=1e-2 if dtype == HALF else 1e-3, atol=1e-3)


@pytest.mark.parametrize("cut", CUTS)
def test_a_row_depends_on_itself_alone(device: str, cut: str) -> None:
    rows, weight = operands(16, 64, 96, device)
    together = stream_linear(rows, weight, config=CUTS[cut])
    for index in (0, 3, 15):
        alone = stream_linear(rows[index : index + 1].contiguous(), weight, config=CUTS[cut])
        assert torch.equal(alone[0], together[index])
    moved = stream_linear(rows.flip(0).contiguous()[:9], weight, config=CUTS[cut])
    assert torch.equal(moved, together.flip(0)[:9])


def test_the_residual_may_be_the_output_and_scratch_is_left_clean(device: str) -> None:
    rows, weight = operands(3, 64, 128, device)
    config = CUTS["split"]
    residual = torch.randn(3, 64, device=device).to(HALF)
    expected = stream_linear(rows, weight, residual=residual, config=config)
    for _ in range(3):
        total = residual.clone()
        assert stream_linear(rows, weight, residual=total, out=total, config=config) is total
        assert torch.equal(total, expected)


@pytest.mark.parametrize("gated", [False, True])
def test_without_triton_it_is_the_same(gated: bool) -> None:
    rows, weight = operands(3, 32, 48, "cpu")
    residual = torch.randn(3, 16 if gated else 32)
    expected = exact(rows, weight)
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = functional.silu(gate) * up
    result = stream_linear(rows, weight, residual=residual, gated=gated, out_dtype=torch.float32)
    torch.testing.assert_close(result.double(), expected + residual.double(), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    rows, weight = operands(3, 32, 48, "cpu")
    with pytest.raises(ValueError, match="weights"):
        stream_linear(rows, weight[:, :40].contiguous())
    with pytest.raises(ValueError, match="weights"):
        stream_linear(rows.float(), weight)
    with pytest.raises(ValueError, match="takes 1 to"):
        stream_linear(rows.expand(50, 3, 48).reshape(150, 48), weight)
    with pytest.raises(ValueError, match="bias"):
        stream_linear(rows, weight, bias=torch.zeros(31))
    with pytest.raises(ValueError, match="residual"):
        stream_linear(rows, weight, residual=torch.zeros(3, 32), gated=True)
    with pytest.raises(ValueError, match="contiguous"):
        stream_linear(rows.T.contiguous().T, weight)
    with pytest.raises(ValueError, match="out is"):
        stream_linear(rows, weight, out=torch.empty(3, 32), out_dtype=torch.float64)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, MAX_ROWS])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("num_out", "size"),
    [(6144, 4096), (4096, 14336), (14336, 4096), (128256, 4096), (960, 576), (576, 1536), (5120, 5120)],
)
def test_chosen_configs_fit_the_chip(num_rows: int, gated: bool, num_out: int, size: int) -> None:
    config = choose_config(num_out, size, num_rows, gated, 2, 132)
    assert config.stages >= 2
    assert config.shared_bytes(num_rows, 2, gated) <= 227 * 1024
    assert config.shared_bytes(tile_rows(num_rows), 2, gated) == config.shared_bytes(num_rows, 2, gated)


REAL_CUTS = {
    "one program a tile": GemmConfig(),
    "split": GemmConfig(split_k=4, prefetch=4, bulk=False),
    "stretches that cross tiles": GemmConfig(split_k=0, prefetch=8, tma=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 32, MAX_ROWS])
@pytest.mark.parametrize(
    ("num_out", "size", "gated"),
    [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (960, 576, False)],
)
@pytest.mark.parametrize("cut", ["chosen", *REAL_CUTS])
def test_real_shapes(num_rows: int, num_out: int, size: int, gated: bool, cut: str) -> None:
    rows, weight = operands(num_rows, num_out * (2 if gated else 1), size, "cuda")
    residual = torch.randn(num_rows, num_out, device="cuda").bfloat16()
    expected = exact(rows, weight)
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = functional.silu(gate) * up
    expected += residual.double()
    result = stream_linear(
        rows, weight, residual=residual, gated=gated, out_dtype=torch.float32, config=REAL_CUTS.get(cut)
    )
    torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_out", [6144, 4096])
@pytest.mark.parametrize("cut", ["chosen", *REAL_CUTS])
def test_a_row_depends_on_itself_alone_at_a_real_shape(num_out: int, cut: str) -> None:
    rows, weight = operands(32, num_out, 4096, "cuda")
    config, out_dtype = REAL_CUTS.get(cut), torch.float32
    together = stream_linear(rows, weight, out_dtype=out_dtype, config=config)
    flipped = rows.flip(0).contiguous()
    for _ in range(20):
        moved = stream_linear(flipped[:21], weight, out_dtype=out_dtype, config=config)
        assert torch.equal(moved, together.flip(0)[:21])
        assert torch.equal(stream_linear(rows, weight, out_dtype=out_dtype, config=config), together)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it runs once before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("cut", REAL_CUTS)
def test_a_chain_in_a_graph(cut: str) -> None:
    """Kernels that start before the one before them has ended still see its results."""
    rows, weight = operands(32, 4096, 4096, "cuda")
    stages = [torch.empty_like(rows) for _ in range(10)]

    def chain() -> None:
        for source, target in itertools.pairwise([rows, *stages]):
            stream_linear(source, weight, residual=rows, out=target, config=REAL_CUTS[cut])

    graph = captured(chain)
    expected = [stage.clone() for stage in stages]
    for _ in range(10):
        for stage in stages:
            stage.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, stages, expected))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cuts",
    [
        (REAL_CUTS["split"], REAL_CUTS["split"]),
        (REAL_CUTS["split"], REAL_CUTS["stretches that cross tiles"]),
        (REAL_CUTS["one program a tile"], REAL_CUTS["split"]),
        (None, None),
    ],
)
@pytest.mark.parametrize("num_rows", [13, 32, MAX_ROWS])
def test_many_products_of_two_shapes_that_share_scratch(cuts: tuple[GemmConfig | None, ...], num_rows: int) -> None:
    """Programs of a launch never meet those of the one before or after it, and none reads a tile too early or late."""
    count, size = 200, 4096
    weights = [operands(1, num_out, size, "cuda")[1] for num_out in (6144, 4096)]
    rows = torch.randn(count, num_rows, size, device="cuda").bfloat16()
    outs = [torch.empty(num_rows, weights[index % 2].shape[0], device="cuda") for index in range(count)]

    def run() -> None:
        for index, out in enumerate(outs):
            stream_linear(rows[index], weights[index % 2], out=out, config=cuts[index % 2])

    graph = captured(run)
    first = [out.clone() for out in outs]
    for index, out in enumerate(first):
        expected = rows[index].float() @ weights[index % 2].float().T
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    for _ in range(10):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, outs, first))
