"""How much of a known text trees hold that a drafter grows best-first, from every root at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_tools.training.ranking import Ranking
from outrider_tools.training.rollout import Branches, TextDraft

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
    """int64 [R, W], place of the parent among the nodes that were run last."""


@torch.inference_mode()
def tree_accepts(
    draft: TextDraft, ranking: Ranking, shape: TreeShape, first_root: int = 1, all_roots: bool = True
) -> Tensor:
    """Accepted nodes after each root from `first_root` on, int64 [T]; 0 for those before.

    Without `all_roots` only those count that decoding from `first_root` comes to, one after the other: less work, and
    less of it at a time.

    The tree of a root is the `shape.nodes` nodes with the best path scores, found level by level: a node that is not
    among the best so far cannot be in the end, since scores only fall along a path, and is not run.
    """
    token_ids = draft.token_ids
    accepted = torch.zeros_like(token_ids)
    if not all_roots:
        root = max(draft.offset, first_root)
        while root < token_ids.shape[0] - 1:
            accepted[root] = _grow(draft, ranking, torch.tensor([root], device=token_ids.device), shape)[0]
            root += int(accepted[root]) + 1
        return accepted
    for start in range(max(draft.offset, first_root), token_ids.shape[0] - 1, CHUNK_ROOTS):
        roots = torch.arange(start, min(start + CHUNK_ROOTS, token_ids.shape[0] - 1), device=token_ids.device)
        accepted[roots] = _grow(draft, ranking, roots, shape)
    return accepted


def _grow(draft: TextDraft, ranking: Ranking, roots: Tensor, shape: TreeShape) -> Tensor:
    """Accepted nodes [R] of the trees of some roots."""
    num_roots = roots.shape[0]
    # The root itself is level 0: one node that is always there, run with the feature of its own row.
    level = _Level(
        draft.token_ids[roots].unsqueeze(1),
        torch.zeros(num_roots, 1, device=roots.device),
        torch.ones(num_roots, 1, dtype=torch.bool, device=roots.device),
        torch.arange(num_roots, device=roots.device).unsqueeze(1),
    )
    branches = Branches(draft, roots)
    features = branches.root_features
    scores = torch.empty(num_roots, 0, device=roots.device)
    on_text = torch.empty(num_roots, 0, dtype=torch.bool, device=roots.device)
    chosen = on_text
    for depth in range(shape.depth):
        places = level.scores.isfinite().flatten().nonzero()[:, 0]
        if not places.numel():
            break
        owners, parents = places // level.scores.shape[1], level.parents.flatten()[places]
        before = None if features is None else features[parents]
        rows, features = branches.run(level.tokens.flatten()[places], owners, before, parents)
        edges, ids = _candidates(draft, ranking, rows, roots[owners] + depth + 1, shape.branching)
        level = _children(level, places, edges, ids, draft.following(roots + depth + 1), shape.nodes)
        scores, on_text = torch.cat([scores, level.scores], 1), torch.cat([on_text, level.on_text], 1)
        best = scores.topk(min(shape.nodes, scores.shape[1]), 1)
        chosen = on_text.gather(1, best.indices) & best.values.isfinite()
        # What has fallen out of the best is not run.
        level.scores = torch.where(level.scores >= best.values[:, -1:], level.scores, float("-inf"))
    return chosen.sum(1)


def _candidates(
    draft: TextDraft, ranking: Ranking, rows: Tensor, positions: Tensor, branching: int
) -> tuple[Tensor, Tensor]:
    """Edge scores and target ids of the best children of N nodes, [N, branching] both."""
    edges, ids = [], []
    for place, logits in draft.logits(rows):
        found = ranking.edges(logits, positions[place]).topk(min(branching, logits.shape[1]), 1)
        edges.append(found.values)
        ids.append(ranking.target_id(found.indices))
    return torch.cat(edges), torch.cat(ids)


def _children(level: _Level, places: Tensor, edges: Tensor, ids: Tensor, following: Tensor, most: int) -> _Level:
    """The next level: the best `most` children of all nodes of a level, of which those at `places` were run."""
    num_roots, width = level.scores.shape
    count = edges.shape[1]
    all_edges = torch.full((num_roots * width, count), float("-inf"), device=edges.device)
    all_ids = torch.full((num_roots * width, count), -1, device=edges.device)
    runs = torch.zeros(num_roots * width, dtype=torch.int64, device=edges.device)
    all_edges[places], all_ids[places] = edges, ids
    runs[places] = torch.arange(places.shape[0], device=edges.device)
    scores = (level.scores.unsqueeze(2) + all_edges.view(num_roots, width, count)).flatten(1)
    best = scores.topk(min(most, scores.shape[1]), 1)
    parents = best.indices // count
    tokens = all_ids.view(num_roots, -1).gather(1, best.indices)
    on_text = level.on_text.gather(1, parents) & (tokens == following.unsqueeze(1)) & best.values.isfinite()
    return _Level(tokens, best.values, on_text, runs.view(num_roots, width).gather(1, parents))
