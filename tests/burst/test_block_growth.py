"""Trees of a block head on a CPU: each node's score is the plain formulas' after its path, from one block a commit."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from growth_rig import GREEDY, Verify
from integrity import check_forest
from test_features_with_model import send_features
from test_growth_with_model import Service
from tiny_drafts import seen_positions
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "models" / "drafters"))

from chains import load
from tiny_blocks import BLOCK, DEEPSPEC_FIELDS, HIDDEN, LAYERS, VOCAB, dspark_tensors, plain_block, plain_logits
from tiny_heads import Tensors, save_head

from outrider.drafting.model.burst import Extent
from outrider.drafting.model.burst_grower import BurstGrower
from outrider.drafting.model.context import WHOLE, cut_context
from outrider.models.drafters.heads import BlockHead
from outrider.protocol.speculation import Close, Grow
from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams


@pytest.fixture(params=["vanilla", "rnn"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_head(
    folder: Path, kind: str, fields: Mapping[str, Any] | None = None, **options: Any
) -> tuple[BlockHead, Tensors]:
    tensors = dspark_tensors(kind)
    save_head(folder, DEEPSPEC_FIELDS | {"markov_head_type": kind, **(fields or {})}, tensors)
    head = load("DSPARK", speculative_draft_model_path=str(folder), **options)
    assert isinstance(head, BlockHead)
    return head, tensors


def raw_features(tokens: list[int], count: int) -> Tensor:
    """As `send_features` sends them."""
    import numpy as np

    rows = [np.random.default_rng((position, tokens[position])).normal(size=2 * HIDDEN) for position in range(count)]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def edge(head: BlockHead, logits: Tensor, sampling: SamplingParams, position: int, token: int) -> float:
    scale = head.edge_scale
    if sampling.temperature > 0:
        noise = torch.from_numpy(gumbel(sampling.seed, 0, position, vocab_size=VOCAB))
        scores = scale.log_q * logits + scale.noise * sampling.temperature * noise
        return float(scores.log_softmax(0)[token])
    return float((scale.log_q * logits).log_softmax(0)[token])


Held = dict[tuple[int, ...], float]


def survivors(held: Held, committed: list[int]) -> Held:
    """What is left of a tree below a commit."""
    count = len(committed)
    return {path[count:]: score for path, score in held.items() if list(path[:count]) == committed and path[count:]}


def check(
    head: BlockHead, tensors: Tensors, kind: str, request: Verify, sampling: SamplingParams, seen: Tensor, old: Held
) -> int:
    """All nodes that verify holds but for `old` ones, which do not change; returns how many there are."""
    tokens = request.tokens
    length = len(tokens) - 1
    rows = plain_block(tensors, tensors["embed_tokens.weight"], raw_features(tokens, length), tokens[-1], seen)
    held = request.held()
    for path, score in held.items():
        assert path in old or len(path) <= BLOCK
        logits = plain_logits(tensors, tensors["lm_head.weight"], rows, [tokens[-1], *path[:-1]], kind)[-1]
        wanted = old.get(path, edge(head, logits, sampling, length + len(path), path[-1]))
        assert score == pytest.approx(wanted, abs=2e-3), path
    return len(held.keys() - old.keys())


def check_tree_slots(service: Service) -> None:
    """Entries are there once, and a slot is live for one of them or for a committed token. No burst may be pending."""
    (grower,) = service.requests.growth.growers
    assert isinstance(grower, BurstGrower)
    forest = grower._forest
    check_forest(forest)
    count = forest.entries.count
    for row, context in grower._batch_manager.rows.items():
        held = {slot for slot, _ in context.uncached}
        held |= set(forest.entries.slots[:count][forest.entries.rows[:count] == row].tolist())
        assert set(forest.slots.live[row].nonzero()[0].tolist()) <= held


SAMPLED = SamplingParams(temperature=0.8, seed=5)


@pytest.mark.parametrize(
    ("sampling", "runner", "ahead"),
    [
        *((GREEDY, "torch", "auto"), (GREEDY, "cuda", "always")),
        *((SAMPLED, "torch", "always"), (SAMPLED, "cuda", "auto")),
    ],
)
def test_a_tree_is_read_from_one_block_after_each_commit(
    tmp_path: Path, kind: str, sampling: SamplingParams, runner: str, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead, children of a new root are first those of the block before, to which its own block adds."""
    # The kernels' references where there is no GPU.
    on_gpu = runner == "cuda" and torch.cuda.is_available()
    head, tensors = make_head(tmp_path, kind, device=torch.device("cuda" if on_gpu else "cpu"))
    monkeypatch.setattr("test_growth_with_model.CREDIT", 24 if ahead == "auto" else 64)
    service, draw = Service(head, 128, kind=runner, draft_ahead=ahead), random.Random(4)
    request = service.open(0, [draw.randrange(VOCAB) for _ in range(12)], sampling)
    other = service.open(1, [draw.randrange(VOCAB) for _ in range(5)], sampling)
    sent = {0: 0, 1: 0}
    old: dict[int, Held] = {0: {}, 1: {}}
    num_new = 0
    for number in range(8):
        is_late = ahead == "always" and number in (4, 5)
        for one in () if is_late else (request, other):
            send_features(service, one, sent[one.number], len(one.tokens) - 1, 2 * HIDDEN)
            sent[one.number] = len(one.tokens) - 1
        service.settle()
        assert not service.requests.declines
        for one in (request, other):
            whole = torch.arange(len(one.tokens) - 1)
            found = 0 if is_late else check(head, tensors, kind, one, sampling, whole, old[one.number])
            num_new += found
            assert found or is_late or (ahead == "always" and old[one.number])
            assert max(map(len, one.held()), default=0) <= BLOCK + 3
            paths = sorted(path for path in one.held() if len(path) <= 3) or [(5, 6)]
            committed = [draw.randrange(VOCAB) for _ in range(9)] if number == 4 else list(draw.choice(paths))
            old[one.number] = survivors(one.held(), committed)
            service.commit(one, committed)
            if ahead == "always":
                service.settle()
                old[one.number] = one.held()
    assert num_new > 100


