"""Bursts propose what the model proposes when it is run over each node's whole text, by either runner."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from burst_host import RESULT_FIELDS, Host, Node
from msgspec.structs import replace

from outrider.attention.base import TokenBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.drafting.model.burst import BurstShape, Extent
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.drafting.model.runner import BurstRunner, RunnerOptions
from outrider.drafting.model.torch_runner import TorchRunner
from outrider.models.drafters.base import DraftModel
from outrider.sampling.params import SamplingParams

Make = Callable[..., Host]


def make_runner(kind: str, model: DraftModel, **changes: int) -> BurstRunner:
    shape = BurstShape(
        **{
            "num_rows": 4,
            "region": 64,
            "branching": 3,
            "max_seeds": 64,
            "max_steps": 4,
            "max_width": 8,
            "page_size": 4,
            "num_pages": 96,
            "max_context": 128,
            "feature_size": model.feature_size,
            **changes,
        }
    )
    options = RunnerOptions(chunk_size=7)
    if kind == "torch":
        return TorchRunner(model, shape, TorchAttention(), options)
    return CudaRunner(model, shape, TritonAttention(), options)


@pytest.fixture(params=["torch", "cuda"])
def make(request: pytest.FixtureRequest) -> Make:
    """A host with a runner; the GPU's works with the kernels' references here."""

    def made(model: DraftModel, **changes: int) -> Host:
        return Host(make_runner(request.param, model, **changes), model)

    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(97) for _ in range(length)]


def depths(nodes: list[Node]) -> list[int]:
    return [len(node.tokens) for node in nodes]


def test_a_chain(make: Make, model: DraftModel) -> None:
    host = make(model, branching=1)
    host.open(0, prompt(11))
    ran = host.step(4, 8)
    assert depths(ran) == [11, 12, 13, 14]
    ran = host.step(3, 8)
    assert depths(ran) == [15, 16, 17]
    assert host.num_checked == 7


def test_contexts_of_several_rows_are_computed_in_as_few_forwards_as_hold_them(
    make: Make, model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make(model)
    sizes: list[int] = []
    forward = model.forward

    def noted(batch: TokenBatch, *rest: Any) -> Any:
        sizes.append(len(batch.token_ids))
        return forward(batch, *rest)

    monkeypatch.setattr(model, "forward", noted)
    host.open_all({0: prompt(9), 3: prompt(30, 1), 1: prompt(4, 2)})
    monkeypatch.undo()
    # First the tokens before the middle, then the others; a forward holds seven. A first token may have no KV.
    first, second = 4 + 14 + 1 - 3 * host.lag, 4 + 15 + 2
    assert sizes == [7, 7, *([first - 14] if first > 14 else []), 7, 7, second - 14]
    assert {node.row for node in host.step(3, 8)} == {0, 1, 3}
    host.step(4, 8)
    assert host.num_checked > 20


def test_trees_of_several_rows_with_noise(make: Make, model: DraftModel) -> None:
    host = make(model)
    for row, length in ((0, 3), (2, 20), (3, 9)):
        host.open(row, prompt(length, row), SamplingParams(temperature=0.5 * row, seed=2**63 + row, choice_index=row))
    ran = host.step(3, 8)
    assert {node.row for node in ran} == {0, 2, 3}
    assert len(ran) == 3 + 8 + 8
    host.step(4, 5)
    assert host.num_checked > 40


def test_best_nodes_are_run(make: Make, plain_model: DraftModel) -> None:
    host = make(plain_model)
    host.open(0, prompt(8))
    host.open(1, prompt(13, 1))
    ran = host.step(4, 4)
    ran += host.step(4, 4)
    least = min(node.score for node in ran)
    # A step runs its best nodes: what waits could only have been better had it been found earlier.
    best_waiting = max(node.score for row in (0, 1) for node in host.requests[row].waiting)
    assert sum(node.score >= best_waiting for node in ran) > len(ran) // 2 and least > -50


def test_floor(make: Make, plain_model: DraftModel) -> None:
    host = make(plain_model)
    host.open(0, prompt(8))
    root = host.step(1, 8)
    assert len(root) == 1
    scores = sorted((node.score for node in host.requests[0].waiting), reverse=True)
    ran = host.step(1, 8, floor=(scores[0] + scores[1]) / 2)
    assert [node.score for node in ran] == scores[:1]
    assert host.step(4, 8, floor=1e-3) == []


def test_no_more_nodes_than_free_slots(make: Make, model: DraftModel) -> None:
    host = make(model)
    host.open(0, prompt(8))
    host.open(1, prompt(9, 1))
    host.step(1, 8)
    ran = host.step(4, 8, num_free=5)
    assert sorted(node.row for node in ran) == [0] * 5 + [1] * 5
    assert host.step(2, 8, num_free=0) == []


@pytest.mark.parametrize("move", [True, False])
def test_commits_keep_what_survives(make: Make, model: DraftModel, move: bool) -> None:
    host = make(model)
    request = host.open(0, prompt(9))
    host.step(4, 8)
    for _ in range(3):
        assert request.root is not None
        below = [node for node in request.nodes.values() if request.root in node.above() and node is not request.root]
        target = max(below, key=lambda node: len(node.tokens))
        host.commit(0, list(target.tokens[len(request.tokens) :]), move)
        assert not request.forced
        before = host.num_checked
        host.step(2, 8)
        assert host.num_checked > before


def test_committed_tokens_that_were_not_run_are_forced(make: Make, model: DraftModel) -> None:
    host = make(model)
    request = host.open(0, prompt(9))
    host.step(2, 4)
    # Down to a leaf that was not run, and three tokens that nobody guessed.
    leaf = request.waiting[0]
    host.commit(0, [*leaf.tokens[9:], 5, 6, 7])
    assert len(request.forced) == 4 and not request.nodes
    ran = host.step(4, 8)
    steps_of_chain = 4 if host.lag else 1
    assert [len(node.tokens) for node in ran[:4]] == [len(leaf.tokens) + i for i in range(4)]
    assert len(ran) > 4 or steps_of_chain == 4


def test_more_forced_tokens_than_a_step_holds(make: Make, plain_model: DraftModel) -> None:
    host = make(plain_model)
    request = host.open(0, prompt(9))
    host.step(1, 4)
    host.commit(0, prompt(20, 5))
    ran = host.step(4, 8)
    assert [len(node.tokens) for node in ran[:20]] == list(range(10, 30))
    assert ran[19] is request.root and len(ran) > 20


def test_true_features_replace_own_ones(make: Make, feature_model: DraftModel) -> None:
    host = make(feature_model)
    request = host.open(0, prompt(9))
    host.step(2, 4)
    chain = max(request.nodes.values(), key=lambda node: len(node.tokens))
    host.commit(0, list(chain.tokens[9:]), move=False)
    assert not request.forced and len(request.nodes) >= 2
    request.nodes = {node.slot: node for node in chain.above()}
    request.waiting = []
    # The same tokens in the same slots, with what the target brought.
    features = chain.above()[-1].features
    again = list(reversed(chain.above()))
    for node in again[1:]:
        features = (*features, host._true_feature())
        node.features, node.given = features, 0
    request.forced = again[1:]
    before = host.num_checked
    ran = host.step(1, 8)
    assert ran == again[1:] and host.num_checked > before
    host.step(3, 8)


def test_random_lives(make: Make, model: DraftModel) -> None:
    """Requests come and go, commit what was guessed or not, and grow all the while."""
    host = make(model)
    source = random.Random(isinstance(host.runner, CudaRunner))
    for _ in range(14):
        row = source.randrange(4)
        request = host.requests.get(row)
        if request is None:
            temperature = source.choice([0.0, 0.7, 1.2])
            sampling = SamplingParams(temperature=temperature, seed=source.getrandbits(64))
            host.open(row, prompt(source.randint(2, 25), source.random().__hash__()), sampling)
        elif len(request.tokens) > 60 or source.random() < 0.1:
            host.close(row)
        elif not request.forced:
            known = [node for node in (*request.nodes.values(), *request.waiting) if request.root in node.above()]
            tokens = list(source.choice(known).tokens[len(request.tokens) :])
            tokens += [source.randrange(97)] * source.randint(0 if tokens else 1, 2)
            host.commit(row, tokens, move=source.random() < 0.7)
        rows = source.sample(sorted(host.requests), source.randint(0, len(host.requests)))
        host.step(source.randint(1, 4), source.randint(4, 8), rows=rows, floor=-8.0)
        for other in host.requests.values():
            other.waiting = sorted(other.waiting, key=lambda node: -node.score)[:16]
    assert host.num_checked > 40


def test_both_runners_agree(model: DraftModel) -> None:
    """On the same bursts, to the last slot; scores but for rounding."""
    hosts = [Host(make_runner(kind, model), model) for kind in ("torch", "cuda")]
    results = []
    for host in hosts:
        found = []
        for row in range(3):
            host.open(row, prompt(6 + 5 * row, row), SamplingParams(temperature=0.4 * row, seed=row))
        for _ in range(3):
            burst, seeds = host.burst(3, 8)
            found.append(host.runner.launch(burst).wait())
            host.merge(burst, seeds, found[-1], check=False)
            for row in (0, 2):
                request = host.requests[row]
                host.commit(row, list(request.waiting[0].tokens[len(request.tokens) :]))
        results.append(found)
    for ours, theirs in zip(*results, strict=True):
        for name in ("picked", "slots", "tokens"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)


@pytest.mark.parametrize("steps", [[2, 1, 2], [4, 4]])
def test_a_burst_that_goes_on_is_one_of_all_its_steps(model: DraftModel, steps: list[int]) -> None:
    results = []
    for in_parts in (False, True):
        host = Host(make_runner("cuda", model, max_steps=8), model)
        for row in range(2):
            host.open(row, prompt(7 + row, row), SamplingParams(temperature=0.4 * row, seed=row))
        for _ in range(2):
            burst, seeds = host.burst(steps[0] if in_parts else sum(steps), 8, floor=-9.0)
            result = host.in_parts(burst, steps) if in_parts else host.runner.launch(burst).wait()
            host.merge(burst, seeds, result)
            results.append(result)
            host.commit(0, list(host.requests[0].waiting[0].tokens[len(host.requests[0].tokens) :]))
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        assert ours.first == theirs.first
        for name in RESULT_FIELDS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


@pytest.mark.parametrize("which", ["run", "unrun"])
@pytest.mark.parametrize("seed", range(2))
def test_a_burst_that_goes_on_past_a_commit_runs_what_survives_it(model: DraftModel, which: str, seed: int) -> None:
    """The best below the new root first, also in slots of nodes that died; what follows finds all of it as it was."""
    if which == "unrun" and model.feature_size:
        pytest.skip("a new root that was not run is a further seed, for its true feature")
    host = Host(make_runner("cuda", model, max_steps=8), model)
    for row in range(2):
        host.open(row, prompt(7 + row, row + seed), SamplingParams(temperature=0.4 * row, seed=row))
    rows = set()
    for _ in range(2):
        host.step(2, 8, floor=-20.0)
        request = host.requests[0]
        length = len(request.tokens)
        known = [node for node in request.nodes.values() if node.parent is request.root]
        if which == "unrun":
            known = [node for node in request.waiting if node.parent is request.root] or request.waiting
        chosen = max(known, key=lambda node: node.score)
        ready, first, second = host.past_commit(0, list(chosen.tokens[length:]), (1, 3), 8, floor=-20.0)
        count = min(8, len(ready))
        assert first and count and {node.tokens for node in second[:count]} == {node.tokens for node in ready[:count]}
        rows |= {node.row for node in second}
    assert rows == {0, 1}
    checked = host.num_checked
    host.step(2, 8)
    assert host.num_checked > checked


def test_what_cannot_go_on_says_so(make: Make, model: DraftModel) -> None:
    host = make(model)
    host.open(0, prompt(7))
    burst, seeds = host.burst(3, 8)
    pending = host.runner.launch(burst)
    assert pending.go_on(host.runner.shape.max_steps) is None
    host.merge(burst, seeds, pending.wait())
    assert pending.go_on(1) is None


def test_two_bursts_may_be_pending(make: Make, plain_model: DraftModel) -> None:
    host = make(plain_model)
    for row in range(2):
        host.open(row, prompt(7 + row, row))
    bursts = [host.burst(2, 8, rows=[row]) for row in range(2)]
    pending = [host.runner.launch(burst) for burst, _ in bursts]
    for (burst, seeds), launched in reversed(list(zip(bursts, pending, strict=True))):
        host.merge(burst, seeds, launched.wait())
        assert launched.done()
    assert host.num_checked > 4


def test_calls_take_effect_in_their_order(make: Make, plain_model: DraftModel) -> None:
    """A move that follows a launch does not disturb it, even where nothing has run yet."""
    host = make(plain_model)
    request = host.open(0, prompt(9))
    host.step(2, 8)
    host.open(1, prompt(5, 1))
    burst, seeds = host.burst(2, 8, rows=[0])
    pending = host.runner.launch(burst)
    slots = [slot for slot in request.nodes if slot != 0][:2]
    host.runner.move(0, slots, 0)
    host.close(1)
    host.open(1, prompt(6, 2))
    host.merge(burst, seeds, pending.wait())


def test_projected_features(make: Make, feature_model: DraftModel) -> None:
    from outrider.protocol.speculation import Features

    host = make(feature_model)
    raw = torch.randn(3, 2 * feature_model.hidden_size)
    expected = feature_model.project(raw)
    message = Features(1, 5, 3, True, raw.numpy().tobytes(), "float32")
    assert torch.equal(host.runner.project(message), expected)
    read = replace(message, data=b"", rows=torch.frombuffer(bytearray(message.data), dtype=torch.uint8))
    assert torch.equal(host.runner.project(read), expected)
    product = torch.randn(3, feature_model.feature_size)
    done = Features(1, 5, 3, True, product.numpy().tobytes(), "float32", projected=True)
    assert torch.equal(host.runner.project(done), product.to(feature_model.dtype))
    read = replace(done, data=b"", rows=torch.frombuffer(bytearray(done.data), dtype=torch.uint8))
    assert torch.equal(host.runner.project(read), product.to(feature_model.dtype))


def test_what_does_not_fit_is_refused(make: Make, model: DraftModel) -> None:
    host = make(model)
    host.open(0, prompt(6))
    with pytest.raises(ValueError, match="pages"):
        features = [torch.zeros(3, host.runner.shape.feature_size)] if host.lag else []
        host.runner.extend([Extent(1, [1, 2, 3], host.lag, features)])
