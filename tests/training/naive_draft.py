"""A draft model asked node by node as services would: KV slots of its own, one token at a time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import HostProposer
from outrider_tools.training.options import TreeShape


@dataclass
class Node:
    """A token that was run: the KV slots up to it, its logits, and its children's feature."""

    slots: list[int]
    logits: Tensor
    feature: Tensor | None


class NaiveDraft:
    """Over one text, with the target's raw features [T, layers * hidden] or None."""

    def __init__(self, model: DraftModel, ids: list[int], features: Tensor | None, params: SamplingParams) -> None:
        self.model = model
        self.ids = ids
        self.offset = 0 if features is None else 1
        self.features = None if features is None else model.project(features)
        self.kv = model.new_kv(8000)
        self.used = 0
        limits = (model.vocab_size, model.target_vocab_size)
        self.proposer = HostProposer(1, *limits, model.target_ids, scale=model.edge_scale)
        self.proposer.admit(0, params)
        slots: list[int] = []
        self.true: dict[int, Node] = {}
        """By place in the text: tokens that ran with the target's features."""
        for place in range(self.offset, len(ids)):
            feature = None if self.features is None else self.features[place - 1]
            self.true[place] = self.run(ids[place], feature, slots, is_true=True)
            slots = self.true[place].slots

    def run(self, token: int, feature: Tensor | None, before: list[int], *, is_true: bool = False) -> Node:
        """A token behind the slots of others, at the position that follows from their number."""
        slots = [*before, self.used]
        self.used += 1
        if isinstance(self.model, BlockHead):
            assert feature is not None
            return self.read_block(self.model, token, feature, slots, is_true)
        batch = ForwardBatch(
            torch.tensor([token]), torch.tensor([len(before)]), [Segment(1, torch.tensor(slots, dtype=torch.int64))]
        )
        given = None if feature is None else feature[None]
        rows, found = self.model.forward(batch, given, self.kv, TorchAttention())
        return Node(slots, self.model.logits(rows)[0].clone(), None if found is None else found[0].clone())

    def read_block(self, head: BlockHead, token: int, given: Tensor, slots: list[int], is_true: bool) -> Node:
        """`given` is the target's feature, with which a block begins, or what the parent left."""
        ids, size, memory = torch.tensor([token]), head.block.size, torch.zeros(1, head.state_size)
        if is_true:
            place = torch.tensor([len(slots) - 1])
            head.extend(TokenBatch(ids, place), given[None], torch.tensor(slots[-1:]), self.kv, TorchAttention())
            seen = torch.tensor([*slots, *range(self.kv.num_slots - size, self.kv.num_slots)])
            segment = Segment(size, seen, torch.ones(size, size, dtype=torch.bool))
            batch = ForwardBatch(*head.block_tokens(ids, place + 1), [segment])
            rows = head.forward_blocks(batch, self.kv, TorchAttention())
        else:
            rows = given[head.state_size :].view(-1, head.feature_size)
            memory = given[None, : head.state_size]
        row, memory = head.advance(ids, rows[:1], memory)
        left = torch.cat((memory[0], rows[1:].flatten(), torch.zeros(head.feature_size)))
        return Node(slots, head.logits(row)[0].clone(), left)

    def children(self, node: Node, count: int) -> list[tuple[int, float]]:
        """Token ids and edge scores, best first, as services rank them."""
        tokens = torch.empty(1, count, dtype=torch.int32)
        scores = torch.empty(1, count)
        # Of a head's row the token is one place further on than its position.
        position = len(node.slots) - 1 + self.offset
        logits = node.logits[None].clone()
        self.proposer(logits, torch.tensor([0]), torch.tensor([position]), tokens, scores)
        return list(zip(tokens[0].tolist(), scores[0].tolist(), strict=True))

    def forced(self, root: int, depth: int) -> list[bool]:
        """Whether the best guess is the text's token, 1 to `depth` tokens past the root."""
        node, found = self.true[root], []
        for step in range(depth):
            if root + step + 1 >= len(self.ids):
                found.append(False)
                continue
            token = self.ids[root + step + 1]
            found.append(self.children(node, 1)[0][0] == token)
            node = self.run(token, node.feature, node.slots)
        return found

    def tree(self, root: int, shape: TreeShape) -> int:
        """Accepted nodes of the tree below a root: best-first with a heap, one node at a time."""
        count = 0
        heap: list[tuple[float, int, tuple[int, ...], Node | None]] = [(0.0, 0, (), None)]
        tree: set[tuple[int, ...]] = set()
        while heap and len(tree) < shape.nodes + 1:
            cost, _, path, parent = heapq.heappop(heap)
            tree.add(path)
            if len(path) == shape.depth:
                continue
            node = self.true[root] if parent is None else self.run(path[-1], parent.feature, parent.slots)
            for token, edge in self.children(node, shape.branching):
                count += 1
                heapq.heappush(heap, (cost - edge, count, (*path, token), node))
        accepted = 0
        while root + accepted + 1 < len(self.ids) and tuple(self.ids[root + 1 : root + accepted + 2]) in tree:
            accepted += 1
        return accepted
