"""The draft's side of the replicated tree: it appends nodes and follows commits (docs/protocol.md)."""

from __future__ import annotations

import sys
from enum import Enum
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from outrider.tree.messages import Commit, Grow, Open

_LEAST = -sys.float_info.max
"""Edge scores are finite."""

_MAX_EPOCH = 2**63
"""Epochs travel as uint64; no request has so many commits."""


class Outcome(Enum):
    """What a commit did to the author's tree."""

    HIT = "hit"
    """The committed path is in the tree; the tree was re-rooted."""
    MISS = "miss"
    """It is not, or verify lost it; a new epoch began."""
    STALE = "stale"
    """The commit tells nothing new."""
    GAP = "gap"
    """Tokens before the commit are unknown; only opening the request again helps."""


class Node(NamedTuple):
    """A draft token and where it hangs."""

    parent: int
    token: int
    score: float
    """Edge log-probability, at most 0."""
    source: int
    path_score: float
    """Sum of the edge scores from node 0 of the epoch."""
    depth: int
    """Draft tokens from node 0 of the epoch."""


class Guide(Protocol):
    """Which tokens may come behind nodes."""

    def allows(self, parent: int, token: int) -> bool:
        """Whether `token` may come behind a live node."""

    def forced(self, parent: int) -> int | None:
        """The one token that may come behind a live node; None if there are several, or if that is not known."""


