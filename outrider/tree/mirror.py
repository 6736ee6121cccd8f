"""Verify's side of the replicated tree: takes what a draft sends, trusts nothing, and re-roots (docs/protocol.md)."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from outrider.protocol.speculation import Grow

_MAX_NODE_ID = 2**32 - 1
"""Node ids travel as uint32."""

_MAX_EDGE_COST = 50.0
"""Bound of an edge's cost: beside a huge one, the costs of the nodes below would be lost to rounding."""

Calibrate = Callable[[float, int], float]
"""Turns an edge score and its source into a calibrated edge log-probability, at most 0."""


class Observation(NamedTuple):
    """A child of a committed node, and whether it was committed next."""

    score: float
    """Edge score as sent."""
    source: int
    hit: bool


class TreeMirror:
    """The tree of one request as far as verify has received it.

    Each node has a slot: an epoch's root has slot 0, and nodes get the next slots as they come. Following a commit
    moves `root` down. Nodes that do not hang below it are dead; they are dropped when slots run out, and the others
    move up. While committed tokens below the root are unresolved, the tree offers no nodes.

    Lists rather than arrays: messages bring few nodes, rounds read few, and a call into numpy takes as long as two
    nodes here.

    `tokens` is the request's own list of committed tokens; the engine appends to it and then calls `commit`.

    Attributes:
        root: slot of the deepest known committed node.
        below: by slot, the node's children, likeliest first, as cost and slot. A node's cost is the negated calibrated
            log-probability of its path; subtract `root_cost` to count from the root.
        token_ids, parents, depths, ids, scores, sources: by slot. Parents are slots, depths include `root_depth`, and
            scores are edge scores as sent.
        desynced: the two copies disagree about the epoch, which never happens with an honest draft. Only opening the
            request anew repairs that.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, max_nodes: int) -> None:
        """`max_nodes`: most nodes that are kept; dead nodes count until their slots are needed."""
        self.tokens = tokens
        self.dropped: Counter[str] = Counter()
        self.calibrate: Calibrate = lambda score, source: score
        self._vocab_size = vocab_size
        self._num_slots = max_nodes + 1
        self._observations: list[Observation] = []
        self.forget()

    def forget(self) -> None:
        """Drop the tree and its epoch, for instance when a session ends."""
        self._opened_len = len(self.tokens)
        self.desynced = False
        self._begin(epoch=0, base_len=len(self.tokens))

    def _begin(self, epoch: int, base_len: int) -> None:
        self.epoch = epoch
        self.base_len = base_len
        self.received_through = 0
        self.acked_len = 0
        self.root_len = base_len
        """Committed tokens up to and including the root."""
        self.root, self.root_cost, self.root_depth = 0, 0.0, 0
        self.token_ids = [self.tokens[base_len - 1] if base_len else 0]
        self.parents, self.depths, self.ids, self.scores, self.sources = [-1], [0], [0], [0.0], [0]
        self.below: list[list[tuple[float, int]]] = [[]]
        self._costs = [0.0]
        self._slots = {0: 0}
        self._children: dict[int, int] = {}
        self._turn = 0
        """Counts moves of the root."""
        self._alive = [0]
        """By slot, the turn in which the node was last checked, inverted (`~`) if it was dead."""
        self._swept = -1
        """The last turn in which dead nodes were dropped: nodes die only when the root moves."""
        self._steps: list[tuple[int, int]] = []
        self._observed: set[int] = set()

    @property
    def num_unresolved(self) -> int:
        """Committed tokens below the root whose nodes are not (yet) in the tree."""
        return len(self.tokens) - self.root_len

    @property
    def resolved_root(self) -> int | None:
        """Node id of the root; None while committed tokens are unresolved or no tree was received."""
        return self.ids[self.root] if self.epoch and not self.num_unresolved else None

    @property
    def has_nodes(self) -> bool:
        """Whether there are nodes that a round may take."""
        return len(self.tokens) == self.root_len and bool(self.below[self.root])

    def descend(self) -> Iterator[int]:
        """Yield the slots of all nodes below the root, parents first."""
        todo = [slot for _, slot in self.below[self.root]]
        while todo:
            slot = todo.pop()
            yield slot
            todo += [child for _, child in self.below[slot]]

    def chance(self, slot: int) -> float:
        """Return the chance that the path to a node below the root is committed."""
        return math.exp(self.root_cost - self._costs[slot])

    def child(self, slot: int, token: int) -> int | None:
        """Return the slot of the child that holds `token`, or None."""
        return self._children.get(slot << 32 | token)

    def commit(self) -> None:
        """Follow tokens that were appended to `tokens` since the last call, with one dict lookup for each."""
        tokens, root = self.tokens, self.root
        while self.root_len < len(tokens):
            token = tokens[self.root_len]
            below = self._children.get(root << 32 | token)
            if below is None:
                break
            self._steps.append((root, token))
            root = below
            self.root_len += 1
        if root != self.root:
            self.root, self.root_cost, self.root_depth = root, self._costs[root], self.depths[root]
            self._turn += 1
            self._alive[root] = self._turn

    def insert(self, grow: Grow) -> int:
        """Take a message; returns how many nodes entered. Illegal nodes are dropped and counted in `dropped`."""
        count = len(grow.token_ids)
        if not self._accepts(grow, count):
            return 0
        entered = self._enter(grow, count) if count else 0
        self.received_through = max(self.received_through, grow.first_id + count - 1)
        self.acked_len = max(self.acked_len, min(grow.acked_len, len(self.tokens)))
        self.commit()
        return entered

    def take_observations(self) -> list[Observation]:
        """Return observations since the last call: each child of a committed node once, even if it came late."""
        self._observe()
        taken, self._observations = self._observations, []
        return taken

    def _accepts(self, grow: Grow, count: int) -> bool:
        sizes = {len(grow.parents), len(grow.scores), len(grow.sources), count}
        # An id past the last would have to go back in a commit, which cannot carry it.
        if len(sizes) > 1 or grow.first_id < 1 or grow.epoch < 1 or grow.first_id + count - 1 > _MAX_NODE_ID:
            return self._drop("malformed", max(count, 1))
        if grow.epoch < self.epoch:
            return self._drop("stale_epoch", count)
        # A base that no draft can mean does not show that the copies have diverged.
        if not 1 <= grow.base_len <= len(self.tokens):
            return self._drop("base_len", max(count, 1))
        if grow.epoch > self.epoch:
            # A draft begins each epoch at a longer base than the one before. Allow one more epoch, for a draft that
            # skips one which it never began.
            if grow.epoch > 2 + grow.base_len - self._opened_len:
                return self._desync("epoch", max(count, 1))
            self._observe()
            self._begin(grow.epoch, grow.base_len)
        elif grow.base_len != self.base_len:
            return self._desync("base_len", max(count, 1))
        return True

    def _enter(self, grow: Grow, count: int) -> int:
        """Add the nodes that are legal and new below the root; returns how many were added."""
        if len(self.ids) + count > self._num_slots and self._swept != self._turn:
            self._drop_dead()
        slots, children, faults, alive, turn = self._slots, self._children, self.dropped, self._alive, self._turn
        first = slot = len(self.ids)
        columns = zip(grow.parents, grow.token_ids, grow.scores, grow.sources, strict=True)
        for node_id, (parent_id, token, score, source) in enumerate(columns, grow.first_id):
            if not 0 <= token < self._vocab_size:
                faults["token"] += 1
            elif not -math.inf < score <= 0.0:
                faults["score"] += 1
            elif parent_id >= node_id:
                faults["parent_order"] += 1
            elif (parent := slots.get(parent_id)) is None or (alive[parent] != turn and not self._is_alive(parent)):
                missing = self.received_through < parent_id < grow.first_id
                faults["unknown_parent" if missing else "dead_parent"] += 1
            elif (edge := parent << 32 | token) in children or node_id in slots:
                faults["duplicate"] += 1
            elif slot == self._num_slots:
                faults["too_many"] += 1
            else:
                slots[node_id] = children[edge] = slot
                self._add(slot, parent, node_id, token, score, source)
                slot += 1
        return slot - first

    def _add(self, slot: int, parent: int, node_id: int, token: int, score: float, source: int) -> None:
        cost = self._costs[parent] + min(-self.calibrate(score, source), _MAX_EDGE_COST)
        insort(self.below[parent], (cost, slot))
        self.below.append([])
        self._costs.append(cost)
        self._alive.append(self._turn)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ids.append(node_id)
        self.scores.append(score)
        self.sources.append(source)

    def _is_alive(self, slot: int) -> bool:
        """Whether a node is the root or below it. Remembers the result for the nodes on the way up."""
        alive, turn, way = self._alive, self._turn, []
        while alive[slot] not in (turn, ~turn) and self.depths[slot] > self.root_depth:
            way.append(slot)
            slot = self.parents[slot]
        found = turn if alive[slot] == turn else ~turn
        for below in way:
            alive[below] = found
        return found == turn

    def _drop_dead(self) -> None:
        """Free the slots of dead nodes. The other nodes keep their order."""
        self._observe()
        kept = [self.root, *sorted(self.descend())]
        place = {slot: index for index, slot in enumerate(kept)}
        for column in (self.token_ids, self.depths, self.ids, self.sources):
            column[:] = [column[slot] for slot in kept]
        self.scores, self._costs = [self.scores[slot] for slot in kept], [self._costs[slot] for slot in kept]
        self.parents = [-1, *(place[self.parents[slot]] for slot in kept[1:])]
        self.below = [[(cost, place[child]) for cost, child in self.below[slot]] for slot in kept]
        self._slots = {node_id: slot for slot, node_id in enumerate(self.ids)}
        edges = zip(self.parents[1:], self.token_ids[1:], strict=True)
        self._children = {parent << 32 | token: slot for slot, (parent, token) in enumerate(edges, 1)}
        self._observed.intersection_update(self._slots)
        self._alive = [self._turn] * len(kept)
        self._swept = self._turn
        self.root = 0

    def _desync(self, reason: str, count: int) -> bool:
        self.desynced = True
        return self._drop(reason, count)

    def _drop(self, reason: str, count: int) -> bool:
        if count:
            self.dropped[reason] += count
        return False

    def _observe(self) -> None:
        """Note which children of each node that the committed path has left were right."""
        unresolved = [(self.root, self.tokens[self.root_len])] if self.num_unresolved else []
        for slot, token in self._steps + unresolved:
            for _, child in self.below[slot]:
                if (node_id := self.ids[child]) not in self._observed:
                    self._observed.add(node_id)
                    hit = self.token_ids[child] == token
                    self._observations.append(Observation(self.scores[child], self.sources[child], hit))
        self._steps.clear()
