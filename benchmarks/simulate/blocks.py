"""Should a draft with a block head prepare for what a round may commit, or wait for the features of the commit?

A target's greedy texts are given, and decoded in rounds of trees from blocks with all features. After each round, two
things are measured: the value of a tree below the new root that is available at once, either continued from the
previous root's block, or from a block without the features that come with the commit; and how often the root is among
the likeliest nodes that were not verified, for which blocks could have been prepared. Then the texts are decoded by
policies that wait for the root's own block always, never, or if no nodes are left; speeds follow from given times.

python -m benchmarks.simulate.blocks --model SmolLM2-135M-Instruct --draft HEAD --prompts mt_bench.jsonl
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.simulate.accept import WrittenText, write_text
from benchmarks.split.load import read_prompts
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.attention.torch_backend import HeadSplit
from outrider.cache.kv import KVCache
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.drafters.heads import BlockHead
from outrider.models.loader import load_model
from outrider.models.store import resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.training.evaluate import load_drafter
from outrider_tools.training.rollout import CandidateRanker

_CPU = torch.device("cpu")
CANDIDATES, MOST_NODES = 16, 256
"""Most children of a node, and most nodes of a tree, in a draft service."""
ROUND_MS, SOONER_MS = 4.5, 0.6
"""A round of an 8B target on an H200 with its gap; the time that an answer without features and block saves."""
WAITS_MS = (0.6, 1.0, 1.5, 2.0, 3.0)
POLICIES = ("read on", "wait without nodes", "wait")

Tree = dict[int, "GuessedNode"]
"""Children by token."""


class GuessedNode:
    """A node of a tree: the score of its edge, and its children."""

    __slots__ = ("below", "edge")

    def __init__(self, edge: float) -> None:
        self.edge, self.below = edge, Tree()


def ranked(tree: Tree) -> Iterator[tuple[Tree, int]]:
    """Yield nodes by path score, best first, each as the children dict that holds it and its token."""
    order = count()
    heap = [(-node.edge, next(order), tree, token) for token, node in tree.items()]
    heapq.heapify(heap)
    while heap:
        score, _, above, token = heapq.heappop(heap)
        yield above, token
        below = above[token].below
        for child, node in below.items():
            heapq.heappush(heap, (score - node.edge, next(order), below, child))


def best(tree: Tree, most: int) -> Tree:
    """Return a tree of the `most` best nodes."""
    copies: dict[int, Tree] = {id(tree): {}}
    for (above, token), _ in zip(ranked(tree), range(most), strict=False):
        node = copies[id(above)][token] = GuessedNode(above[token].edge)
        copies[id(above[token].below)] = node.below
    return copies[id(tree)]


def walk(tree: Tree, text: Sequence[int]) -> tuple[int, Tree]:
    """Return how many tokens of the text a tree holds, and the children of the last one."""
    for number, token in enumerate(text):
        if token not in tree:
            return number, tree
        tree = tree[token].below
    return len(text), tree


def merge(tree: Tree, other: Tree) -> None:
    """Add the nodes of `other` to `tree`; nodes that exist already do not change."""
    for token, node in other.items():
        if token in tree:
            merge(tree[token].below, node.below)
        else:
            tree[token] = node


class SeenBlock(AttentionBackend, AttentionPlan):
    """Attention of one block, to a given context and to all of the block itself."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` are [layers, T, kv_heads, head_dim]."""
        self._keys, self._values = keys, values

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        self._split = HeadSplit(batch, kv, num_heads, rotary)
        return self

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        k, v = torch.cat((self._keys[layer], k)), torch.cat((self._values[layer], v))
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        weights = (torch.einsum("nkgd,tkd->nkgt", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("nkgt,tkd->nkgd", weights, v).flatten(1)


class BlockText:
    """A block head over one text. Positions are those of tokens."""

    def __init__(self, head: BlockHead, text: WrittenText) -> None:
        assert text.features is not None
        self.tokens, self.first_root = text.tokens, text.prompt_len - 1
        self._head, self._kv = head, head.new_kv(1)
        self._ranker = CandidateRanker(head, 0.0, 0, 0)
        self._context = head.context(head.project(text.features), torch.arange(len(text.features)))
        self._rows: dict[int, Tensor] = {}

    @cached_property
    def size(self) -> int:
        """Places of a block."""
        return self._head.block.size

    def block(self, start: int, root: int, seen: int, given: Tensor | None = None) -> Tensor:
        """Return rows [size, hidden] of a root's block, which also contains the text's tokens from `start` on.

        The block sees the true features of positions below `seen`, followed by the features `given`, [N, hidden].
        """
        head, known = self._head, self.tokens[start : root + 1]
        keys, values = (one[:, :seen] for one in self._context)
        if given is not None:
            more = head.context(given, torch.arange(seen, seen + len(given)))
            keys, values = torch.cat((keys, more[0]), 1), torch.cat((values, more[1]), 1)
        ids = torch.tensor(known + [head.block.mask_token] * (self.size - 1))
        batch = TokenBatch(ids, torch.arange(start, start + len(ids)))
        plan = SeenBlock(keys, values).plan(batch, self._kv, head.num_heads, head.rotary)
        stream = head.embed(ids)
        for layer in head.layers:
            stream = layer(stream, plan)
        return head.final_norm(stream)[len(known) - 1 :]

    def rows(self, root: int) -> Tensor:
        """Return the rows of the root's block with all features."""
        if root not in self._rows:
            self._rows[root] = self.block(root, root, root)
        return self._rows[root]

    def tree(self, rows: Tensor, block_root: int, root: int, most: int) -> Tree:
        """Return the best nodes below `root` in the block of `block_root`, which is `root` or an earlier token."""
        head, found, memory = self._head, Tree(), rows.new_zeros(1, self._head.state_size)
        place = root - block_root
        if place >= self.size:
            return found
        for before in range(place):
            _, memory = head.advance(torch.tensor([self.tokens[block_root + before]]), rows[before, None], memory)
        level = [(0.0, found, self.tokens[root])]
        scores: list[float] = []
        for row in rows[place:]:
            tokens = torch.tensor([token for _, _, token in level])
            said, left = head.advance(tokens, row.expand(len(level), -1), memory)
            edges = self._ranker.edges(head.logits(said), tokens).topk(CANDIDATES, 1)
            ids, parents, below = self._ranker.target_id(edges.indices).tolist(), [], []
            for parent, (score, above, _) in enumerate(level):
                for token, edge in zip(ids[parent], edges.values[parent].tolist(), strict=True):
                    node = above[token] = GuessedNode(edge)
                    below.append((score + edge, node.below, token))
                    parents.append(parent)
            scores = sorted([*scores, *(score for score, _, _ in below)], reverse=True)[:most]
            kept = [number for number, (score, _, _) in enumerate(below) if score >= scores[-1]]
            level, memory = [below[number] for number in kept], left[[parents[number] for number in kept]]
            if not level:
                break
        return best(found, most)

    def at_once(self, old: int, root: int, num_nodes: int) -> dict[str, Tree]:
        """Return trees below a root that lack features from the previous root `old` on; only the first one has all."""
        rows = self.rows(old)
        own_rows = rows[torch.arange(root - old).clamp(max=len(rows) - 1)]
        trees = {
            "own block, all features": (self.rows(root), root),
            "block before, read on": (rows, old),
            "own block, keys lacking": (self.block(root, root, old), root),
            "own block, tokens in it": (self.block(old, root, old), root),
            "own block, own rows": (self.block(root, root, old, own_rows), root),
            "block of last node": (self.block(root - 1, root - 1, old), root - 1),
        }
        return {name: self.tree(found, base, root, num_nodes) for name, (found, base) in trees.items()}


def measure_rounds(text: BlockText, num_nodes: int, found: dict[str, list[float]]) -> None:
    """Decode a text with all features. Note what would be available at once, and the rank of each new root."""
    root, tokens = text.first_root, text.tokens
    while True:
        tree = text.tree(text.rows(root), root, root, MOST_NODES)
        new = root
        for width in (2, 4, 8, 16, num_nodes):
            new = root + walk(best(tree, width), tokens[root + 1 :])[0] + 1
            if new >= len(tokens) - 1:
                return
            above = walk(tree, tokens[root + 1 : new])[1]
            places = (place for place, node in enumerate(ranked(tree)) if node[0] is above and node[1] == tokens[new])
            place = next(places, MOST_NODES)
            found[f"{width} verified"].append(new - root)
            for most in (1, 8, 16, 64):
                found[f"{width} verified, new root among next {most}"].append(place < width + most)
            found[f"{width} verified, new root in the tree"].append(place < MOST_NODES)
        for name, one in text.at_once(root, new, num_nodes).items():
            found[name].append(walk(one, tokens[new + 1 :])[0] + 1)
        root = new


def decode(text: BlockText, policy: str, num_nodes: int) -> Iterator[tuple[int, str]]:
    """Yield for each round the tokens that it commits, and what it waited for before: "", "block" or "answer"."""
    tokens, root, block = text.tokens, text.first_root, text.first_root
    tree, waited = text.tree(text.rows(root), root, root, MOST_NODES), "block"
    while True:
        new = root + walk(best(tree, num_nodes), tokens[root + 1 :])[0] + 1
        yield new - root, waited
        if new >= len(tokens) - 1:
            return
        if waited != "block":  # the root's block came during the round
            block = root
            merge(tree, text.tree(text.rows(root), root, root, MOST_NODES))
        steps, left = walk(tree, tokens[root + 1 : new + 1])
        tree = left if steps == new - root else Tree()
        root, waited = new, ""
        if policy == "wait" or (not tree and policy == "wait without nodes"):
            tree, waited, block = text.tree(text.rows(root), root, root, MOST_NODES), "block", root
        elif not tree:
            tree, waited = text.tree(text.rows(block), block, root, MOST_NODES), "answer"


def report(found: dict[str, list[float]], played: dict[str, list[tuple[int, str]]], label: str) -> list[Row]:
    """Return all figures."""
    rows = [Row(f"{label} {name}", "mean", sum(values) / len(values), "") for name, values in found.items()]
    for policy, turns in played.items():
        case = f"{label} {policy}"
        length = sum(number for number, _ in turns) / len(turns)
        shares = {kind: sum(one == kind for _, one in turns) / len(turns) for kind in ("block", "answer")}
        rows.append(Row(case, "accept_length", length, "tokens"))
        rows += [Row(case, f"rounds_that_wait_for_{kind}", share, "ratio") for kind, share in shares.items()]
        for wait in WAITS_MS:
            taken = ROUND_MS + shares["block"] * wait + shares["answer"] * max(wait - SOONER_MS, 0.3)
            rows.append(Row(case, f"tokens_per_second_{wait:g}_ms", 1e3 * length / taken, "tokens/s"))
    return rows


@torch.inference_mode()
def main() -> None:
    """Measure, print and write the figures."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--algorithm", default="DSPARK", choices=("DFLASH", "DSPARK"))
    parser.add_argument("--draft", required=True, help="folder of the head")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=3, help="of the prompts each so many-th is answered")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=32, help="of a round")
    parser.add_argument("--label", default="smollm2-135m", help="the model's name in results")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    folder = resolve_model(told.model)
    target = load_model(folder, torch.float32, _CPU)
    head = load_drafter(told.algorithm, Path(told.draft), folder, target)
    if not isinstance(head, BlockHead):
        raise SystemExit("--draft: is no block head")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found: dict[str, list[float]] = defaultdict(list)
    played: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for prompt in read_prompts(told.prompts)[:: told.every]:
        text = BlockText(head, write_text(target, tokenizer, prompt, told.max_tokens, head.feature_layers))
        measure_rounds(text, told.nodes, found)
        for policy in POLICIES:
            played[policy] += decode(text, policy, told.nodes)
        print(".", end="", flush=True)
    rows = report(found, played, f"{told.label} {told.algorithm.lower()} nodes={told.nodes} b1 fp32 greedy")
    for row in rows:
        print(f"{row.case:100s}{row.metric:32s}{row.value:9.3f}")
    if told.out:
        write_report(told.out, "blocks", cpu_name(), rows, ("torch", "transformers"))


if __name__ == "__main__":
    main()
