"""How much of a known text trees hold that a head grows best-first, from every root of a sequence at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.training.eagle3 import Eagle3Head
from outrider.training.target import Target

# Roots that are grown at a time.
CHUNK_ROOTS = 128


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of a tree: nodes below the root, edges from the root to a leaf, children of a node."""

    nodes: int = 32
    depth: int = 8
    branching: int = 8


@dataclass(slots=True)
class _Level:
    """Nodes of one depth: R roots, W places each. Places that hold no node have score -inf."""

    tokens: Tensor
    scores: Tensor
    on_text: Tensor
    parents: Tensor
    """[R, W] place in the level above."""


@torch.no_grad()
def tree_accepts(
    target: Target, head: Eagle3Head, token_ids: Tensor, features: Tensor, shape: TreeShape, first_root: int = 1
) -> Tensor:
    """Accepted nodes after each root from `first_root` on, int64 [T]; 0 for those before.

    The tree of a root is the `shape.nodes` nodes with the best path scores, found level by level: a node that is not
    among the best so far cannot be in the end, since scores only fall along a path, and is not run.

    Args:
        token_ids: int64 [T], the text; the tree's features are true up to the position before each root.
        features: [T, layers * hidden] of the target.
    """
    accepted = torch.zeros_like(token_ids)
    with target.autocast():
        context = _Context(target, head, token_ids, features)
        for start in range(max(1, first_root), token_ids.shape[0], CHUNK_ROOTS):
            roots = torch.arange(start, min(start + CHUNK_ROOTS, token_ids.shape[0]), device=token_ids.device)
            accepted[roots] = _grow(context, roots, shape)
    return accepted


class _Context:
    """The head's keys, values and features over the text with the target's features. Bases as in Eagle3Head."""

    def __init__(self, target: Target, head: Eagle3Head, token_ids: Tensor, features: Tensor) -> None:
        self.target = target
        self.head = head
        self.token_ids = token_ids
        self.feature = head.project(features)
        rows = head.midlayer.inputs(target.embed(token_ids[1:])[None], self.feature[None, :-1])
        positions = torch.arange(rows.shape[1], device=rows.device)
        angles = target.rotary.angles(positions, rows.dtype)
        _, k, v = head.midlayer.self_attn.project(rows, angles)
        self.k, self.v = k[0], v[0]

    def following(self, places: Tensor) -> Tensor:
        """Text tokens at places, -1 behind the end."""
        last = self.token_ids.shape[0] - 1
        return torch.where(places <= last, self.token_ids[places.clamp(max=last)], -1)


def _grow(context: _Context, roots: Tensor, shape: TreeShape) -> Tensor:
    """Accepted nodes [R] of the trees of some roots."""
    num_roots = roots.shape[0]
    # The root itself is level 0: one node that is always there.
    level = _Level(
        context.token_ids[roots].unsqueeze(1),
        torch.zeros(num_roots, 1, device=roots.device),
        torch.ones(num_roots, 1, dtype=torch.bool, device=roots.device),
        torch.zeros(num_roots, 1, dtype=torch.int64, device=roots.device),
    )
    feature = context.feature[roots - 1].unsqueeze(1)
    path = _Path(context, roots)
    scores = torch.empty(num_roots, 0, device=roots.device)
    on_text = torch.empty(num_roots, 0, dtype=torch.bool, device=roots.device)
    for depth in range(shape.depth):
        feature = path.run(level, feature, depth)
        level = _children(context, level, feature, context.following(roots + depth + 1), shape)
        scores, on_text = torch.cat([scores, level.scores], 1), torch.cat([on_text, level.on_text], 1)
        best = scores.topk(min(shape.nodes, scores.shape[1]), 1)
        # What has fallen out of the best is not run.
        level.scores = torch.where(level.scores >= best.values[:, -1:], level.scores, float("-inf"))
        feature = feature.gather(1, level.parents.unsqueeze(2).expand(-1, -1, feature.shape[2]))
    chosen = on_text.gather(1, best.indices) & best.values.isfinite()
    return chosen.sum(1)


def _children(context: _Context, level: _Level, feature: Tensor, following: Tensor, shape: TreeShape) -> _Level:
    """The next level: the best `shape.nodes` children of all nodes of a level."""
    head = context.head
    chances = head.lm_head(head.norm(feature)).float().log_softmax(-1)
    edges, draft_ids = chances.topk(min(shape.branching, chances.shape[2]), 2)
    scores = (level.scores.unsqueeze(2) + edges).flatten(1)
    best = scores.topk(min(shape.nodes, scores.shape[1]), 1)
    parents = best.indices // edges.shape[2]
    tokens = head.target_ids[draft_ids.flatten(1).gather(1, best.indices)]
    on_text = level.on_text.gather(1, parents) & (tokens == following.unsqueeze(1)) & best.values.isfinite()
    return _Level(tokens, best.values, on_text, parents)


class _Path:
    """Keys and values along the path of each node: what attention sees besides the text."""

    def __init__(self, context: _Context, roots: Tensor) -> None:
        self._context = context
        self._roots = roots
        # Keys of the text that a root's nodes see: bases before the root's own.
        places = torch.arange(context.k.shape[1], device=roots.device)
        self._hidden = places >= (roots - 1).unsqueeze(1)
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def run(self, level: _Level, feature: Tensor, depth: int) -> Tensor:
        """The head over a level's nodes [R, W]; `feature` [R, W, hidden] is of each node's parent."""
        context = self._context
        layer = context.head.midlayer
        rows = layer.inputs(context.target.embed(level.tokens), feature)
        positions = (self._roots - 1 + depth).unsqueeze(1).expand(rows.shape[:2]).reshape(-1)
        # One node a row: angles differ between roots.
        angles = context.target.rotary.angles(positions, rows.dtype)
        q, k, v = layer.self_attn.project(rows.flatten(0, 1).unsqueeze(0), angles)
        own_k, own_v = self._extend(level, k, v)
        size = (*rows.shape[:2], *own_k.shape[2:3], own_k.shape[4])
        q = q[0].transpose(0, 1).view(size)
        scale = q.shape[-1] ** -0.5
        text = torch.einsum("rwhd,htd->rwht", q, context.k).float() * scale
        text = text.masked_fill(self._hidden[:, None, None], float("-inf"))
        own = torch.einsum("rwhd,rwhjd->rwhj", q, own_k).float() * scale
        weights = torch.cat([text, own], -1).softmax(-1).to(own_v.dtype)
        text, own = weights.split((text.shape[-1], own.shape[-1]), -1)
        found = torch.einsum("rwht,htd->rwhd", text, context.v) + torch.einsum("rwhj,rwhjd->rwhd", own, own_v)
        return layer.finish(feature, found.transpose(1, 2))

    def _extend(self, level: _Level, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The nodes' own keys and values behind those of their parents: [R, W, H, depth + 1, D]."""
        num_roots, width = level.tokens.shape

        def join(before: Tensor | None, new: Tensor) -> Tensor:
            new = new[0].transpose(0, 1).reshape(num_roots, width, new.shape[1], 1, new.shape[3])
            if before is None:
                return new
            where = level.parents.view(num_roots, width, 1, 1, 1).expand(-1, -1, *before.shape[2:])
            return torch.cat([before.gather(1, where), new], 3)

        self._k, self._v = join(self._k, k), join(self._v, v)
        return self._k, self._v
