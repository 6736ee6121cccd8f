"""The draft's side of the replicated tree: it appends nodes and follows commits (docs/protocol.md)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from itertools import repeat, takewhile
from typing import NamedTuple, Protocol

from outrider.protocol.speculation import Commit, Grow, Open

_MIN_EDGE_SCORE = -sys.float_info.max
"""Edge scores are finite."""
_MAX_EPOCH = 2**63
"""Epochs travel as uint64; no request has so many commits."""


class Outcome(Enum):
    """What a commit did to the author's tree."""

    HIT = "hit"
    """The committed path is in the tree; the tree was re-rooted."""
    MISS = "miss"
    """The committed path is not in the tree, or verify lost part of it; a new epoch began."""
    STALE = "stale"
    """All tokens of the commit were known."""
    GAP = "gap"
    """Tokens before the commit are missing; the request must be opened again."""


class Node(NamedTuple):
    """A draft token and its place in the tree."""

    parent: int
    token: int
    score: float
    """Edge log-probability, at most 0."""
    source: int
    below: dict[int, int]
    """The node's children, from token to id; not to be changed."""


_new_node = tuple.__new__
"""Takes Node and its values; quicker than NamedTuple's own `__new__`."""


class _Bulk(NamedTuple):
    """The newest nodes of an author, with consecutive ids up to the last; most die before anything looks them up."""

    parents: list[int]
    tokens: list[int]
    scores: list[float]
    sources: list[int]


