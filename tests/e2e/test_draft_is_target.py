"""A draft model that is the target guesses all that is committed, and says so first: noise, positions and KV agree."""

from __future__ import annotations

import gc
import math
import random
from collections import deque
from collections.abc import Iterator
from queue import Queue
from types import FunctionType, ModuleType

import pytest
import torch
from harness import Answer, make_engine, run_all, tiny_model
from in_process_draft import InProcessDraft, drafter_of
from page_integrity import check_memory
from threaded_engine import ThreadedEngine
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.config.draft import DraftOptions
from outrider.drafting.base import CombinedDrafter
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.drafting.ngram.trie import Trie
from outrider.models.decoder import CausalLM
from outrider.models.drafters.heads import StandaloneDraft
from outrider.sampling.params import SamplingParams

VOCAB = 61
DEPTH = 5
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, seed=2**63 + 5, choice_index=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engines() -> Iterator[list[ThreadedEngine]]:
    made: list[ThreadedEngine] = []
    yield made
    for engine in made:
        engine.stop()
        assert not engine.scheduler.running
        check_memory(engine.memory)


def options_of(**changes: object) -> DraftOptions:
    values: dict[str, object] = {
        "speculative_algorithm": ("STANDALONE",),
        "speculative_num_steps": DEPTH,
        "min_path_probability": 0.0,
        "max_requests": 4,
        "device": "cpu",
    }
    return DraftOptions(**values | changes)  # type: ignore[arg-type]


def prompts(count: int, length: int = 20) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def serve(
    engines: list[ThreadedEngine], model: CausalLM, options: DraftOptions, turns: int = 1000, **limits: object
) -> tuple[ThreadedEngine, InProcessDraft]:
    engine = make_engine(model, **limits)
    engines.append(engine)
    draft = InProcessDraft(engine, drafter_of(StandaloneDraft(model, ""), options), options, turns)
    engine.start()
    return engine, draft


@pytest.fixture(scope="module")
def plain(model: CausalLM) -> dict[bool, list[list[int]]]:
    """What the prompts are answered without speculation, greedily and not."""
    engine = make_engine(model)
    engine.start()
    try:
        return {
            sampling is GREEDY: [
                answer.token_ids
                for answer in run_all(
                    engine, [(each, sampling) for each in prompts(3)], width=1, speculate=False, max_tokens=60
                )
            ]
            for sampling in (GREEDY, SAMPLED)
        }
    finally:
        engine.stop()


def lengths(answer: Answer) -> list[int]:
    """Tokens of each update."""
    return [len(update.token_ids) for update in answer.updates if update.token_ids]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [1, 3])
def test_in_lockstep_every_round_accepts_a_whole_chain(
    engines: list[ThreadedEngine],
    model: CausalLM,
    plain: dict[bool, list[list[int]]],
    sampling: SamplingParams,
    width: int,
) -> None:
    options = options_of(lockstep=True, speculative_eagle_topk=1)
    engine, draft = serve(engines, model, options, lockstep=True, max_hold_seconds=5.0, max_nodes=DEPTH * width)
    jobs = [(prompt, sampling) for prompt in prompts(3)]
    answers = run_all(engine, jobs, width=width, max_tokens=60)
    assert [answer.token_ids for answer in answers] == plain[sampling is GREEDY]
    for answer in answers:
        assert lengths(answer)[1:-1] == [DEPTH + 1] * (len(lengths(answer)) - 2), lengths(answer)
    assert set(draft.committed) == {0}


@pytest.mark.parametrize(
    ("topk", "width", "sampling"), [(1, 1, GREEDY), (1, 3, SAMPLED), (3, 1, SAMPLED), (3, 3, GREEDY)]
)
def test_ahead_of_verify_every_committed_token_was_the_best_child(
    engines: list[ThreadedEngine],
    model: CausalLM,
    plain: dict[bool, list[list[int]]],
    sampling: SamplingParams,
    width: int,
    topk: int,
) -> None:
    options = options_of(speculative_num_steps=0, speculative_eagle_topk=topk)
    engine, draft = serve(engines, model, options, max_nodes=8 * width)
    jobs = [(prompt, sampling) for prompt in prompts(3)]
    answers = run_all(engine, jobs, width=width, max_tokens=60)
    assert [answer.token_ids for answer in answers] == plain[sampling is GREEDY]
    assert set(draft.committed) == {0}


