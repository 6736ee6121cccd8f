"""Products with few rows on Hopper GPUs against products in float64. That they compile: test_compile_for_a_gpu."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from test_quant_gemm import exact_product, made
from torch import Tensor
from torch.nn import functional

from kernels.launch import has_wgmma
from kernels.linear import fits_ring, ring_pays, stream_config, stream_linear
from kernels.linear_configs import MAX_ROWS, SHARED_MEMORY, stretches, tile_rows
from kernels.quant_weight import QuantWeight
from kernels.ring_configs import RingConfig, choose_ring

SHAPES = [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)]
SMALL_SHAPES = [
    *((3072, 4096, False), (4096, 2048, False), (7168, 4096, True), (4096, 7168, False)),
    *((3072, 2048, False), (2048, 2048, False), (8192, 2048, True), (2048, 8192, False)),
    *((5120, 3072, False), (3072, 3072, False), (8192, 3072, True), (3072, 8192, False)),
]
"""Of a rank of two of an 8B model, of a model of 1B, and of 3B."""
LARGE_SHAPES = [(5120, 8192, False), (8192, 4096, False), (14336, 8192, True), (8192, 14336, False)]
"""Of a rank of two of a 70B model."""
CUTS = {
    "a program a tile": RingConfig(),
    "two programs a tile": RingConfig(split_k=2, stages=3),
    "uneven stretches": RingConfig(split_k=3, stages=2),
    "stretches that cross tiles": RingConfig(split_k=0, per_sm=1),
    "tiles of two groups of warps": RingConfig(128, split_k=2, warps=8),
    "tiles of 128": RingConfig(128, stages=3),
    "long steps": RingConfig(block_k=256, split_k=2, stages=3),
    "long steps, two groups of warps": RingConfig(128, block_k=256, split_k=0, stages=3, warps=8),
    "warps by themselves": RingConfig(split_k=2, stages=3, by_warp=True),
    "eight warps by themselves": RingConfig(128, block_k=256, split_k=0, stages=3, warps=8, by_warp=True),
}
WEIGHTS = {
    "bfloat16": (None, 0, 1),
    "fp8, a scale a row": ("fp8", 0, 1),
    "fp8, blocks": ("fp8", 128, 128),
    "fp8, long groups": ("fp8", 512, 1),
    "int4": ("int4", 128, 1),
    "int4 with zeros": ("int4z", 128, 1),
    "int4 with a zero a row": ("int4z", 0, 1),
}
CODES = [name for name in WEIGHTS if name != "bfloat16"]
MOST_ROWS = {"bfloat16": MAX_ROWS, "fp8, a scale a row": MAX_ROWS}


@pytest.fixture
def hopper() -> str:
    device = torch.zeros(1, device="cuda")
    if not has_wgmma(device):
        pytest.skip("for Hopper GPUs alone")
    return "cuda"


def weight_of(name: str, num_out: int, size: int, device: str) -> Tensor | QuantWeight:
    kind, group, span = WEIGHTS[name]
    if kind is None:
        return (torch.randn(num_out, size, device=device) / size**0.5).bfloat16()
    return made(kind, num_out, size, group, device, span).for_streaming()


def exact(rows: Tensor, weight: Tensor | QuantWeight, bias: Tensor | None, gated: bool) -> Tensor:
    if isinstance(weight, QuantWeight):
        return exact_product(rows, weight, bias, gated)
    product = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = product.chunk(2, 1)
    return functional.silu(gate) * up if gated else product


def check_chosen(num_rows: int, weight: Tensor | QuantWeight, gated: bool, *, has_ring: bool) -> None:
    """That the cut which is chosen is a ring or none, and computes the product."""
    size = weight.size if isinstance(weight, QuantWeight) else weight.shape[1]
    device = weight.codes.device if isinstance(weight, QuantWeight) else weight.device
    rows = torch.randn(num_rows, size, device=device).bfloat16()
    assert isinstance(stream_config(rows[:MAX_ROWS], weight, gated), RingConfig) == has_ring
    found = stream_linear(rows, weight, gated=gated, out_dtype=torch.float32)
    torch.testing.assert_close(found.double(), exact(rows, weight, None, gated), rtol=2e-4, atol=2e-3)


def laid_out(config: RingConfig, shape: tuple[int, int, bool], processors: int) -> tuple[int, int, int]:
    """Steps of a tile, programs, and steps of each at least."""
    num_out, size, gated = shape
    tiles, steps = -(-num_out // (config.tile // (2 if gated else 1))), -(-size // config.block_k)
    programs, base, _, _ = stretches(config.split_k, config.per_sm, tiles, steps, processors)
    return steps, programs, base


def fits_a_processor(config: RingConfig, num_rows: int, bits: int) -> bool:
    """With all programs that run at once."""
    at_once = config.per_sm if config.split_k != 1 else 1
    return at_once * config.shared_bytes(config.rows(num_rows), bits) <= SHARED_MEMORY


def cut_for(cut: str, name: str, gated: bool) -> RingConfig:
    """Steps are at most 256 bytes wide; 128 where a tile has two halves."""
    config, (kind, *_) = CUTS[cut], WEIGHTS[name]
    if kind is None:
        config = dataclasses.replace(config, block_k=64 if gated else 128, by_warp=False)
    elif kind == "fp8" and gated:
        config = dataclasses.replace(config, block_k=128)
    return dataclasses.replace(config, tile=128) if gated else config


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("gated", [False, True])
def test_every_cut_is_the_product_and_all_that_stands_around_it(hopper: str, cut: str, name: str, gated: bool) -> None:
    # Rows that end in the midst of a tile, and columns that end in the midst of a long step.
    num_out, size, config = 360, 1664, cut_for(cut, name, gated)
    size = 1536 if WEIGHTS[name][1] == 512 else size
    weight = weight_of(name, num_out * (2 if gated else 1), size, hopper)
    bias = torch.randn(num_out * (2 if gated else 1), device=hopper)
    for num_rows in (1, 5, 17, 40):
        rows = torch.randn(num_rows, size, device=hopper).bfloat16()
        residual = torch.randn(num_rows, num_out, device=hopper)

        def product(rows: Tensor, residual: Tensor, config: RingConfig = config) -> Tensor:
            return stream_linear(
                rows, weight, bias=bias, residual=residual, gated=gated, out_dtype=torch.float32, config=config
            )

        found = product(rows, residual)
        expected = exact(rows, weight, bias, gated) + residual.double()
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-3)
        assert torch.equal(product(rows, residual), found), "sums have one order"
        if num_rows > 1:
            moved = product(rows.flip(0)[: num_rows - 1].contiguous(), residual.flip(0)[: num_rows - 1].contiguous())
            if tile_rows(num_rows) == tile_rows(num_rows - 1):
                assert torch.equal(moved, found.flip(0)[: num_rows - 1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_chosen_cut_is_the_product_whatever_the_number_of_rows(hopper: str, name: str, gated: bool) -> None:
    num_out, size = 8448, 2048
    weight = weight_of(name, num_out * (2 if gated else 1), size, hopper)
    for num_rows in (1, 16, 32, 33, MAX_ROWS):
        check_chosen(num_rows, weight, gated, has_ring=num_rows <= MOST_ROWS.get(name, 16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("bfloat16", (1, 16, 17, 32, MAX_ROWS)),
        ("fp8, a scale a row", (1, 8, 9, 17, 32, MAX_ROWS)),
        ("fp8, blocks", (1, 8)),
        ("int4", (1, 8)),
    ],
)
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_the_chosen_cut_of_a_smaller_matrix_is_the_product(
    hopper: str, shape: tuple[int, int, bool], name: str, counts: tuple[int, ...]
) -> None:
    num_out, size, gated = shape
    weight = weight_of(name, num_out * (2 if gated else 1), size, hopper)
    for num_rows in counts:
        processors = torch.cuda.get_device_properties(hopper).multi_processor_count
        one_wave = gated and num_out <= 64 * processors
        slower = (name == "bfloat16" and num_out == size == 2048) or (name in CODES and one_wave and 8 < num_rows <= 16)
        check_chosen(num_rows, weight, gated, has_ring=not slower)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_chosen_cut_of_a_large_gated_matrix_is_the_product(hopper: str, name: str) -> None:
    num_out, size, gated = LARGE_SHAPES[2]
    weight = weight_of(name, 2 * num_out, size, hopper)
    most = {"bfloat16": 32, "fp8, a scale a row": 16}.get(name, 0)
    for num_rows in (1, 16, 17, MAX_ROWS):
        check_chosen(num_rows, weight, gated, has_ring=num_rows <= most)


@pytest.mark.gpu
def test_large_matrices_are_ours_where_a_library_takes_small_ones(hopper: str) -> None:
    large, small = (weight_of("int4", size, size, hopper) for size in (4096, 1024))
    assert ring_pays(large, torch.bfloat16) and not ring_pays(small, torch.bfloat16)
    assert not ring_pays(large, torch.float16), "rings are of bfloat16"


@pytest.mark.gpu
def test_launches_in_a_graph_read_what_those_in_front_wrote(hopper: str) -> None:
    weights = [weight_of(name, 4096, 4096, hopper) for name in ("bfloat16", "fp8, a scale a row", "int4") * 3]
    first = torch.randn(7, 4096, device=hopper).bfloat16()
    assert all(isinstance(stream_config(first, weight), RingConfig) for weight in weights)

    def chain() -> Tensor:
        rows = first
        for weight in weights:
            rows = stream_linear(rows, weight, residual=rows)
        return rows

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("bits", "num_rows"), [(16, 16), (16, MAX_ROWS), (8, 1), (8, 32), (8, MAX_ROWS), (4, 1), (4, 16)]
)
def test_programs_of_a_chosen_cut_fit_a_processor_and_have_work_alike(bits: int, num_rows: int) -> None:
    for shape, processors, grouped in itertools.product([*SHAPES, *LARGE_SHAPES], (114, 132), (False, True)):
        if grouped and (bits == 16 or num_rows > 16):
            continue
        num_out, size, gated = shape
        config = choose_ring(num_out, size, num_rows, gated, processors, bits, grouped)
        if config is None:
            large = gated and (num_out, size) == (14336, 8192)
            none_is_faster = grouped or bits == 4 or num_rows > (32 if bits == 16 else 16)
            assert (large and none_is_faster) or (num_out == 8192 and processors == 114), "more tiles than processors"
            continue
        assert fits_a_processor(config, num_rows, bits)
        steps, programs, _ = laid_out(config, shape, processors)
        at_once = config.per_sm if config.split_k != 1 else 1
        if (bits, num_out, size) == (16, 4096, 4096):
            assert programs == 64, "a program with a whole tile is better than two with half of one each"
        else:
            assert programs >= 0.7 * at_once * processors
        assert config.split_k == 0 or steps % config.split_k == 0


@pytest.mark.parametrize(("bits", "num_rows"), [(16, 1), (16, 32), (16, MAX_ROWS), (8, 9), (8, 32), (8, MAX_ROWS)])
def test_programs_of_smaller_matrices_have_long_stretches(bits: int, num_rows: int) -> None:
    for shape in SMALL_SHAPES:
        num_out, size, gated = shape
        config = choose_ring(num_out, size, num_rows, gated, 132, bits)
        if config is None:
            assert (bits == 16 and num_out == size == 2048) or (bits == 8 and gated and num_rows <= 16), (
                "none is faster"
            )
            continue
        assert config is not None and fits_a_processor(config, num_rows, bits)
        _, programs, base = laid_out(config, shape, 132)
        assert programs <= 132 * config.per_sm, "all of them run at once"
        assert config.split_k == 1 or base * config.block_k >= 1792


def test_long_rows_that_cannot_be_split_evenly_leave_no_processor_without_work() -> None:
    for num_out, size in ((2048, 11008), (2560, 9728), (5120, 13824), (4096, 5504)):
        config = choose_ring(num_out, size, 1, False, 132, 16)
        assert config is not None and config.split_k == 0 and config.per_sm == 1
    for bits, num_rows in ((16, 1), (8, 9), (8, MAX_ROWS)):
        assert choose_ring(1536, 8960, num_rows, False, 132, bits) is None, "smaller ones were not measured"
    for bits in (8, 4):
        assert choose_ring(1536, 8960, 1, False, 132, bits, grouped=True) is None
    large = choose_ring(3584, 18944, 32, False, 132, 8)
    assert large is not None and large.split_k == 4


def test_codes_have_a_second_program_a_processor_where_columns_are_long() -> None:
    def programs(num_out: int, size: int, num_rows: int) -> tuple[int, int]:
        config = choose_ring(num_out, size, num_rows, False, 132, 8)
        assert config is not None
        return config.per_sm, laid_out(config, (num_out, size, False), 132)[1]

    assert [programs(4096, 14336, num_rows) for num_rows in (1, 9, 32, 64)] == [(2, 256)] * 4
    assert [programs(4096, 7168, num_rows) for num_rows in (9, 32, 64)] == [(2, 256), (1, 128), (1, 128)]
    assert [programs(3072, 8192, num_rows) for num_rows in (9, 32, 64)] == [(2, 192), (1, 96), (1, 96)]
    assert [programs(2048, 8192, num_rows) for num_rows in (1, 9, 32, 64)] == [(1, 128)] * 4
    assert [programs(5120, 6912, num_rows) for num_rows in (9, 32)] == [(2, 240), (2, 240)], "as before"


def test_large_gates_have_rings_where_no_tile_waits() -> None:
    assert choose_ring(14336, 8192, 16, True, 132, 8) is not None and choose_ring(14336, 8192, 17, True, 132, 8) is None
    assert choose_ring(14336, 8192, 32, True, 132, 16) is not None and choose_ring(14336, 8192, 1, True, 132, 4) is None
    for bits in (8, 16):
        assert choose_ring(18944, 3584, 1, True, 132, bits) is None, "296 tiles on 264 places"


@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, MAX_ROWS])
@pytest.mark.parametrize("processors", [78, 114, 132])
def test_smaller_cuts_fit_a_processor(num_rows: int, processors: int) -> None:
    found = 0
    formats = [(8, False), (16, False), *([(8, True), (4, True)] if num_rows <= 16 else [])]
    for shape, (bits, grouped) in itertools.product([*SMALL_SHAPES, *LARGE_SHAPES, (5889, 512, True)], formats):
        num_out, size, gated = shape
        config = choose_ring(num_out, size, num_rows, gated, processors, bits, grouped)
        if config is not None:
            steps, _, _ = laid_out(config, shape, processors)
            assert fits_a_processor(config, num_rows, bits)
            assert config.stages <= steps and (not config.split_k or steps % config.split_k == 0)
            found += 1
    assert found >= 10


def test_what_has_no_ring() -> None:
    def has_ring(num_out: int, size: int, num_rows: int, bits: int, grouped: bool = False) -> bool:
        return choose_ring(num_out, size, num_rows, False, 132, bits, grouped) is not None

    assert (
        has_ring(4096, 4096, MAX_ROWS, 16) and has_ring(4096, 4096, MAX_ROWS, 8) and has_ring(4096, 4096, 16, 4, True)
    )
    assert not has_ring(2048, 2048, 16, 16) and not has_ring(1536, 2048, 1, 8), "too small"
    assert has_ring(2048, 2048, 8, 8, True) and not has_ring(2048, 2048, 9, 8, True), "small ones for few rows alone"
    assert has_ring(2048, 2048, 8, 4, True) and not has_ring(2048, 2048, 9, 4, True), "the same"
    assert choose_ring(4096, 4096, 16, True, 132, 16) is None, "too few tiles at once"
    assert choose_ring(7168, 4096, 16, True, 132, 8, grouped=True) is None, "half of a gated matrix"
    assert choose_ring(4864, 896, 1, True, 132, 4, grouped=True) is None, (
        "of gate and up smaller ones were not measured"
    )
    assert choose_ring(8192, 3072, 9, True, 132, 8) is None and choose_ring(8192, 3072, 17, True, 132, 8) is not None
    assert not has_ring(49152, 4096, 16, 16) and not has_ring(32000, 2048, 16, 8), "output matrices were not measured"
    assert not has_ring(4096, 4160, 16, 16), "columns that steps do not fit"
    assert not has_ring(4096, 4096, 17, 8, True), "slower than without"
    assert not has_ring(4096, 4096, 17, 4), "slower than without"


def test_weights_that_steps_do_not_fit_have_no_ring() -> None:
    assert all(fits_ring(weight_of(name, 64, 1536, "cpu")) for name in WEIGHTS)
    assert not fits_ring(made("fp8", 64, 1536, 384).for_streaming()), "groups that end within a step"
    assert not fits_ring(made("int4", 64, 1536, 32).for_streaming()), "short pieces"
    assert not ring_pays(weight_of("int4", 4096, 4096, "cpu"), torch.bfloat16), "no GPU"
    assert not fits_ring(made("mxfp4", 64, 1536, 32).for_streaming()), "codes that are not made wide here"