class TreeAuthor:
    """The tree of one request as the draft grows it.

    Ids grow by one within an epoch, and node 0 is the root at `base_len`. Nodes off the committed path are forgotten
    at once, so the credit plus the nodes not taken yet bounds the memory.
    """

    def __init__(self, message: Open, vocab_size: int) -> None:
        self.request = message.request
        self.tenant = message.tenant
        self.sampling = message.sampling
        self.prompt_len = message.prompt_len
        self.tokens: list[int] = list(message.token_ids)
        self.credit = message.credit
        self.epoch = 0
        self.guide: Guide | None = None
        """Guide of the request's grammar, if the request has one."""
        self.vocab_size = vocab_size
        """Ids at or past this are illegal."""
        self._acked_len = 0
        self.next_id = 1
        """Id that the next node of the epoch gets."""
        self._num_bulk_taken = 0  # nodes of `_bulk` that `take` has given
        self._start_epoch()

    @property
    def committed_len(self) -> int:
        """Number of committed tokens received."""
        return len(self.tokens)

    @property
    def num_live(self) -> int:
        """Nodes below the root."""
        return len(self._nodes) + len(self._bulk.parents) - 1

    def apply(self, commit: Commit) -> Outcome:
        """Follow a commit. Only its length decides what is new, so duplicates and overlaps are harmless."""
        known = self.committed_len
        end = commit.length_before + len(commit.token_ids)
        if commit.length_before > known:
            return Outcome.GAP
        if end <= known:
            return Outcome.STALE
        self.credit = commit.credit
        new_tokens = commit.token_ids[known - commit.length_before :]
        self.tokens.extend(new_tokens)
        walked = self._walk(new_tokens)
        if self.epoch < commit.epoch < _MAX_EPOCH:
            # Verify's epoch never began here, so it drops messages of this one.
            self.epoch = commit.epoch
            walked = None
        if walked is None or self._lost(commit, walked[-1]):
            self._start_epoch()
            return Outcome.MISS
        self._reroot(walked)
        return Outcome.HIT

    def reopen(self, message: Open) -> None:
        """Apply an `Open` of a request that is open already: only tokens past the known ones count."""
        self.credit = message.credit
        new_tokens = message.token_ids[self.committed_len :]
        if not new_tokens:
            return
        self.tokens.extend(new_tokens)
        walked = self._walk(new_tokens)
        if walked is None:
            self._start_epoch()
        else:
            self._reroot(walked)

    def forbids(self, parent: int, token: int) -> bool:
        """Whether `token` is outside the vocabulary, or the grammar rules it out behind `parent`, if that is live."""
        if not 0 <= token < self.vocab_size:
            return True
        return self.guide is not None and self.is_live(parent) and not self.guide.allows(parent, token)

    def add(self, parent: int, token: int, score: float, source: int) -> int | None:
        """Append a node and return its id.

        None if the parent is dead or has that child already, if the token is illegal (also if the guide forbids it), or
        if the credit is used up. Raises ValueError for a score that is no log-probability.
        """
        if not _MIN_EDGE_SCORE <= score <= 0.0:
            raise ValueError(f"edge score {score} is not a finite log-probability")
        nodes = self._settled() if self._bulk.parents else self._nodes
        above = nodes.get(parent)
        if above is None or len(nodes) > self.credit:
            return None
        siblings = above[4]
        if token in siblings or self.forbids(parent, token):
            return None
        node_id = self.next_id
        self.next_id += 1
        siblings[token] = node_id
        nodes[node_id] = self._untaken[node_id] = _new_node(Node, (parent, token, score, source, {}))
        summed = self._sums.get(parent)
        if summed is not None:
            self._sums[node_id] = summed[0] + score, summed[1] + 1
        return node_id

    def extend(self, parents: list[int], tokens: list[int], scores: list[float], source: int) -> int | None:
        """Append nodes with consecutive ids at once, and return the first id; a parent may be an earlier one of them.

        None, and no change, if `add` would refuse one of the nodes or if there is a guide. The caller must make
        sure that no parent gets two children with the same token.
        """
        first, bulk, count = self.next_id, self._bulk, len(tokens)
        first_bulk = first - len(bulk.parents)
        if self.guide is not None or not 0 < count <= self.credit - self.num_live:
            return None
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            return None
        if not (max(scores) <= 0.0 and sum(scores) >= _MIN_EDGE_SCORE):  # a sum is finite only if all of them are
            return None
        if not self._nodes.keys() >= {parent for parent in parents if not first_bulk <= parent < first + count}:
            return None
        bulk.parents.extend(parents)
        bulk.tokens.extend(tokens)
        bulk.scores.extend(scores)
        bulk.sources.extend(repeat(source, count))
        self.next_id += count
        return first

    def child(self, parent: int, token: int) -> int | None:
        """Return the id of the live child of `parent` that holds `token`, or None."""
        above = self._settled().get(parent)
        return None if above is None else above.below.get(token)

    def settled_child(self, parent: int, token: int) -> int | None:
        """As `child`, but without looking at nodes that were appended in bulk."""
        return self._nodes[parent][4].get(token) if parent in self._nodes else None

    def since(self, first: int) -> list[tuple[int, int, int]]:
        """Return id, parent and source of the live nodes from id `first` on, except the epoch's node 0."""
        nodes, bulk, first_bulk = self._nodes, self._bulk, self._first_bulk_id
        found = [
            (one, node[0], node[3]) for one in range(max(first, 1), first_bulk) if (node := nodes.get(one)) is not None
        ]
        start = max(first - first_bulk, 0)
        found += zip(range(first_bulk + start, self.next_id), bulk.parents[start:], bulk.sources[start:], strict=True)
        return found

    def children(self, node_id: int) -> dict[int, int]:
        """Return a live node's children, from token to id; not to be changed."""
        return self._settled()[node_id].below

    def node(self, node_id: int) -> Node:
        """Return a live node. Raises KeyError for a dead one."""
        node = self._nodes.get(node_id)
        return self._settled()[node_id] if node is None else node

    def live_ids(self) -> list[int]:
        """Return the ids of the live nodes, the root included, in ascending order."""
        return list(self._settled())

    def is_live(self, node_id: int) -> bool:
        """Whether the node is the root or below it."""
        return node_id in self._nodes or self._first_bulk_id <= node_id < self.next_id

    def depth(self, node_id: int) -> int:
        """Return the number of draft tokens from the root to the node."""
        return self.from_start(node_id)[1] - self._sums[self.root][1]

    def from_start(self, node_id: int) -> tuple[float, int]:
        """Return the sum of edge scores, and the number of draft tokens, from the epoch's node 0 to a live node."""
        sums = self._sums
        if node_id in sums:
            return sums[node_id]
        nodes, walked = self._settled(), []
        while node_id not in sums:
            walked.append(node_id)
            node_id = nodes[node_id].parent
        score, depth = sums[node_id]
        for below in reversed(walked):
            score, depth = sums[below] = score + nodes[below].score, depth + 1
        return score, depth

    @property
    def owes_answer(self) -> bool:
        """Whether `take` was not called since the last commit."""
        return self._acked_len != len(self.tokens)

    @property
    def has_untaken(self) -> bool:
        """Whether `take` has nodes to return."""
        return bool(self._untaken) or self._num_bulk_taken < len(self._bulk.parents)

    def take(self, max_nodes: int) -> Grow | None:
        """Return what was not sent to verify yet, as one message of consecutive ids; call again until None.

        Without new nodes, an unacknowledged commit yields an empty message.
        """
        length, acked = len(self.tokens), self._acked_len
        self._acked_len = length
        if self._num_bulk_taken < len(self._bulk.parents):
            if not self._untaken:
                return self._take_bulk(max_nodes)
            self._settled()
        if not self._untaken:
            return None if acked == length else Grow(self.request, self.epoch, self.base_len, length, self.next_id)
        first, nodes = self._next_run(max_nodes)
        parents, tokens, scores, sources, _ = zip(*nodes, strict=True)
        return self._grow(first, parents, tokens, scores, sources)

    def _take_bulk(self, max_nodes: int) -> Grow:
        bulk, start = self._bulk, self._num_bulk_taken
        first, self._num_bulk_taken = self._first_bulk_id + start, min(start + max_nodes, len(bulk.parents))
        taken = slice(start, self._num_bulk_taken)
        return self._grow(first, bulk.parents[taken], bulk.tokens[taken], bulk.scores[taken], bulk.sources[taken])

    def _grow(
        self, first: int, parents: Sequence[int], tokens: Sequence[int], scores: Sequence[float], sources: Sequence[int]
    ) -> Grow:
        return Grow(
            request=self.request,
            epoch=self.epoch,
            base_len=self.base_len,
            acked_len=len(self.tokens),
            first_id=first,
            parents=list(parents),
            token_ids=list(tokens),
            scores=list(scores),
            sources=bytes(sources),
        )

    def _next_run(self, max_nodes: int) -> tuple[int, list[Node]]:
        """Take nodes with consecutive ids off `_untaken`; returns the first id and the nodes."""
        untaken = self._untaken
        ids = list(untaken)  # insertion order is id order
        first, count = ids[0], len(ids)
        if count <= max_nodes and ids[-1] - first == count - 1:
            nodes = list(untaken.values())
            untaken.clear()
            return first, nodes
        run = takewhile(lambda node_id: node_id in untaken, range(first, first + max_nodes))
        return first, [untaken.pop(node_id) for node_id in list(run)]

    def _start_epoch(self) -> None:
        self.epoch += 1
        self.base_len = self.committed_len
        self.root = 0
        self.next_id = 1
        self._nodes: dict[int, Node] = {0: Node(-1, self.tokens[-1], 0.0, 0, {})}
        self._untaken: dict[int, Node] = {}
        self._sums: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # see `from_start`
        self._clear_bulk()

    def _clear_bulk(self) -> None:
        self._bulk = _Bulk([], [], [], [])
        self._num_bulk_taken = 0

    @property
    def _first_bulk_id(self) -> int:
        """Id of the first node in `_bulk`, which are not in `_nodes` yet."""
        return self.next_id - len(self._bulk.parents)

    def _settled(self) -> dict[int, Node]:
        """Move the bulk into `_nodes`, and return all live nodes."""
        if self._bulk.parents:
            first = self._first_bulk_id + self._num_bulk_taken
            self._bring_bulk(self._nodes)
            self._untaken.update((node_id, self._nodes[node_id]) for node_id in range(first, self.next_id))
        return self._nodes

    def _bring_bulk(self, nodes: dict[int, Node], start: int = 0) -> None:
        """Move the bulk's nodes that hang below `nodes` into `nodes`, and drop the others, which are dead.

        `start`: how many leading nodes of the bulk cannot hang below.
        """
        columns = [column[start:] for column in self._bulk] if start else self._bulk
        ids = range(self._first_bulk_id + start, self.next_id)
        for node_id, parent, token, score, source in zip(ids, *columns, strict=True):
            if parent in nodes:
                nodes[parent][4][token] = node_id
                nodes[node_id] = _new_node(Node, (parent, token, score, source, {}))
        self._clear_bulk()

    def _walk(self, tokens: list[int]) -> list[int] | None:
        """Return the node ids along the committed tokens from the root, or None if the tree lacks one."""
        nodes, bulk, first_bulk = self._nodes, self._bulk, self._first_bulk_id
        walked, node_id, at = [], self.root, 0
        try:
            for token in tokens:
                node = nodes.get(node_id)
                below = None if node is None else node[4].get(token)
                if below is None:  # parents come before their children
                    at = bulk.parents.index(node_id, at)
                    while bulk.tokens[at] != token:
                        at = bulk.parents.index(node_id, at + 1)
                    below = first_bulk + at
                walked.append(below)
                node_id = below
        except ValueError:
            return None
        return walked

    def _lost(self, commit: Commit, root: int) -> bool:
        """Whether verify has received nodes past the new root, and yet does not have that root."""
        return commit.epoch == self.epoch and commit.received_through >= root and commit.resolved_root != root

    def _reroot(self, walked: list[int]) -> None:
        if self.has_untaken:
            self._settled()
        old, first_bulk = self._nodes, self._first_bulk_id
        score, depth = self._sums[self.root]
        for node_id in walked:
            edge = old[node_id].score if node_id < first_bulk else self._bulk.scores[node_id - first_bulk]
            score, depth = score + edge, depth + 1
        self.root = root = walked[-1]
        if root < first_bulk:
            nodes = {root: old[root]}
            for node_id, node in old.items():  # parents come before their children
                if node[0] in nodes:
                    nodes[node_id] = node
        else:
            at, bulk = root - first_bulk, self._bulk
            nodes = {root: Node(bulk.parents[at], bulk.tokens[at], bulk.scores[at], bulk.sources[at], {})}
        self._nodes = nodes
        if self._bulk.parents:
            self._bring_bulk(nodes, max(root + 1 - first_bulk, 0))
        known = self._sums.items() if len(self._sums) > 1 else ()
        self._sums = {node_id: summed for node_id, summed in known if node_id in nodes}
        self._sums[root] = score, depth
        if self._untaken:
            # Committed nodes that were not sent yet must still be sent: verify cannot resolve its commit without them.
            keep = nodes.keys() | set(walked)
            self._untaken = {node_id: node for node_id, node in self._untaken.items() if node_id in keep}


class Guide(Protocol):
    """Says which tokens may follow a node."""

    def allows(self, parent: int, token: int) -> bool:
        """Whether `token` may follow a live node."""

    def forced(self, parent: int) -> int | None:
        """Return the only token that may follow a live node; None if there are several, or it is not known."""
