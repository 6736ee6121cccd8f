"""Trees of a block head that grow behind a round are those of the plain formulas, from one block a round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_block_growth import edge, make_head
from test_round_drafter import ROWS, Node, Target, admit, chosen, grown, make
from tiny_blocks import BLOCK, HIDDEN, VOCAB, plain_block, plain_logits
from tiny_heads import Tensors
from torch import Tensor

from outrider.drafting.model.round_drafter import RoundShape
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.params import SamplingParams


class BlockTarget(Target):
    """With features as verify has them, which the head projects."""

    def __init__(self, head: BlockHead, seed: int) -> None:
        super().__init__(head, seed, 2 * HIDDEN)
        self.head = head

    def rows(self, slots: Tensor) -> Tensor:
        return self.head.project(self.features.index_select(0, slots))


def expected_trees(
    target: BlockTarget, tensors: Tensors, kind: str, params: dict[int, SamplingParams], num_steps: int, width: int,
    branching: int, num_nodes: int,
) -> list[Node]:  # fmt: skip
    """The best nodes, grown one by one."""
    found: list[Node] = []
    blocks: dict[int, Tensor] = {}

    def expand(row: int, path: tuple[int, ...], score: float) -> None:
        text = target.texts[row]
        if len(path) >= BLOCK:
            return
        logits = plain_logits(tensors, tensors["lm_head.weight"], blocks[row], [text[-1], *path], kind)[-1]
        position = len(text) + len(path)
        edges = torch.tensor([edge(target.head, logits, params[row], position, token) for token in range(VOCAB)])
        found.extend((row, (*path, token), score + float(edges[token])) for token in edges.topk(branching)[1].tolist())

    for row, text in target.texts.items():
        raw = torch.stack([target.feature(row, position) for position in range(len(text) - 1)]).cpu()
        blocks[row] = plain_block(tensors, tensors["embed_tokens.weight"], raw, text[-1])
    return grown(target.texts, found, expand, num_steps, width)[:num_nodes]


@pytest.mark.parametrize(
    ("kind", "rows", "temperature"),
    [("vanilla", [2], 0.0), ("vanilla", [2, 0, 3], 0.8), ("rnn", [2], 0.8), ("rnn", [2, 0, 3], 0.0)],
)
def test_trees_behind_rounds_are_read_from_one_block_of_true_features(
    tmp_path: Path, kind: str, rows: list[int], temperature: float
) -> None:
    head, tensors = make_head(tmp_path, kind, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    target, drafter = make(head, 3, BlockTarget(head, 3))
    assert isinstance(target, BlockTarget)
    params = {row: SamplingParams(temperature=temperature, seed=11 + row) for row in rows}
    for row in rows:
        target.open(row, 5 + 3 * row, VOCAB)
        admit(target, drafter, row, params[row])
    shape = RoundShape(8, 1) if len(rows) == 1 else RoundShape(16, ROWS)
    branching = 5 if len(rows) == 1 else 3
    for number, (num_steps, num_nodes) in enumerate([(3, 8), (1, 4), (4, 12)]):
        target.commit({row: 1 + (row + number) % 3 for row in rows}, VOCAB, shape, set(rows))
        drafter.grow(shape, num_steps, num_nodes)
        wanted = expected_trees(target, tensors, kind, params, num_steps, 8, branching, num_nodes)
        found = chosen(drafter)
        assert [node[:2] for node in found] == [node[:2] for node in wanted]
        assert [node[2] for node in found] == pytest.approx([node[2] for node in wanted], abs=2e-3)


def test_nothing_grows_behind_a_block(tmp_path: Path) -> None:
    head, _ = make_head(tmp_path, "vanilla", device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    target, drafter = make(head, 3, BlockTarget(head, 3))
    target.open(1, 6, VOCAB)
    admit(target, drafter, 1, SamplingParams(temperature=0.0))
    target.commit({1: 2}, VOCAB, RoundShape(8, 1), {1})
    drafter.grow(RoundShape(8, 1), BLOCK + 3, 256)
    assert max(len(path) for _, path, _ in chosen(drafter)) <= BLOCK
