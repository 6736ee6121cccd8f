"""Chooses the tree nodes that a round takes: the likeliest of all trees, as many as pay by measured round times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice, pairwise
from math import exp
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.tree.mirror import TreeMirror
from verify_service.engine.round import Nodes

WIDTHS = (1, 4, 8, 16, 32, 64)
"""Token counts at which a forward on a CPU is measured; between two of them its time is within a tenth of a line."""

_MAX_SWEEPS = 6
"""Most sweeps over the widths at start."""
_SWEEP_SECONDS = 6.0
"""Time after which no third sweep begins: services that started along with this one have released the cores."""
_SETTLED = 0.85
"""A width is not measured again if its new time is above this part of its lowest time so far."""
_LEARN_RATE = 0.05
_MIN_WIDTH_CHANGE_GAIN = 1.02
_LEAST_CONTEXT_RATIO = 2
"""Least ratio of the longer context to the shorter for a measurement of what cached tokens cost."""
_CONTEXT_CHANGE = 0.01
"""Part of a round's time by which the time of its contexts must change before costs are computed again."""
_ROUNDS_PER_SLOPES = 16
"""Rounds between updates of slopes, which only say where to stop looking for nodes that pay. On a CPU an update takes
over a millisecond."""
_MAX_TABULATED = 256
"""Token counts above this are those of rounds with prompts. Their times are computed when they are asked for: to follow
all of them after each round would take longer the longer a prompt's chunks are, even after the last prompt."""
_NO_COUNTS = range(0)


def unpadded(num_tokens: int) -> int:
    """Return the width of a round that is not padded."""
    return num_tokens


class ContextCost(NamedTuple):
    """The cost of the cached tokens that a round reads."""

    seconds: float = 0.0
    """Seconds for each of them, over all requests, however many tokens the round has."""
    measured_at: int = 0
    """Number of cached tokens with which t was measured."""

    @classmethod
    def measured(cls, measure: Callable[[int, int], float], near: int, far: int) -> ContextCost:
        """Measure rounds of one token behind `near` and `far` cached ones; the cost is 0 if these are too close.

        `measure(tokens, context)`: returns seconds.
        """
        if far < _LEAST_CONTEXT_RATIO * near:
            return cls(0.0, near)
        close, distant = (min(measure(1, context) for _ in range(2)) for context in (near, far))
        return cls(max(distant - close, 0.0) / (far - near), near)


_NO_CONTEXT_COST = ContextCost()