class NotingHead(StandaloneDraft):
    """A drafter of features that looks whether each it is given made the target choose the token beside it.

    The target's feature is its output after the last norm, which its logits are made of. Of its own it says nothing.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model, "")
        self.hidden_size = self.feature_size = model.config.hidden_size
        self.feature_layers = (model.config.num_layers + 1,)
        self.fit: dict[int, list[bool]] = {}
        """By KV position, for tokens that came with true features."""

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        assert features is not None
        chosen = self.model.logits(features).argmax(1)
        for place, position in enumerate(batch.positions.tolist()):
            if features[place].any():
                self.fit.setdefault(position, []).append(bool(chosen[place] == batch.token_ids[place]))
        rows, _ = super().forward(batch, None, kv, attention)
        return rows, torch.zeros_like(features)


@pytest.mark.parametrize("lockstep", [True, False])
def test_features_come_with_the_token_behind_them(
    engines: list[ThreadedEngine], model: CausalLM, plain: dict[bool, list[list[int]]], lockstep: bool
) -> None:
    head, prompt, count = NotingHead(model), prompts(3)[0], 60
    options = options_of(speculative_algorithm=("EAGLE3",), lockstep=lockstep, max_requests=1)
    engine = make_engine(model, lockstep=lockstep, max_hold_seconds=5.0, max_nodes=16)
    engines.append(engine)
    draft = InProcessDraft(engine, drafter_of(head, options), options)
    engine.start()
    # Requests speculate once their features are stored and the stream is open.
    for length in (3, 3, 3):
        run_all(engine, [(prompt[:length], GREEDY)], max_tokens=4)
    head.fit.clear()
    answers = run_all(engine, [(prompt, GREEDY)], max_tokens=count)
    assert answers[0].token_ids == plain[True][0]
    # The token at position p has its KV at p - 1; the last round's features are of no use to anybody.
    behind = {position: fit for position, fit in head.fit.items() if position >= len(prompt) - 1}
    assert len(behind) > count - 10, sorted(behind)
    assert all(all(fit) for fit in behind.values()), behind
    # Ahead of verify, trees may come too late for every round where the machine has other work.
    assert answers[0].num_accepted > 0 or not lockstep
    assert draft.num_features > count


def held_by(*roots: object) -> int:
    """Objects and entries of containers that can be reached; what lies in tries of texts, which are to grow, aside."""
    seen, waiting, count = set[int](), list(roots), 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, Trie | Tensor | type | ModuleType | FunctionType | str | bytes):
            continue
        seen.add(id(one))
        count += 1 + (len(one) if isinstance(one, list | dict | set | deque) else 0)
        waiting += [below for below in gc.get_referents(one) if gc.is_tracked(below)]
    return count


def test_requests_that_have_ended_leave_nothing_in_either_engine(
    engines: list[ThreadedEngine], model: CausalLM
) -> None:
    options = options_of(speculative_algorithm=("EAGLE3", "NGRAM"))
    engine = make_engine(model, max_nodes=16, keep_prefixes=False)
    engines.append(engine)
    head = NotingHead(model)
    drafter = CombinedDrafter([drafter_of(head, options), NgramDrafter(options)])
    draft = InProcessDraft(engine, drafter, options, turns=6)
    engine.start()

    def held_after(jobs: list[tuple[list[int], SamplingParams]]) -> int:
        run_all(engine, jobs, max_tokens=12)
        counts: Queue[int] = Queue()

        def look() -> None:
            if engine.drafts._requests or len(draft.requests):
                engine.ask(look)
                return
            draft.committed.clear()
            head.fit.clear()
            draft.requests.growth.work(math.inf)
            counts.put(held_by(engine.drafts, engine.scheduler, engine.features, engine.grammars, draft.requests))

        engine.ask(look)
        return counts.get(timeout=20)

    jobs = [(prompt, sampling) for prompt in prompts(60) for sampling in (GREEDY, SAMPLED)]
    before = held_after(jobs[:40])
    assert draft.num_features and draft.requests.growth.grown.total()
    assert held_after(jobs[40:]) < before + 40, "something of 80 requests has stayed"
