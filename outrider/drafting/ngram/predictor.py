"""From what followed a context before to the chances of what follows it now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from outrider.drafting.base import FrontierNode, Tree
from outrider.drafting.ngram.confidence import Confidence, LocalConfidence, NoiseTrust
from outrider.drafting.ngram.trie import State, Trie

OWN, SHARED = 0, 1
"""Source numbers: the request's own text, and what its tenant's requests put out."""

_MAX_FOLLOWERS = 24
"""Of a match with more followers the latest count."""
_MIN_MASS = 0.01
"""Shorter matches are not asked once the longer ones leave less chance than this."""
_RECENCY = tuple(0.35**rank for rank in range(_MAX_FOLLOWERS))
"""Weights of followers by recency: that the latest repeats is likelier than that the one before does."""


@dataclass(frozen=True, slots=True)
class NgramContext:
    """Where a context stands in both tries."""

    own: State
    shared: State

    @property
    def match_length(self) -> int:
        """Tokens of the longest suffix known."""
        return max(len(self.own), len(self.shared)) - 1


@dataclass(slots=True)
class Guess:
    """A token that may come next."""

    token: int
    chance: float
    source: int


class Predictor:
    """Blends the matches of a context, longest first: each takes its share of the chance that longer ones leave.

    Followers of a longer match are excluded from a shorter one, whose text mostly repeats the longer one's.
    """

    def __init__(self, shared: Trie, by_recency: bool, min_match: int) -> None:
        self.shared = shared
        self._by_recency = by_recency
        self._min_match = min_match
        self._confidence = Confidence()

    def predict(self, own: Trie, context: NgramContext, local: LocalConfidence) -> list[Guess]:
        """Guesses with their chances, likeliest first; the chances add up to less than 1."""
        seen: set[int] = set()
        guesses: list[Guess] = []
        mass = 1.0
        for source, cell, followers in self._matches(own, context, seen):
            share = mass * self._confidence.chance(cell, local)
            mass -= share
            if len(followers) == 1:
                token = followers[0][0]
                seen.add(token)
                guesses.append(Guess(token, share, source))
            else:
                weights = _RECENCY if self._by_recency else [float(count) for _, count in followers]
                unit = share / sum(weights[: len(followers)])
                for (token, _), weight in zip(followers, weights, strict=False):
                    seen.add(token)
                    guesses.append(Guess(token, unit * weight, source))
            if mass < _MIN_MASS:
                break
        guesses.sort(key=_chance, reverse=True)
        return guesses

    def learn(self, own: Trie, context: NgramContext, local: LocalConfidence, token: int) -> None:
        """Note that the target committed `token` after the context."""
        seen: set[int] = set()
        for _, cell, followers in self._matches(own, context, seen):
            tokens = [follower for follower, _ in followers]
            hit = token in tokens
            self._confidence.learn(cell, local, hit)
            if hit:
                return
            seen.update(tokens)

    def _matches(
        self, own: Trie, context: NgramContext, seen: set[int]
    ) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Source, confidence cell and unseen followers of each match, longest first; own text before shared."""
        sides = ((OWN, own, context.own, len(context.own)), (SHARED, self.shared, context.shared, len(context.shared)))
        for length in range(context.match_length, self._min_match - 1, -1):
            for source, trie, state, end in sides:
                place = state[length] if length < end else None
                if place is None:
                    continue
                followers = trie.followers(place, _MAX_FOLLOWERS, seen)
                if followers:
                    occurrences = followers[0][1] if len(followers) == 1 else sum([count for _, count in followers])
                    yield source, self._confidence.cell(source, length, len(followers), occurrences), followers


def _chance(guess: Guess) -> float:
    return guess.chance


Chances = dict[int, tuple[float, float]]
"""Token to its chance, plain and given the noise."""