class CostModel:
    """t(M): seconds of a round of M tokens, host work included. Measured at start, followed while serving.

    A round reads the cached tokens of its requests whatever else it does. That adds as much to t of every M, so behind
    long contexts more tokens cost less in proportion.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        widths: Sequence[int] = WIDTHS,
        width_of: Callable[[int], int] = unpadded,
        context_cost: ContextCost = _NO_CONTEXT_COST,
    ) -> None:
        """`width_of`: returns the number of tokens that a round is padded to, whose time it costs."""
        self._context_seconds, self._measured_at = context_cost
        self._beside = 0.0
        """Seconds that the contexts of present rounds take beyond those of the measurement."""
        self._widths = np.array(widths, np.float64)
        self._width_of = width_of
        # More tokens never cost less, and noise only ever adds: a narrower round needs no longer than a wider one took.
        self._seconds = np.minimum.accumulate(np.array(seconds, np.float64)[::-1])[::-1].copy()
        self._padded: NDArray[np.int64] = np.empty(0, np.int64)
        self._seconds_of: list[float] = []
        self._slopes: list[float] = []
        self._counts: dict[int, range] = {}
        self._num_observed = 0

    @classmethod
    def measured(
        cls,
        measure: Callable[[int], float],
        widths: Sequence[int] = WIDTHS,
        width_of: Callable[[int], int] = unpadded,
        context_cost: ContextCost = _NO_CONTEXT_COST,
    ) -> CostModel:
        """Time every width with `measure`, twice, and again those whose times became much lower.

        Other services start meanwhile on the same cores, and a width with a spoiled time would not be tried while
        serving.
        """
        start = monotonic()
        best = {width: measure(width) for width in widths}
        unsettled = list(widths)
        for sweep in range(1, _MAX_SWEEPS):
            if sweep > 1 and monotonic() - start > _SWEEP_SECONDS:
                break
            again = {width: measure(width) for width in unsettled}
            unsettled = [width for width, new in again.items() if new <= _SETTLED * best[width]]
            best |= {width: min(new, best[width]) for width, new in again.items()}
        return cls(list(best.values()), widths, width_of, context_cost)

    def width(self, tokens: int) -> int:
        """Return the number of tokens that a round of `tokens` is padded to."""
        return int(self._padded[tokens]) if tokens < len(self._padded) else max(self._width_of(tokens), tokens)

    def counts(self, width: int) -> range:
        """Return the token counts that are padded to `width`, as far as t of them has been asked for."""
        return self._counts.get(width, _NO_COUNTS)

    def seconds_from(self, tokens: int, count: int) -> tuple[list[float], list[float]]:
        """Return t of `tokens`, `tokens` + 1, ... (`count` values), and of each the least cost of any further token."""
        end = tokens + count
        if end > len(self._seconds_of):
            if end > _MAX_TABULATED:
                found = self._interpolate(np.array([self.width(number) for number in range(tokens, end)])).tolist()
                return found, _least_slopes(found)
            self.prepare(2 * end)
        return self._seconds_of[tokens:end], self._slopes[tokens:end]

    def seconds(self, tokens: int) -> float:
        """Return t of a round of so many tokens; past the last width it grows as it did between the last two."""
        return float(self._interpolate(np.array([self.width(tokens)]))[0])

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a round's wall time: the level of the curve and of contexts, and the shape near its width."""
        width = max(self.width(tokens), 1)
        ratio = min(max(seconds / self.seconds(tokens), 0.5), 2.0)
        near = np.exp(-np.abs(np.log2(self._widths / width)))
        self._seconds *= ratio ** (_LEARN_RATE * (0.5 + 0.5 * near))
        self._context_seconds *= ratio ** (0.75 * _LEARN_RATE)
        self._seconds = np.maximum.accumulate(self._seconds)
        self._num_observed += 1
        self._refresh(with_slopes=not self._num_observed % _ROUNDS_PER_SLOPES)

    def follow_contexts(self, num_cached: int) -> None:
        """Take account of the number of cached tokens that rounds read now, over all requests."""
        beside = self._context_seconds * max(num_cached - self._measured_at, 0)
        if abs(beside - self._beside) > _CONTEXT_CHANGE * (float(self._seconds[0]) + self._beside):
            self._beside = beside
            self._refresh(with_slopes=False)

    def prepare(self, most_tokens: int) -> None:
        """Compute t up to so many tokens, so that `seconds_from` need not."""
        if most_tokens > len(self._padded):
            self._padded = np.array([max(self._width_of(tokens), tokens) for tokens in range(most_tokens)])
            bounds = [*np.flatnonzero(np.diff(self._padded, prepend=-1)).tolist(), most_tokens]
            self._counts = {int(self._padded[first]): range(first, end) for first, end in pairwise(bounds)}
            self._refresh(with_slopes=True)

    def table(self) -> dict[int, float]:
        """Return the seconds of each width as known now, behind contexts as at the measurement."""
        return {int(width): float(value) for width, value in zip(self._widths, self._seconds, strict=True)}

    def _refresh(self, with_slopes: bool) -> None:
        self._seconds_of = self._interpolate(self._padded).tolist()
        if with_slopes:
            self._slopes = _least_slopes(self._seconds_of)

    def _interpolate(self, widths: NDArray[np.int64]) -> NDArray[np.float64]:
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._widths[-1] - self._widths[-2])
        beyond = np.maximum(widths - self._widths[-1], 0.0) * slope
        result: NDArray[np.float64] = np.interp(widths, self._widths, self._seconds) + (beyond + self._beside)
        return result


def _least_slopes(values: Sequence[float]) -> list[float]:
    """Return the least slope from each value to any later one, per place; 0 for the last."""
    slopes = [0.0] * len(values)
    # The lower convex hull of the values behind a place, its nearest corner last: the line to that is the flattest.
    hull: list[int] = []
    for place in range(len(values) - 1, -1, -1):
        while hull:
            corner = hull[-1]
            slopes[place] = (values[corner] - values[place]) / (corner - place)
            if len(hull) == 1 or slopes[place] < slopes[corner]:
                break
            hull.pop()
        hull.append(place)
    return slopes


class Choice(NamedTuple):
    """The nodes that a round takes, and what it is worth with them."""

    num_nodes: int
    """How many of the best nodes."""
    expected: float
    """Tokens that the round is expected to commit, over all requests."""
    seconds: float
    width: int
    """Tokens that the round is padded to; 0 without nodes."""


