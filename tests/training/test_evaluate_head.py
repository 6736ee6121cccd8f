from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from naive_head import NaiveHead
from training_world import make_head, random_texts

from outrider.training.dense import target_states
from outrider.training.eagle3 import Eagle3Head
from outrider.training.evaluate import evaluate, teacher_forced
from outrider.training.target import Target
from outrider.training.texts import Texts
from outrider.training.trainer import Trainer, TrainerOptions
from outrider.training.tree import TreeShape, tree_accepts

SHAPE = TreeShape(nodes=9, depth=4, branching=3)


@pytest.fixture(scope="module")
def texts(target: Target) -> Texts:
    # Few different tokens, in a rhythm: what a head can half learn.
    random = np.random.default_rng(0)
    rows = [[int(x) for x in random.choice(4, 30, p=[0.6, 0.2, 0.1, 0.1]) + 3 + np.arange(30) % 3] for _ in range(5)]
    return Texts.join([row[:5] for row in rows], [row[5 : 30 - number] for number, row in enumerate(rows)])


@pytest.fixture(scope="module")
def trained(target: Target, texts: Texts) -> Eagle3Head:
    head = make_head(target, 259)
    wanted = torch.zeros(259)
    wanted[3:9] = 1
    with torch.no_grad():
        # The target is random and says other things than the texts: favour their tokens.
        head.lm_head.weight[wanted == 0] *= 0.3
    Trainer(target, head, random_texts(target, 4, 5, 20), TrainerOptions(steps=3, batch_tokens=128, unroll=2)).run()
    return head


def naive_tree(target: Target, head: Eagle3Head, ids: list[int], features: torch.Tensor, root: int) -> int:
    """Accepted nodes: best-first with a heap, one node at a time."""
    true = NaiveHead(target, head)
    for base in range(root - 1):
        true.run(ids[base + 1], true.feature(features[base]))
    heap = [(0.0, 0, true, ids[root], true.feature(features[root - 1]), ())]
    tree: set[tuple[int, ...]] = set()
    count = 0
    while heap and len(tree) < SHAPE.nodes + 1:
        score, _, chain, token, feature, path = heapq.heappop(heap)
        tree.add(path)
        if len(path) == SHAPE.depth:
            continue
        chain = chain.fork()
        own = chain.run(token, feature)
        edges, ids_of = chain.logits(own).log_softmax(0).topk(SHAPE.branching)
        for edge, draft_id in zip(edges.tolist(), ids_of.tolist(), strict=True):
            child = head.target_ids[draft_id].item()
            count += 1
            heapq.heappush(heap, (score - edge, count, chain, int(child), own, (*path, int(child))))
    accepted = 0
    while root + accepted + 1 < len(ids) and tuple(ids[root + 1 : root + accepted + 2]) in tree:
        accepted += 1
    return accepted


@torch.no_grad()
def test_trees_equal_a_heap(target: Target, trained: Eagle3Head, texts: Texts) -> None:
    found = []
    for number in (0, 3):
        ids = torch.from_numpy(texts.sequence(number)).long()
        features, _ = target_states(target.model, ids[None], trained.shape.feature_layers)
        accepted = tree_accepts(target, trained, ids, features[0], SHAPE)
        expected = [naive_tree(target, trained, ids.tolist(), features[0], root) for root in range(1, len(ids))]
        assert accepted[1:].tolist() == expected
        found += expected
    assert max(found) >= 2 and min(found) == 0


@torch.no_grad()
def test_evaluation_equals_decoding_in_rounds(target: Target, trained: Eagle3Head, texts: Texts) -> None:
    result = evaluate(target, trained, texts, depth=3, tree=SHAPE)
    hits, possible, rounds, tokens = [0.0] * 3, [0] * 3, 0, 0
    for number in range(len(texts)):
        ids = texts.sequence(number).tolist()
        first = int(texts.prompt_lens[number])
        features, _ = target_states(target.model, torch.tensor([ids]), trained.shape.feature_layers)
        true = NaiveHead(target, trained)
        runs = {}
        for root in range(1, len(ids)):
            feature = true.run(ids[root], true.feature(features[0, root - 1]))
            chain, right, run = true.fork(), True, 0
            for step in range(min(SHAPE.depth, len(ids) - 1 - root)):
                hit = chain.target_id(int(chain.logits(feature).argmax())) == ids[root + step + 1]
                right = right and hit
                run += right
                if step < 3 and root + step + 1 >= first:
                    hits[step] += hit
                    possible[step] += 1
                feature = chain.run(ids[root + step + 1], feature)
            runs[root] = run
        root = first - 1
        while root < len(ids) - 1:
            root += runs[root] + 1
            rounds += 1
        tokens += len(ids) - first
    assert result.rates == pytest.approx([hit / count for hit, count in zip(hits, possible, strict=True)])
    assert result.chain == pytest.approx(tokens / rounds)
    assert result.num_tokens == tokens
    assert result.tree >= result.chain > 1


@torch.no_grad()
def test_guesses_behind_the_end_are_no_hits(target: Target, trained: Eagle3Head, texts: Texts) -> None:
    ids = torch.from_numpy(texts.sequence(1)).long()[None]
    features, _ = target_states(target.model, ids, trained.shape.feature_layers)
    agree = teacher_forced(target, trained, ids, features, 4)
    assert agree.shape == (4, 1, ids.shape[1])
    for step in range(4):
        assert not agree[step, 0, ids.shape[1] - 1 - step :].any()