class TreeAuthor:
    """The tree of one request as the draft grows it.

    Ids grow by one within an epoch and node 0 is the root at `base_len`. Nodes off the committed path are forgotten
    at once, so memory is bounded by the credit plus what is not taken yet.
    """

    def __init__(self, message: Open, vocab_size: int) -> None:
        self.request = message.request
        self.sampling = message.sampling
        self.prompt_len = message.prompt_len
        self.tokens: list[int] = message.token_ids.tolist()
        self.credit = message.credit
        self.epoch = 0
        self.guide: Guide | None = None
        """What a grammar says, for a request whose answer is bound to one."""
        self._vocab_size = vocab_size
        self._acked_len = 0
        self._next_id = 1
        self._start_epoch()

    @property
    def committed_len(self) -> int:
        """Committed tokens that the author knows."""
        return len(self.tokens)

    @property
    def next_id(self) -> int:
        """Id that the next node of the epoch gets."""
        return self._next_id

    @property
    def num_live(self) -> int:
        """Nodes below the root."""
        return len(self._nodes) - 1

    def apply(self, commit: Commit) -> Outcome:
        """Follow a commit. It is applied by its length alone, so duplicates and overlaps are harmless."""
        known = self.committed_len
        end = commit.length_before + len(commit.token_ids)
        if commit.length_before > known:
            return Outcome.GAP
        if end <= known:
            return Outcome.STALE
        self.credit = commit.credit
        new_tokens = commit.token_ids[known - commit.length_before :].tolist()
        self.tokens.extend(new_tokens)
        walked = self._walk(new_tokens)
        if self.epoch < commit.epoch < _MAX_EPOCH:
            # Verify believes in an epoch that never began here, and drops what is said of this one.
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
        new_tokens = message.token_ids[self.committed_len :].tolist()
        if not new_tokens:
            return
        self.tokens.extend(new_tokens)
        walked = self._walk(new_tokens)
        if walked is None:
            self._start_epoch()
        else:
            self._reroot(walked)

    def forbids(self, parent: int, token: int) -> bool:
        """Whether a grammar rules out `token` behind a node, if that is live."""
        return self.guide is not None and parent in self._nodes and not self.guide.allows(parent, token)

    def add(self, parent: int, token: int, score: float, source: int) -> int | None:
        """Append a node. None if its parent is dead, it is an alias, the token is illegal, or the credit is used up.

        Illegal is also what the guide forbids.

        Raises ValueError for a score that is no log-probability.
        """
        if not _LEAST <= score <= 0.0:
            raise ValueError(f"edge score {score} is not a finite log-probability")
        nodes = self._nodes
        above = nodes.get(parent)
        if above is None or len(nodes) > self.credit or not 0 <= token < self._vocab_size:
            return None
        siblings = self._children[parent]
        if token in siblings or self.forbids(parent, token):
            return None
        node_id = self._next_id
        self._next_id += 1
        siblings[token] = node_id
        node = Node(parent, token, score, source, above[4] + score, above[5] + 1)
        nodes[node_id] = self._untaken[node_id] = node
        self._children[node_id] = {}
        return node_id

    def child(self, parent: int, token: int) -> int | None:
        """Id of the live child of `parent` that holds `token`."""
        return self._children.get(parent, {}).get(token)

    def children(self, node_id: int) -> dict[int, int]:
        """Token to id of a live node's children; not to be changed."""
        return self._children[node_id]

    def node(self, node_id: int) -> Node:
        """A live node. Raises KeyError for a dead one."""
        return self._nodes[node_id]

    def live_ids(self) -> list[int]:
        """Ids of the live nodes, the root included, in id order."""
        return sorted(self._nodes)

    def is_live(self, node_id: int) -> bool:
        """Whether the node is the root or below it."""
        return node_id in self._nodes

    def depth(self, node_id: int) -> int:
        """Draft tokens from the root to the node."""
        return self._nodes[node_id].depth - self._nodes[self.root].depth

    def path_score(self, node_id: int) -> float:
        """Sum of the edge scores from the root to the node."""
        return self._nodes[node_id].path_score - self._nodes[self.root].path_score

    def path(self, node_id: int) -> list[int]:
        """Draft tokens from below the root to the node."""
        tokens = []
        while node_id != self.root:
            node = self._nodes[node_id]
            tokens.append(node.token)
            node_id = node.parent
        tokens.reverse()
        return tokens

    @property
    def owes_answer(self) -> bool:
        """Whether `take` has given nothing since the last commit."""
        return self._acked_len != len(self.tokens)

    @property
    def has_untaken(self) -> bool:
        """Whether `take` has nodes to give."""
        return bool(self._untaken)

    def take(self, max_nodes: int) -> Grow | None:
        """What verify has not been told, in one message of consecutive ids; call again until None.

        Without new nodes, an unacknowledged commit yields an empty message.
        """
        length = len(self.tokens)
        if not self._untaken:
            if self._acked_len == length:
                return None
            self._acked_len = length
            return Grow(self.request, self.epoch, self.base_len, length, self._next_id)
        first, nodes = self._next_run(max_nodes)
        self._acked_len = length
        parents, token_ids, scores, sources = list(zip(*nodes, strict=True))[:4]
        return Grow(
            request=self.request,
            epoch=self.epoch,
            base_len=self.base_len,
            acked_len=length,
            first_id=first,
            parents=np.array(parents, np.uint32),
            token_ids=np.array(token_ids, np.int32),
            scores=np.array(scores, np.float32),
            sources=np.array(sources, np.uint8),
        )

    def _next_run(self, max_nodes: int) -> tuple[int, list[Node]]:
        """Take nodes of consecutive ids off `_untaken`; returns the first of those ids, too."""
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
        self._next_id = 1
        self._nodes: dict[int, Node] = {0: Node(-1, self.tokens[-1], 0.0, 0, 0.0, 0)}
        self._children: dict[int, dict[int, int]] = {0: {}}
        self._untaken: dict[int, Node] = {}

    def _walk(self, tokens: list[int]) -> list[int] | None:
        """Node ids along the committed tokens from the root, or None where the tree lacks one."""
        walked = []
        node_id = self.root
        for token in tokens:
            below = self._children[node_id].get(token)
            if below is None:
                return None
            walked.append(below)
            node_id = below
        return walked

    def _lost(self, commit: Commit, root: int) -> bool:
        """Whether verify has received past the new root and yet does not have it."""
        return commit.epoch == self.epoch and commit.received_through >= root and commit.resolved_root != root

    def _reroot(self, walked: list[int]) -> None:
        self.root = walked[-1]
        old_nodes, old_children = self._nodes, self._children
        nodes: dict[int, Node] = {}
        children: dict[int, dict[int, int]] = {}
        stack = [self.root]
        for node_id in stack:
            nodes[node_id] = old_nodes[node_id]
            children[node_id] = below = old_children[node_id]
            if below:
                stack += below.values()
        self._nodes, self._children = nodes, children
        if self._untaken:
            # Committed nodes that were never sent still are: verify cannot resolve its commit without them.
            keep = nodes.keys() | set(walked)
            self._untaken = {node_id: node for node_id, node in self._untaken.items() if node_id in keep}
