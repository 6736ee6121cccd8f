"""Quantized models on the GPU: near what their dequantized matrices say, the same in graphs, and deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_harness import small_model
from deterministic_drafts import Start, check_drafts_change_nothing
from paged_runs import PagedRun
from tiny_models import relative_error, run_one, save_tiny, token_ids

from outrider.layers.linear import Linear
from outrider.models.loader import load_decoder
from outrider.models.quantization import Scheme
from outrider_tools.quantize import FORMATS, quantize

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
PARENTS = [-1, 0, 0, 1, 3, 2, 4, 6]
CONTEXT = 25


def made(source: Path, name: str) -> Path:
    """The checkpoint in that format."""
    out = source.parent / name
    quantize(source, out, name, 32, torch.device("cuda"), 1 << 30, lambda *_: None)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_and_trees_are_near_their_dequantized_matrices(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", **SIZES)
    folder = made(tmp_path / "source", name)
    ids, nodes = token_ids(40), token_ids(len(PARENTS), seed=3)
    wide = load_decoder(folder)
    expected = run_one(wide, wide.new_kv(40), ids, torch.arange(40)).cuda()
    ids, nodes = ids.cuda(), nodes.cuda()
    run = PagedRun(load_decoder(folder, torch.bfloat16, "cuda"))
    # Products with fp8 weights round rows, too; those of one row have a kernel of their own.
    limit = 0.2 if name.startswith("fp8") else 0.12
    assert relative_error(run.prompt(ids[:10], 0), expected[:10]) <= limit
    assert relative_error(run.prompt(ids[10:11], 10), expected[10:11]) <= limit
    assert relative_error(run.prompt(ids[11:CONTEXT], 11), expected[11:CONTEXT]) <= limit
    eager = run.tree(nodes, PARENTS, CONTEXT, by_path=False)
    assert torch.equal(run.captured_tree(nodes, PARENTS, CONTEXT, by_path=False), eager)


def norm_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of a difference over the norm of what is exact."""
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("count", [32, 33, 64, 65, 130, 192, 193, 512, 513])
@pytest.mark.parametrize("num_out", [96, 1056])
def test_products_of_many_rows_are_those_of_the_dequantized_matrix(library: bool, count: int, num_out: int) -> None:
    """By each of the ways that fp8 weights are multiplied; rounded to fp8, rows would be off by 2.6 %."""
    device = torch.device("cuda")
    linear = Linear(256, num_out, True, torch.bfloat16, device, Scheme("fp8", "fp8", library=library))
    stored = linear.tensors("it")
    stored["it.weight"].copy_(torch.randn(num_out, 256, device=device))
    stored["it.weight_scale"].copy_(torch.rand(num_out, 1, device=device) + 0.5).mul_(1 / 16)
    stored["it.bias"].copy_(torch.randn(num_out, device=device))
    matrix = stored["it.weight"].double() * stored["it.weight_scale"].double()
    bias = stored["it.bias"].double()
    linear.pack()
    rows = torch.randn(count, 256, device=device).bfloat16()
    residual = torch.randn(count, num_out, device=device).bfloat16()
    exact = rows.double() @ matrix.T + bias
    gate, up = exact.chunk(2, 1)
    assert norm_error(linear(rows), exact) < 2**-8
    assert norm_error(linear.add_to(residual, rows), exact + residual.double()) < 2**-8
    assert norm_error(linear.gated(rows), torch.nn.functional.silu(gate) * up) < 2**-7
    assert norm_error(linear.to_float32(rows), exact) < 2**-8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear(rows)
    rows.copy_(torch.randn(count, 256, device=device))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, linear(rows))


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "int4", "awq", "mxfp4"])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_deterministic_answers_are_those_without_drafts(name: str, fp8_kv: bool, tmp_path: Path, start: Start) -> None:
    small_model(tmp_path / "source", "Llama", 64, hidden_size=128, intermediate_size=384)
    model = load_decoder(made(tmp_path / "source", name), torch.bfloat16, "cuda", own_products=True)
    model.kv_dtype = torch.float8_e4m3fn if fp8_kv else None
    check_drafts_change_nothing(start, model)
