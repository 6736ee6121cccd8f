"""A bounded trie over n-grams of token text, extended and matched one token at a time.

A branch that occurred once is not spelled out: its leaf points to where the text goes on. So unique text costs
about one node a token whatever the depth, and only repeated n-grams have inner nodes.

    text   ... the cat sat . the cat ran ...
                        ^tail          root -- the -- cat -+- sat (leaf, tail behind it)
                                                           +- ran (leaf)

A context's state lists the places of its suffixes: `state[k]` is the place of the last k tokens, `state[0]` the
trie's root. A place is an inner node, a position in the text (below a leaf), or None (the suffix is not known).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

_END = -1
"""Marks the end of a text: no branch runs across it."""
_MAX_SURPLUS_EVICTED = 32


class TrieNode:
    """An n-gram: the tokens from the root down to here.

    A node does not refer to its parent. With such cycles, the tries of ended requests would wait for Python's garbage
    collector, until there are hundreds of megabytes of them and it has to look at everything.
    """

    __slots__ = ("children", "count", "depth", "tail", "token")

    def __init__(self, token: int, depth: int, tail: int) -> None:
        self.token = token
        self.depth = depth
        self.count = 1
        self.tail = tail
        """Position in the text behind the only occurrence; used only while `children` is None."""
        self.children: dict[int, TrieNode] | None = None
        """By token, most recently seen last; None for a leaf."""


Place = TrieNode | int
State = list[Place | None]


class Trie:
    """N-grams of up to `depth` tokens, at least 2, in at most `capacity` nodes; the least recently seen go first."""

    def __init__(self, capacity: int, depth: int) -> None:
        """`capacity`: at least four times the depth, which the options check."""
        self.capacity = capacity
        """May be lowered; the trie shrinks to the new capacity as text is appended."""
        self.depth = depth
        self.root = TrieNode(_END, 0, 0)
        self.root.children = {}
        self._nodes: OrderedDict[TrieNode, TrieNode] = OrderedDict()  # each with its parent, least recently seen first
        self._text: list[int] = []
        self._text_start = 0  # position of _text[0]; older text is forgotten
        self._open: list[TrieNode] = [self.root]  # suffixes of the text seen before, longest first

    def __len__(self) -> int:
        """Number of nodes without the root."""
        return len(self._nodes)

    @property
    def size(self) -> int:
        """Size to compare with a capacity: nodes, or half the text's tokens if that is more, as where text repeats."""
        return max(len(self._nodes), len(self._text) // 2)

    def append(self, token: int) -> None:
        """Extend the text, and every suffix that was known before, by a token. O(longest suffix seen before)."""
        self._text.append(token)
        position = self._text_start + len(self._text)
        still_open = []
        for node in self._open:
            children: dict[int, TrieNode] = node.children  # type: ignore[assignment]  # open nodes are inner nodes
            child = children.pop(token, None)
            if child is None:
                child = TrieNode(token, node.depth + 1, position)
                self._nodes[child] = node
                children[token] = child
                continue
            children[token] = child
            child.count += 1
            self._nodes.move_to_end(child)
            if child.depth < self.depth:
                if child.children is None:
                    self._spell_out(child)
                still_open.append(child)
        still_open.append(self.root)
        self._open = still_open
        if len(self._nodes) > self.capacity:
            self._evict()
        if len(self._text) > 2 * self.capacity:
            self._forget_text()

    def end_text(self) -> None:
        """End the text: tokens appended next do not follow those from before."""
        self._text.append(_END)
        self._open = [self.root]

    def context(self) -> State:
        """Return the state of the text since its last end: those of its suffixes that occurred before."""
        state: State = [None] * (self._open[0].depth + 1)
        for node in self._open:
            state[node.depth] = node
        return state[: self.depth]

    def start(self) -> State:
        """Return the state of the empty context."""
        return [self.root]

    def step(self, state: State, token: int) -> State:
        """Return the state of the context followed by `token`, without changing the trie."""
        text, start = self._text, self._text_start
        end = start + len(text)
        stepped: State = [self.root]
        for place in state[: self.depth - 1]:
            below: Place | None = None
            if place is None:
                pass
            elif type(place) is int:
                if start <= place < end and text[place - start] == token:
                    below = place + 1
            elif place.children:  # type: ignore[union-attr]
                child = place.children.get(token)  # type: ignore[union-attr]
                if child is not None:
                    below = child.tail if child.children is None else child
            stepped.append(below)
        while stepped[-1] is None:
            stepped.pop()
        return stepped

    def followers(self, place: Place, limit: int, known: Container[int] = ()) -> list[tuple[int, int]]:
        """Return the latest `limit` tokens that followed the n-gram and are not `known`, with counts; latest first."""
        if type(place) is int:
            index = place - self._text_start
            if 0 <= index < len(self._text):
                token = self._text[index]
                if token != _END and token not in known:
                    return [(token, 1)]
            return []
        children = place.children  # type: ignore[union-attr]
        if not children:
            return []
        found = [(token, children[token].count) for token in reversed(children) if token not in known]
        return found[:limit]

    def _spell_out(self, leaf: TrieNode) -> None:
        """Turn a leaf into an inner node, whose only child is the token behind the first occurrence."""
        leaf.children = {}
        index = leaf.tail - self._text_start
        if 0 <= index < len(self._text) and self._text[index] != _END:
            token = self._text[index]
            child = TrieNode(token, leaf.depth + 1, leaf.tail + 1)
            leaf.children[token] = child
            self._nodes[child] = leaf
            self._nodes.move_to_end(leaf)

    def _evict(self) -> None:
        nodes, in_use = self._nodes, self._open
        # A token adds at most two nodes a level. A lowered capacity is reached step by step, without a long pause.
        for _ in range(min(len(nodes) - self.capacity, 2 * self.depth + _MAX_SURPLUS_EVICTED)):
            oldest = next(iter(nodes))
            while oldest.children:  # what lies below was seen at most `depth` tokens later
                oldest = next(iter(oldest.children.values()))
            if oldest in in_use:
                nodes.move_to_end(oldest)
                continue
            siblings = nodes.pop(oldest).children
            if siblings is not None:
                del siblings[oldest.token]

    def _forget_text(self) -> None:
        """Keep as many tokens of text as the trie may have nodes; leaves that point further back end there."""
        surplus = len(self._text) - self.capacity
        del self._text[:surplus]
        self._text_start += surplus
