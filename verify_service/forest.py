"""The trees of a round side by side, so that choosing among all their nodes takes as many operations as for one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.tree.mirror import TreeMirror
from verify_service.round import Nodes


class Forest:
    """Nodes of many trees, tree after tree and parents first in each.

    `log_probs`, float64 [N], are their path scores; a node deeper than its tree's limit has -inf. It never rises from
    parent to child, so the best nodes always come with their parents, ties going to the lower index.
    """

    def __init__(self, mirrors: Sequence[TreeMirror], depth_limits: Sequence[int]) -> None:
        """`depth_limits[i]`: how deep below its root nodes of mirror i may be taken."""
        scores: list[NDArray[np.float64]] = []
        nodes: list[NDArray[np.int64]] = []
        counts: list[int] = []
        for mirror in mirrors:
            first, end = mirror.root + 1, mirror.end
            scores.append(mirror.path_scores[first:end])
            nodes.append(mirror.nodes[:, first:end])
            counts.append(end - first)
        self._bounds = list(accumulate(counts, initial=0))
        self.log_probs: NDArray[np.float64] = np.empty(0)
        if not mirrors:
            return
        self._tokens, self._up, depths = np.concatenate(nodes, axis=1)
        root_depths = [mirror.root_depth for mirror in mirrors]
        per_tree = np.array([[mirror.root_score for mirror in mirrors], root_depths, depth_limits])
        root_score, root_depth, limit = per_tree.repeat(counts, axis=1)
        self._depths = depths - root_depth
        self.log_probs = np.concatenate(scores) - root_score
        self.log_probs[self._depths > limit] = -np.inf

    def take(self, chosen: NDArray[np.int64]) -> list[Nodes]:
        """What a round takes of each tree, given the indices of all that it takes, ascending and with their parents."""
        if not len(chosen):
            return [Nodes() for _ in self._bounds[1:]]
        depths = self._depths[chosen].astype(np.int64)
        cuts = chosen.searchsorted(self._bounds)
        places = chosen.searchsorted(chosen - self._up[chosen]) - cuts[:-1].repeat(np.diff(cuts))
        places[depths == 1] = -1
        tokens, parents, levels = self._tokens[chosen].tolist(), places.tolist(), depths.tolist()
        ends = cuts.tolist()
        return [Nodes(tokens[a:b], parents[a:b], levels[a:b]) for a, b in pairwise(ends)]

    def rows(self, index: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places, among the nodes of tree `index`, of those that were chosen of it; `chosen` as `take` has it."""
        first, end = self._bounds[index], self._bounds[index + 1]
        low, high = chosen.searchsorted([first, end])
        return chosen[low:high] - first
