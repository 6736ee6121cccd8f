"""Which tokens may come next, after an answer and after every draft path below it. Torch-free.

What is known lies in a trie below the answer's newest committed token, a mask at each node. Following a commit means to
go down the trie; what drafts have guessed right has its mask already. One matcher of the library moves about in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.grammar.compiler import CompiledGrammar, refusal

Mask = NDArray[np.int32]
"""[num_words]: bit v % 32 of word v // 32 is set where token v may come next."""

TokenPath = tuple[int, ...]
"""Draft tokens from below the newest committed token on."""


class GrammarNode:
    """The state behind one token. It knows nothing of what is above it, so that dropping one frees all below."""

    __slots__ = ("children", "gave_up", "mask")

    def __init__(self) -> None:
        self.gave_up = False
        """Whether the library failed here; it is asked again only when this is the root."""
        self.mask: Mask | None = None
        """None until it was asked for."""
        self.children: dict[int, GrammarNode] = {}

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; False while the mask is not there."""
        return self.mask is not None and bool(int(self.mask[token >> 5]) >> (token & 31) & 1)


class GrammarState:
    """One answer under a grammar.

    Behind a token that ends the answer, and where the grammar has room for no more text, only tokens that end are
    legal. `error` says why masks at the root cannot be computed, once that is so; while the state `waits`, they cannot
    yet.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.root = GrammarNode()
        """The state behind the newest committed token."""
        self.num_committed = 0
        """Tokens of the answer that were followed."""
        self.error: OutriderError | None = None
        self.waits = False
        """Whether the grammar is being compiled anew for the root's mask."""
        self.compiled = compiled
        self._was_renewed = False
        self._end_ids = compiled.vocabulary.end_ids
        self.end_mask = _end_mask(self._end_ids, compiled.vocabulary.num_words)
        """Allows nothing but the end."""
        self._matcher = compiled.matcher()
        self._num_renewals = compiled.num_renewals
        self._answer: list[int] = []
        # What the matcher has consumed: so many tokens of the answer, then this path.
        self._num_consumed = 0
        self._path: TokenPath = ()

    def follow(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed. They are legal, since they were sampled under the masks."""
        for token in token_ids:
            self.root = self.root.children.get(token) or GrammarNode()
        self._answer += token_ids
        self.num_committed += len(token_ids)
        behind = self._answer[self._num_consumed :]
        num_known = _num_common(behind, self._path)
        self._num_consumed += num_known
        self._path = self._path[num_known:]

    def child(self, node: GrammarNode, token: int) -> GrammarNode | None:
        """The state behind `token` below a node whose mask is there; None if the grammar forbids it."""
        found = node.children.get(token)
        if found is None and node.allows(token):
            found = node.children[token] = GrammarNode()
        return found

    def mask(self, node: GrammarNode, path: TokenPath) -> Mask | None:
        """The mask of the node at the end of `path`; computed if it is not there. None if the library gave up on it."""
        if node.mask is None and not (node.gave_up and path) and not self.waits and self.error is None:
            ends = path[-1] in self._end_ids if path else bool(self._answer) and self._answer[-1] in self._end_ids
            node.mask = self.end_mask if ends else self._compute(path)
            node.gave_up = node.mask is None
        return node.mask

    def renewed(self, error: OutriderError | None = None) -> None:
        """The grammar was compiled anew, as `CompiledGrammar.renew` was asked to, or could not be."""
        self.waits, self._was_renewed, self.error = False, True, error

    def find(self, path: TokenPath) -> GrammarNode | None:
        """The state behind a path, with the masks on the way to it; None if the grammar forbids it."""
        node: GrammarNode | None = self.root
        for depth, token in enumerate(path):
            if node is None or self.mask(node, path[:depth]) is None:
                return None
            node = self.child(node, token)
        return node

    def _compute(self, path: TokenPath) -> Mask | None:
        mask = self._try(path)
        if mask is None and not path:
            mask = self._try_afresh()
        if mask is None:
            # A matcher that is in error stays so.
            self._restart(self.compiled.matcher())
        return mask

    def _try_afresh(self) -> Mask | None:
        """The root's mask from a grammar that is compiled anew: others may have used up what its matchers share."""
        was_renewed, self._was_renewed = self._was_renewed, False
        # All answers of a grammar come here at once, and compiling takes up to a second: the first one's does for all.
        if self._num_renewals < self.compiled.num_renewals:
            self._restart(self.compiled.matcher())
            if (mask := self._try(())) is not None:
                return mask
        if self.compiled.renew is not None and not was_renewed:
            self.waits = True
            self.compiled.renew(self)
            return None
        if was_renewed:
            self.error = refusal(self.compiled.grammar, self._matcher.get_error())
            return None
        try:
            self._restart(self.compiled.fresh_matcher())
        except OutriderError as error:
            self.error = error
            return None
        mask = self._try(())
        if mask is None:
            self.error = refusal(self.compiled.grammar, self._matcher.get_error())
        return mask

    def _try(self, path: TokenPath) -> Mask | None:
        matcher = self._matcher
        self.compiled.num_masks += 1
        if not self._move(path) or matcher.is_error():
            return None
        if matcher.is_stopped():
            return self.end_mask
        packed = matcher.compute_bitmask()
        return None if matcher.is_error() else np.frombuffer(packed, np.int32)

    def _move(self, path: TokenPath) -> bool:
        """Bring the matcher to the end of a path below the answer; False if that fails."""
        matcher, behind = self._matcher, self._answer[self._num_consumed :]
        num_same = 0 if behind else _num_common(path, self._path)
        num_back = len(self._path) - num_same
        if num_back and not matcher.rollback(num_back):
            return False
        self._num_consumed, self._path = len(self._answer), path
        more = [*behind, *path[num_same:]]
        return not more or bool(matcher.consume_tokens(more))

    def _restart(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_renewals = self.compiled.num_renewals
        self._num_consumed, self._path = 0, ()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def unpack(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """A mask as bool [vocab_size]: True where a token may come next."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _end_mask(end_ids: frozenset[int], num_words: int) -> Mask:
    """A mask that allows only tokens that end an answer."""
    words = np.zeros(num_words, np.uint32)
    for token in end_ids:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)