@pytest.mark.parametrize("runner", ["torch", "cuda"])
def test_on_a_gpu_a_lone_request_has_one_answer_to_a_commit_of_the_best_nodes_of_its_own_block(
    tmp_path: Path, kind: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify is not to go on with what the block before says, so nothing is said until the features have come."""
    on_gpu = runner == "cuda" and torch.cuda.is_available()
    head, tensors = make_head(tmp_path, kind, device=torch.device("cuda" if on_gpu else "cpu"))
    monkeypatch.setattr("test_growth_with_model.CREDIT", 128)
    service, draw = Service(head, 256, kind=runner), random.Random(4)
    request, received = service.open(0, [draw.randrange(VOCAB) for _ in range(12)], GREEDY), service.peer.received
    service.settle()
    sent = 0
    old: Held = {}
    for number in range(6):
        service.grow()
        assert not received
        send_features(service, request, sent, len(request.tokens) - 1, 2 * HIDDEN)
        sent = len(request.tokens) - 1
        service.grow()
        (answer,) = received
        assert isinstance(answer, Grow) and answer.acked_len == len(request.tokens)
        service.settle()
        found = check(head, tensors, kind, request, GREEDY, torch.arange(sent), old)
        assert found == len(answer.token_ids) == 32
        assert service.requests.growth.idle
        paths = sorted(path for path in request.held() if len(path) <= 2)
        committed = [draw.randrange(VOCAB) for _ in range(9)] if number == 3 else list(draw.choice(paths))
        old = survivors(request.held(), committed)
        service.commit(request, committed)
    service.grow()
    assert not received
    service.open(1, [draw.randrange(VOCAB) for _ in range(5)], GREEDY)
    service.grow()
    assert {message.request for message in received if isinstance(message, Grow)} == {0, 1}, "both grow ahead"


@pytest.mark.parametrize("num_turns", [1, 2])
@pytest.mark.parametrize("runner", ["torch", "cuda"])
def test_what_hangs_below_a_root_that_is_run_again_is_there_once(tmp_path: Path, runner: str, num_turns: int) -> None:
    """Features that come late make a root bring its children again, in the burst that may be given them, too."""
    on_gpu = runner == "cuda" and torch.cuda.is_available()
    head, _ = make_head(tmp_path, "vanilla", device=torch.device("cuda" if on_gpu else "cpu"))
    service, draw = Service(head, 128, branching=8, kind=runner, draft_ahead="always"), random.Random(4)
    requests = [service.open(number, [draw.randrange(VOCAB) for _ in range(12)], GREEDY) for number in (0, 1)]
    sent = 0
    for _ in range(5):
        for one in requests:
            send_features(service, one, sent, len(one.tokens) - 1, 2 * HIDDEN)
        sent = len(requests[0].tokens) - 1
        service.settle()
        check_tree_slots(service)
        assert not sum(one.mirror.dropped["duplicate"] for one in requests)
        for one in requests:
            service.commit(one, list(draw.choice([path for path in sorted(one.held()) if len(path) == 2])))
        for _ in range(num_turns):
            service.requests.growth.grow(0.0, lambda: True)


@pytest.mark.parametrize("runner", ["torch", "cuda"])
def test_a_request_is_guessed_nothing_by_the_block_of_one_that_ended(tmp_path: Path, runner: str) -> None:
    """Its root runs before its own features came, at a position that the block in its row has guesses for."""
    on_gpu = runner == "cuda" and torch.cuda.is_available()
    head, tensors = make_head(tmp_path, "vanilla", device=torch.device("cuda" if on_gpu else "cpu"))
    service, draw = Service(head, 128, kind=runner, draft_ahead="always"), random.Random(4)
    first = service.open(0, [draw.randrange(VOCAB) for _ in range(12)], GREEDY)
    send_features(service, first, 0, 11, 2 * HIDDEN)
    service.settle()
    assert first.held()
    service.requests.handle(service.peer, Close(0))
    second = service.open(1, [draw.randrange(VOCAB) for _ in range(12)], GREEDY)
    send_features(service, second, 0, 10, 2 * HIDDEN)
    service.settle()
    assert second.mirror.acked_len == 12 and not second.held()
    send_features(service, second, 10, 11, 2 * HIDDEN)
    service.settle()
    assert check(head, tensors, "vanilla", second, GREEDY, torch.arange(11), {}) > 5


def test_a_window_of_the_checkpoint_bounds_what_a_block_sees(tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 6}
    head, tensors = make_head(tmp_path, "vanilla", sliding)
    service, draw = Service(head), random.Random(4)
    request = service.open(0, [draw.randrange(VOCAB) for _ in range(20)], GREEDY)
    sent = 0
    old: Held = {}
    for _ in range(4):
        send_features(service, request, sent, len(request.tokens) - 1, 2 * HIDDEN)
        length = sent = len(request.tokens) - 1
        service.settle()
        seen = torch.arange(length - 6, length)
        assert check(head, tensors, "vanilla", request, GREEDY, seen, old) > 5
        committed = list(max(request.held(), key=len))[:2]
        old = survivors(request.held(), committed)
        service.commit(request, committed)


@pytest.mark.parametrize("runner", ["torch", "cuda"])
def test_of_a_long_context_a_block_sees_the_first_tokens_and_the_last(
    tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever pieces its features come in; contexts that are not long are seen as they are."""
    head, tensors = make_head(tmp_path, "vanilla", speculative_draft_window_size=20)
    service, draw = Service(head, 128, kind=runner), random.Random(4)
    request = service.open(0, [draw.randrange(VOCAB) for _ in range(75)], GREEDY)
    other = service.open(1, [draw.randrange(VOCAB) for _ in range(30)], GREEDY)
    cut = cut_context(WHOLE, 73, head.window, service.page_size)
    assert cut.gap > 20
    grower = cast(BurstGrower, service.requests.growth.growers[0])
    extend, extended = grower._runner.extend, list[int]()

    def spy(extents: Sequence[Extent]) -> None:
        extended.extend(len(extent.tokens) for extent in extents)
        extend(extents)

    monkeypatch.setattr(grower._runner, "extend", spy)
    old: dict[int, Held] = {0: {}, 1: {}}
    sent = {0: 0, 1: 0}
    for places in ((0, 5), (5, 13), (13, 40), (40, 60)):
        send_features(service, request, *places, 2 * HIDDEN)
        service.settle()
        sent[0] = places[1]
    for _ in range(4):
        for one, known in ((request, cut), (other, WHOLE)):
            length = len(one.tokens) - 1
            send_features(service, one, sent[one.number], length, 2 * HIDDEN)
            sent[one.number] = length
            service.settle()
            assert not service.requests.declines
            seen = torch.tensor(seen_positions(known, length - known.gap))
            assert check(head, tensors, "vanilla", one, GREEDY, seen, old[one.number]) > 5
        for one in (request, other):
            committed = list(max(one.held(), key=len))[:2]
            old[one.number] = survivors(one.held(), committed)
            service.commit(one, committed)
    assert grower.take_counts()["prompt_tokens"] == sum(extended)


def test_a_chain_is_a_tree_of_one_child(tmp_path: Path) -> None:
    head, tensors = make_head(tmp_path, "rnn")
    service, draw = Service(head, branching=1), random.Random(4)
    request = service.open(0, [draw.randrange(VOCAB) for _ in range(12)], GREEDY)
    send_features(service, request, 0, len(request.tokens) - 1, 2 * HIDDEN)
    service.settle()
    length = len(request.tokens) - 1
    rows = plain_block(
        tensors, tensors["embed_tokens.weight"], raw_features(request.tokens, length), request.tokens[-1]
    )
    path: list[int] = []
    while len(path) < max(map(len, request.held())):
        logits = plain_logits(tensors, tensors["lm_head.weight"], rows, [request.tokens[-1], *path], "rnn")[-1]
        path.append(int(logits.argmax()))
    assert request.held().keys() == {tuple(path[:end]) for end in range(1, len(path) + 1)}
