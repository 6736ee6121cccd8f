"""Growth with a real model on a CPU: trees that lived through commits are those that a fresh start grows."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from growth_rig import GREEDY, Peer, Verify, shape

from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.burst import BurstResult
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.model.entries import BurstCollector
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.runner import BurstRunner, RunnerOptions
from outrider.drafting.model.torch_runner import TorchRunner
from outrider.drafting.requests import Requests
from outrider.models.drafters.base import DraftModel
from outrider.protocol.speculation import Commit, Open
from outrider.sampling.params import SamplingParams
from outrider.tree.mirror import TreeMirror

CREDIT = 24


class Service:
    """Requests of a real model."""

    def __init__(
        self, model: DraftModel, region: int = 64, branching: int = 4, kind: str = "torch", **options: Any
    ) -> None:
        make: Any = TorchRunner if kind == "torch" else CudaRunner
        runner: BurstRunner = make(
            model,
            shape(
                max_context=128,
                branching=branching,
                feature_size=model.feature_size,
                region=region,
                has_blocks=model.block_bytes > 0,
                window=model.window,
            ),
            TorchAttention() if kind == "torch" else TritonAttention(),
            RunnerOptions(),
        )
        if isinstance(runner, CudaRunner):
            runner.capture()
        draft_options = DraftOptions(max_positions=100, min_path_probability=0.0, **options)
        self.page_size = runner.shape.page_size
        self.requests = Requests(ModelDrafter(runner, ("standalone",), Needs()), draft_options)
        self.peer = Peer()
        self.peer.vocab_size = model.target_vocab_size
        self.held: dict[int, Verify] = {}

    def open(self, number: int, tokens: list[int], sampling: SamplingParams) -> Verify:
        request = Verify(number, list(tokens))
        request.mirror = TreeMirror(request.tokens, self.peer.vocab_size, 256)
        self.held[number] = request
        self.requests.handle(self.peer, Open(number, list(tokens), len(tokens), sampling, CREDIT))
        return request

    def commit(self, request: Verify, tokens: list[int]) -> None:
        mirror, before = request.mirror, len(request.tokens)
        request.tokens += tokens
        mirror.commit()
        seen = (mirror.epoch, mirror.received_through, mirror.resolved_root)
        self.requests.handle(self.peer, Commit(request.number, before, list(tokens), *seen, CREDIT))

    def grow(self) -> None:
        """Until nothing is left to do; what is sent waits in `peer.received`."""
        while not self.requests.growth.idle:
            self.requests.growth.grow(math.inf, lambda: False)
        self.requests.send_nodes()

    def settle(self) -> None:
        self.grow()
        for message in self.peer.received:
            self.held[message.request].take(message)  # type: ignore[union-attr]
        self.peer.received.clear()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=5)])
def test_a_tree_that_lived_through_commits_scores_as_a_fresh_one(
    plain_model: DraftModel, sampling: SamplingParams
) -> None:
    service, draw = Service(plain_model), random.Random(1)
    request = service.open(0, [draw.randrange(plain_model.target_vocab_size) for _ in range(30)], sampling)
    service.settle()
    hits = 0
    for number in range(1, 7):
        paths = [path for path in request.held() if len(path) <= 3]
        path = list(draw.choice(paths))
        if number == 3:
            path.append(draw.randrange(plain_model.target_vocab_size))
        epoch = request.mirror.epoch
        service.commit(request, path)
        service.settle()
        hits += request.mirror.epoch == epoch
        assert service.requests.declines.total() == 0
        other = Service(plain_model)
        fresh = other.open(0, request.tokens, sampling)
        other.settle()
        both = request.held().keys() & fresh.held().keys()
        assert len(both) > 5
        for path in both:
            assert request.held()[path] == pytest.approx(fresh.held()[path], abs=2e-3)
    assert hits >= 4


@pytest.mark.parametrize(("topk", "region"), [(1, 256), (2, 256), (4, 256), (8, 256), (4, 128)])
def test_a_tree_in_lockstep_has_a_level_for_each_step(
    plain_model: DraftModel, topk: int, region: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"speculative_algorithm": ("STANDALONE",), "speculative_eagle_topk": topk}
    service, draw = Service(plain_model, region, lockstep=True, speculative_num_steps=8, **asked), random.Random(1)
    ran: list[bool] = []
    merge = DraftForest.merge

    def note(forest: DraftForest, collector: BurstCollector, result: BurstResult) -> None:
        ran.extend((result.picked >= 0).any(1).tolist())
        merge(forest, collector, result)

    monkeypatch.setattr(DraftForest, "merge", note)
    request = service.open(0, [draw.randrange(plain_model.target_vocab_size) for _ in range(30)], GREEDY)
    for _ in range(3):
        service.settle()
        assert ran == [True] * 8
        ran.clear()
        service.commit(request, list(draw.choice([path for path in request.held() if len(path) <= 3])))
