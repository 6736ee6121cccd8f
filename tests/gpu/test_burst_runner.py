"""Bursts on a GPU: graphs, kernels and copies give what the model gives when it is run plainly on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from burst_host import RESULT_FIELDS, Host
from foreign_families import GEMMA_4
from tiny_drafts import FeatureDraft, chain_draft
from tiny_models import save_tiny

from outrider.attention.triton_backend import TritonAttention
from outrider.config.draft import DraftOptions
from outrider.drafting.model.build import build_runner
from outrider.drafting.model.burst import BurstResult, BurstShape
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.drafting.model.runner import RunnerOptions
from outrider.errors import ConfigError
from outrider.models.drafters.base import DraftModel
from outrider.models.loader import load_model
from outrider.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny(made, head_dim=16)
    return made


def draft(folder: Path, kind: str, dtype: torch.dtype, device: str) -> DraftModel:
    model = load_model(folder, dtype, device)
    return FeatureDraft(model) if kind == "features" else chain_draft(model)


def make_runner(model: DraftModel, use_graphs: bool = True, **changes: int) -> CudaRunner:
    shape = BurstShape(
        num_rows=8,
        region=256,
        branching=4,
        max_seeds=128,
        max_steps=8,
        max_width=32,
        page_size=16,
        num_pages=64,
        max_context=200,
        feature_size=model.feature_size,
    )
    options = RunnerOptions(chunk_size=24, use_graphs=use_graphs)
    runner = CudaRunner(model, replace(shape, **changes), TritonAttention(), options)
    runner.capture()
    return runner


def prompt(length: int) -> list[int]:
    return [(7 * place + length) % 97 for place in range(length)]


def live(host: Host, check: bool = True) -> list[BurstResult]:
    """Several rows grow, commit, and come and go."""
    results = []
    for row, length in ((0, 5), (3, 60), (7, 33)):
        sampling = SamplingParams(temperature=0.3 * row, seed=2**40 + row, choice_index=row)
        host.open(row, prompt(length), sampling)
    for turn in range(4):
        for num_steps, width in ((4, 20), (2, 8)):
            burst, seeds = host.burst(num_steps, width, floor=-9.0)
            results.append(host.runner.launch(burst).wait())
            host.merge(burst, seeds, results[-1], check)
        for row in (0, 3):
            request = host.requests[row]
            assert request.root is not None
            known = [node for node in request.nodes.values() if request.root in node.above()]
            deepest = max(known, key=lambda node: len(node.tokens))
            guessed = list(deepest.tokens[len(request.tokens) :])
            host.commit(row, guessed + [5] * (turn % 2 or not guessed), move=turn != 2)
        if turn == 1:
            host.close(7)
            host.open(7, prompt(40))
    return results


@pytest.mark.parametrize("kind", ["plain", "features"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposes_what_the_cpu_does(folder: Path, kind: str, dtype: torch.dtype) -> None:
    runner = make_runner(draft(folder, kind, dtype, "cuda"))
    assert len(runner.graphs) == len(runner.buckets.all())
    # The CPU's own model in full precision: what is left is the rounding of the GPU's.
    host = Host(runner, draft(folder, kind, torch.float32, "cpu"), TOLERANCE[dtype])
    live(host, check=dtype == torch.float32 or kind == "plain")
    assert host.num_checked > 150 or kind == "features"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads_of_two_sizes_propose_what_the_cpu_does(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tiny(tmp_path, "Gemma4Text", **{**GEMMA_4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 64})
    runner = make_runner(draft(tmp_path, "plain", dtype, "cuda"))
    host = Host(runner, draft(tmp_path, "plain", torch.float32, "cpu"), TOLERANCE[dtype])
    live(host, check=dtype == torch.float32)
    assert host.num_checked > 150 or dtype != torch.float32


@pytest.mark.parametrize("kind", ["plain", "features"])
def test_graphs_do_what_single_launches_do(folder: Path, kind: str) -> None:
    found = []
    for use_graphs in (True, False):
        model = draft(folder, kind, torch.bfloat16, "cuda")
        host = Host(make_runner(model, use_graphs), draft(folder, kind, torch.float32, "cpu"))
        found.append(live(host, check=False))
    for with_graphs, without in zip(*found, strict=True):
        for name in ("picked", "slots", "tokens", "scores"):
            np.testing.assert_array_equal(getattr(with_graphs, name), getattr(without, name), err_msg=name)


def test_a_lone_request_has_more_candidates(folder: Path) -> None:
    runner = make_runner(draft(folder, "plain", torch.float32, "cuda"), lone_branching=12)
    assert {(bucket.rows == 1, bucket.branching) for bucket in runner.buckets.all()} == {(True, 12), (False, 4)}
    host = Host(runner, draft(folder, "plain", torch.float32, "cpu"), TOLERANCE[torch.float32])
    for row in range(3):
        host.open(row, prompt(9 + row))
    for rows, count in (([1], 12), ([0, 1, 2], 4), ([1], 12), ([0, 2], 4), ([2], 12)):
        burst, seeds = host.burst(4, 16, rows=rows)
        result = runner.launch(burst).wait()
        assert result.tokens.shape[2] == count
        host.merge(burst, seeds, result)
    assert host.num_checked > 100


@pytest.mark.parametrize("kind", ["plain", "features"])
@pytest.mark.parametrize(("limit", "dtype"), [(40, torch.float32), (100, torch.float32), (100, torch.bfloat16)])
def test_a_lone_request_outgrows_short_contexts(
    folder: Path, kind: str, limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafting.model.runner.short_context", lambda model: limit)
    host = Host(make_runner(draft(folder, kind, dtype, "cuda")), draft(folder, kind, torch.float32, "cpu"))
    host.tolerance = TOLERANCE[dtype]
    # A draft's own features are rounded further from step to step.
    check = dtype == torch.float32 or kind == "plain"
    host.open(3, prompt(limit))
    seen = []
    request = host.requests[3]
    for turn in range(6):
        burst, seeds = host.burst(3, 16, floor=-20.0)
        pending = host.runner.launch(burst)
        host.merge(burst, seeds, pending.wait(), check)
        seen.append(pending.bucket.short)
        known = [node for node in request.nodes.values() if node.parent is request.root]
        best = list(max(known, key=lambda node: node.score).tokens[len(request.tokens) :])
        if turn % 2:
            ready, first, second = host.past_commit(3, best, (1, 3), 8, floor=-20.0, check=check)
            assert ready and first and second
        else:
            host.commit(3, best)
    assert seen[0] and not seen[5], seen
    assert host.num_checked > 60 or not check


def test_small_models_have_short_contexts_where_products_are_small(folder: Path) -> None:
    for dtype, count in ((torch.bfloat16, 3), (torch.float32, 0)):
        runner = make_runner(draft(folder, "plain", dtype, "cuda"))
        assert [bucket.width for bucket in runner.buckets.all() if bucket.short] == [32, 16, 8][:count]
        assert len(runner.graphs) == len(runner.buckets.all()) == len(runner.buckets.sizes()) + count


def test_two_bursts_are_pending_at_once(folder: Path) -> None:
    host = Host(
        make_runner(draft(folder, "plain", torch.float32, "cuda")), draft(folder, "plain", torch.float32, "cpu")
    )
    host.tolerance = TOLERANCE[torch.float32]
    for row in range(4):
        host.open(row, prompt(9 + row))
    bursts = [host.burst(6, 32, rows=[2 * half, 2 * half + 1]) for half in range(2)]
    pending = [host.runner.launch(burst) for burst, _ in bursts]
    for (burst, seeds), launched in zip(bursts, pending, strict=True):
        host.merge(burst, seeds, launched.wait())
        assert launched.done()
    assert host.num_checked > 100


@pytest.mark.parametrize("kind", ["plain", "features"])
def test_a_burst_goes_on_while_nothing_waits_for_its_end(folder: Path, kind: str) -> None:
    steps, results = [2, 1, 1, 2], []
    for in_parts in (False, True):
        host = Host(make_runner(draft(folder, kind, torch.bfloat16, "cuda")), draft(folder, kind, torch.float32, "cpu"))
        for row in range(3):
            host.open(row, prompt(9 + row))
        for _ in range(3):
            burst, seeds = host.burst(steps[0] if in_parts else sum(steps), 16, floor=-9.0)
            results.append(host.in_parts(burst, steps) if in_parts else host.runner.launch(burst).wait())
            host.merge(burst, seeds, results[-1], check=False)
            host.commit(0, list(host.requests[0].waiting[0].tokens[len(host.requests[0].tokens) :]))
    for ours, theirs in zip(results[:3], results[3:], strict=True):
        for name in RESULT_FIELDS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize(("kind", "which"), [("plain", "run"), ("plain", "unrun"), ("features", "run")])
def test_a_burst_goes_on_past_a_commit(folder: Path, kind: str, which: str, use_graphs: bool) -> None:
    """The best below the new root first, also in slots of nodes that died; candidates are those of the model."""
    runner = make_runner(draft(folder, kind, torch.float32, "cuda"), use_graphs)
    host = Host(runner, draft(folder, kind, torch.float32, "cpu"), TOLERANCE[torch.float32])
    for row in range(3):
        host.open(row, prompt(9 + row), SamplingParams(temperature=0.4 * row, seed=row))
    for _ in range(3):
        host.step(2, 8, floor=-20.0)
        request = host.requests[1]
        length = len(request.tokens)
        known = [node for node in request.nodes.values() if node.parent is request.root]
        if which == "unrun":
            known = [node for node in request.waiting if node.parent is request.root] or request.waiting
        chosen = max(known, key=lambda node: node.score)
        ready, first, second = host.past_commit(1, list(chosen.tokens[length:]), (1, 3), 8, floor=-20.0)
        assert first and len(ready) > 8
        # Path scores of the two devices differ in their last bits.
        worst = ready[7].score - 10 * TOLERANCE[torch.float32]
        assert len(second) >= 8 and all(node.score >= worst for node in second[:8])
    assert host.num_checked > 60


def test_built_from_options(folder: Path) -> None:
    options = DraftOptions(max_requests=4, max_total_tokens=2048, speculative_eagle_topk=4)
    runner = build_runner(draft(folder, "plain", torch.bfloat16, "cuda"), options)
    assert isinstance(runner, CudaRunner)
    assert (runner.shape.num_rows, runner.shape.region, runner.shape.num_pages) == (4, 768, 64)
    host = Host(runner, draft(folder, "plain", torch.float32, "cpu"), TOLERANCE[torch.bfloat16])
    host.open(1, prompt(30))
    assert len(host.step(8, 64)) > 100


def test_graphs_are_captured_whatever_the_pool_holds(folder: Path) -> None:
    runner = make_runner(draft(folder, "plain", torch.bfloat16, "cuda"))
    # As scores these are likely, as rows they are gigabytes away.
    runner._steps._entries.fill_(1 << 22)
    runner.capture()
    torch.cuda.synchronize()


def test_too_little_memory_is_said_so(folder: Path) -> None:
    model = draft(folder, "plain", torch.bfloat16, "cuda")
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        build_runner(model, DraftOptions(mem_fraction_static=0.002))
    model.num_layers = 1 << 16
    with pytest.raises(ConfigError, match="has no memory for the draft model"):
        build_runner(model, DraftOptions(max_total_tokens=1 << 24))