class NgramRequest:
    """Its own trie, fed by prompt and output, and the contexts of its live nodes."""

    def __init__(self, tree: Tree, predictor: Predictor, trie: Trie, max_match: int) -> None:
        self.sampling = tree.author.sampling
        self.vocab_size = tree.vocab_size
        self.local = LocalConfidence()
        self.trust = NoiseTrust()
        self._tokens = list(tree.author.tokens)
        self._num_indexed = 0
        self._num_shared = len(self._tokens)
        self._predictor = predictor
        self._trie = trie
        self._max_match = max_match
        self._root = 0
        self._contexts: dict[int, NgramContext] = {0: NgramContext(trie.start(), predictor.shared.start())}
        self._expanded: dict[tuple[int, int], int] = {}
        self._chances: dict[int, Chances] = {}

    @property
    def ready(self) -> bool:
        """Whether all committed tokens are indexed; before that there are no guesses."""
        return self._num_indexed == len(self._tokens)

    def set_capacity(self, num_nodes: int) -> None:
        """Bound its trie."""
        self._trie.capacity = num_nodes

    def index(self, max_tokens: int) -> None:
        """Feed up to `max_tokens` committed tokens to the trie, without learning from them."""
        context = self._contexts[self._root]
        for token in self._tokens[self._num_indexed : self._num_indexed + max_tokens]:
            context = self._advance(context, token)
        self._contexts[self._root] = context

    def commit(self, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        """Learn from newly committed tokens, index them, and keep the contexts of the live nodes."""
        context = self._contexts[self._root]
        if self.ready:
            self._learn_noise(tokens)
            self._tokens.extend(tokens)
            for token in tokens:
                self._predictor.learn(self._trie, context, self.local, token)
                context = self._advance(context, token)
        else:
            self._tokens.extend(tokens)
        self._contexts = {node: kept for node, kept in self._contexts.items() if node in live}
        self._expanded = {edge: node for edge, node in self._expanded.items() if node in live}
        self._chances = {node: kept for node, kept in self._chances.items() if node in live}
        self._contexts[root] = context
        self._root = root

    def guess(self, node: FrontierNode) -> list[Guess]:
        """Guesses of a frontier node's children, likeliest first."""
        if not self.ready:
            return []
        context = self._contexts.get(node.node)
        if context is None:
            above = self._contexts[node.parent]
            own = self._trie.step(above.own, node.token)
            context = NgramContext(own, self._predictor.shared.step(above.shared, node.token))
            self._contexts[node.node] = context
        return self._predictor.predict(self._trie, context, self.local)

    def match_length(self, node: int) -> int:
        """Tokens of an expanded node's context that occurred before."""
        return self._contexts[node].match_length

    def remember(self, node: FrontierNode, chances: Chances) -> None:
        """Keep what was guessed after a node until a commit shows what was right."""
        self._expanded[node.parent, node.token] = node.node
        self._chances[node.node] = chances

    def unshared(self, overlap: int) -> list[int]:
        """Output not handed out before, led by up to `overlap` tokens that were, so that n-grams cross the seam."""
        if self._num_shared == len(self._tokens):
            return []
        start = max(0, self._num_shared - overlap)
        self._num_shared = len(self._tokens)
        return self._tokens[start:]

    @property
    def num_unshared(self) -> int:
        """Output tokens that `unshared` would hand out."""
        return len(self._tokens) - self._num_shared

    def _advance(self, context: NgramContext, token: int) -> NgramContext:
        self._trie.append(token)
        self._num_indexed += 1
        shared: State = self._predictor.shared.step(context.shared, token)
        longest = self._max_match + 1
        return NgramContext(self._trie.context()[:longest], shared[:longest])

    def _learn_noise(self, tokens: Sequence[int]) -> None:
        node: int | None = self._root
        for token in tokens:
            if node is None:
                return
            chances = self._chances.get(node, {}).get(token)
            if chances is not None:
                self.trust.learn(*chances)
            node = self._expanded.get((node, token))