class Budget:
    """Picks the number of nodes n that maximises expected committed tokens over t(tokens + n)."""

    def __init__(self, cost: CostModel, max_nodes: int, fixed: bool = False) -> None:
        """`fixed`: rounds take `max_nodes` nodes whenever there are so many, whatever they cost."""
        self.cost = cost
        self.max_nodes = max_nodes
        self._fixed = fixed
        self._last_width = 0

    def choose(
        self, num_tokens: int, num_roots: int, chances: Iterable[float], most: int | None = None, beside: float = 0.0
    ) -> Choice:
        """Choose how many nodes a round takes.

        `num_tokens` tokens are computed anyway; `num_roots` of them are roots, which commit one token each for certain.
        `chances`: how likely the path to the best node of all requests is committed, then that to the next best, and so
        on, never rising; no more of them are read than could pay. At most `most` nodes are taken, and none without a
        chance. `beside`: seconds that the round takes for other things.

        Changing the width for a gain within the noise of t would only disturb the estimates: the best number of nodes
        for the last round's width is kept if it is about as good.
        """
        limit = self.max_nodes if most is None else max(min(most, self.max_nodes), 0)
        seconds, slopes = self.cost.seconds_from(num_tokens, limit + 1)
        same = self.cost.counts(self._last_width)
        first, end = max(same.start - num_tokens, 1), same.stop - num_tokens
        count, expected = 0, float(num_roots)
        # Rate, nodes and expected tokens.
        best = kept = (expected / (seconds[0] + beside), 0, expected)
        for chance in islice(chances, limit):
            if not chance:
                break
            count += 1
            expected += chance
            rate = expected / (seconds[count] + beside)
            if rate > best[0]:
                best = (rate, count, expected)
            if first <= count < end:
                if rate > kept[0] or not kept[1]:
                    kept = (rate, count, expected)
            elif count >= end and chance <= best[0] * slopes[count] and not self._fixed:
                break
        if self._fixed:
            best = (0.0, count, expected)
        elif kept[1] and kept[0] * _MIN_WIDTH_CHANGE_GAIN >= best[0]:
            best = kept
        _, num_nodes, expected = best
        width = self.cost.width(num_tokens + num_nodes) if num_nodes else 0
        return Choice(num_nodes, expected, seconds[num_nodes] + beside, width)

    def took(self, choice: Choice) -> None:
        """Note that a round runs with this choice; the next one departs from its width only for more than noise."""
        self._last_width = choice.width


_NO_NODES = Nodes()


class Forest:
    """Takes the likeliest node of all trees, then the next one, and so on: never a node before its parent.

    It looks only at nodes that it takes, their next siblings and their first children: children lie likeliest first.
    """

    def __init__(self, mirrors: Sequence[TreeMirror], depth_limits: Sequence[int]) -> None:
        """`depth_limits[i]`: how deep below its root nodes of mirror i may be taken."""
        self.mirrors = mirrors
        self._deepest = [mirror.root_depth + limit for mirror, limit in zip(mirrors, depth_limits, strict=True)]
        self._found: list[tuple[int, int]] = []

    def best(self) -> Iterator[float]:
        """Find node after node; yield how likely its path is committed, never rising. Ties go to the older node."""
        self._found = found = []
        of_trees: list[tuple[list[list[tuple[float, int]]], float, list[int], int]] = []
        heap: list[tuple[float, int, int, list[tuple[float, int]], int]] = []
        for tree, mirror in enumerate(self.mirrors):
            below, root_cost, deepest = mirror.below, mirror.root_cost, self._deepest[tree]
            of_trees.append((below, root_cost, mirror.depths, deepest))
            if mirror.has_nodes and mirror.root_depth < deepest:
                siblings = below[mirror.root]
                cost, slot = siblings[0]
                heap.append((cost - root_cost, tree, slot, siblings, 1))
        heapify(heap)
        while heap:
            cost, tree, slot, siblings, following = heap[0]
            below, root_cost, depths, deepest = of_trees[tree]
            if following < len(siblings):
                other, sibling = siblings[following]
                heapreplace(heap, (other - root_cost, tree, sibling, siblings, following + 1))
            else:
                heappop(heap)
            children = below[slot]
            if children and depths[slot] < deepest:
                other, child = children[0]
                heappush(heap, (other - root_cost, tree, child, children, 1))
            found.append((tree, slot))
            yield exp(-cost)

    def take(self, count: int) -> list[Nodes]:
        """Return the first `count` nodes that `best` found, tree by tree."""
        slots_of: list[list[int]] = [[] for _ in self.mirrors]
        for tree, slot in self._found[:count]:
            slots_of[tree].append(slot)
        return [
            _nodes(mirror, slots) if slots else _NO_NODES for mirror, slots in zip(self.mirrors, slots_of, strict=True)
        ]

    def end_chance(self, tree: int, count: int) -> float:
        """Return the chance that the committed path runs past a childless node of `tree` among the first `count` nodes.

        There a round ends only because the tree does, so nodes at the depth limit do not count.
        """
        mirror, deepest = self.mirrors[tree], self._deepest[tree]
        slots = [slot for of, slot in self._found[:count] if of == tree and not mirror.below[slot]]
        # If a draft overrates its nodes, their chances add up to more than 1.
        return min(sum(mirror.chance(slot) for slot in slots if mirror.depths[slot] < deepest), 1.0)


def _nodes(mirror: TreeMirror, slots: list[int]) -> Nodes:
    """Return the nodes that a round takes of a tree, in the order of `slots`.

    One loop: if many requests share a round, a tree has two or three nodes, and each comprehension costs as much.
    """
    tokens, parents, depths, root_depth = mirror.token_ids, mirror.parents, mirror.depths, mirror.root_depth
    places: dict[int, int] = {}
    taken_tokens: list[int] = []
    taken_parents: list[int] = []
    taken_depths: list[int] = []
    for place, slot in enumerate(slots):
        places[slot] = place
        taken_tokens.append(tokens[slot])
        taken_parents.append(places.get(parents[slot], -1))
        taken_depths.append(depths[slot] - root_depth)
    return Nodes(taken_tokens, taken_parents, taken_depths, slots)
