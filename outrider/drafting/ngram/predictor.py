"""Turns what followed a context before into chances for what follows it now.

The predictor learns from the target's commits how far to trust a match of some length, and the noise behind a guess.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from outrider.drafting.base import FrontierNode
from outrider.drafting.ngram.trie import State, Trie
from outrider.drafting.tree_growth import Tree

_LENGTH_BUCKET = (0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7)
_PRIOR = (0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92)
"""Chance, by bucket of match length, that the target continues like earlier text."""
_NUM_LENGTHS = len(_PRIOR)
_NUM_DISTINCT = 3
_NUM_COUNTS = 3

_PRIOR_WEIGHT = 8.0
_MAX_TRIES = 512.0
"""A cell's counts are halved once it has this many tries."""
_LOCAL_WEIGHT = 8.0
_MAX_LOCAL_TRIES = 48.0

NUM_SOURCES = 2

_EVIDENCE_DECAY = 0.97
"""Each committed token multiplies the evidence so far by this."""
_MAX_EVIDENCE = 5.0
_WORD_MASK = 0xFFFFFFFF
_SHARPNESS = 0.5
"""Power of exp(noise): 1 would be exact if a trie's chances were the target's own; 0.5 was best in measurements."""
_MEAN_NOISE_FACTOR = math.gamma(1.0 - _SHARPNESS)


class LocalConfidence:
    """Hits and tries of one request, by bucket of match length: some texts copy, some never do."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = [0.0] * _NUM_LENGTHS
        self.tries = [0.0] * _NUM_LENGTHS


class Confidence:
    """Chances that the next token is among a match's followers, given that no longer match had it.

    A cell is (source, match length, distinct followers, occurrences), each in buckets. It starts from a prior. Its
    counts are halved now and then, so that it follows the traffic.
    """

    def __init__(self) -> None:
        size = NUM_SOURCES * _NUM_LENGTHS * _NUM_DISTINCT * _NUM_COUNTS
        self._tries = [_PRIOR_WEIGHT] * size
        self._hits = [
            _PRIOR_WEIGHT * _PRIOR[index // (_NUM_DISTINCT * _NUM_COUNTS) % _NUM_LENGTHS] for index in range(size)
        ]

    def cell(self, source: int, length: int, distinct: int, occurrences: int) -> int:
        """Return the index of a match's cell."""
        length_bucket = _LENGTH_BUCKET[length] if length < len(_LENGTH_BUCKET) else _NUM_LENGTHS - 1
        distinct_bucket = min(distinct, _NUM_DISTINCT) - 1
        count_bucket = 0 if occurrences == 1 else 1 if occurrences < 4 else 2
        return ((source * _NUM_LENGTHS + length_bucket) * _NUM_DISTINCT + distinct_bucket) * _NUM_COUNTS + count_bucket

    def chance(self, cell: int, local: LocalConfidence) -> float:
        """Return the chance, above 0 and below 1, that the next token is among the followers."""
        bucket = _bucket_of(cell)
        shared = self._hits[cell] / self._tries[cell]
        return (_LOCAL_WEIGHT * shared + local.hits[bucket]) / (_LOCAL_WEIGHT + local.tries[bucket])

    def learn(self, cell: int, local: LocalConfidence, hit: bool) -> None:
        """Note whether the committed token was among the followers."""
        if self._tries[cell] >= _MAX_TRIES:
            self._tries[cell] /= 2
            self._hits[cell] /= 2
        bucket = _bucket_of(cell)
        if local.tries[bucket] >= _MAX_LOCAL_TRIES:
            local.tries[bucket] /= 2
            local.hits[bucket] /= 2
        self._tries[cell] += 1
        local.tries[bucket] += 1
        if hit:
            self._hits[cell] += 1
            local.hits[bucket] += 1


def _bucket_of(cell: int) -> int:
    return cell // (_NUM_DISTINCT * _NUM_COUNTS) % _NUM_LENGTHS


class NoiseTrust:
    """Weighs a guess's plain chance against its chance given the noise, by how well each predicted the commits."""

    __slots__ = ("_evidence",)

    def __init__(self) -> None:
        self._evidence = 0.0  # natural-log odds that the chance given the noise predicts better than the plain one

    @property
    def weight(self) -> float:
        """Weight, 0 to 1, of the chance given the noise."""
        return 1.0 / (1.0 + math.exp(-self._evidence))

    def learn(self, plain: float, noisy: float) -> None:
        """Learn from the two chances that the committed token was given."""
        gain = math.log(max(noisy, 1e-3)) - math.log(max(plain, 1e-3))
        self._evidence = max(-_MAX_EVIDENCE, min(_MAX_EVIDENCE, _EVIDENCE_DECAY * self._evidence + gain))


def point_gumbel(seed: int, choice_index: int, position: int, token: int) -> float:
    """Return one entry of `outrider.sampling.noise.gumbel`, before its rounding to float32.

    A trie names two or three tokens a node: plain Python takes 4 us for each, numpy 120 us however short the array.
    """
    word0, word1, word2, word3 = token >> 2, position, choice_index, 0
    key0, key1 = seed & _WORD_MASK, seed >> 32
    for _ in range(10):
        product0, product1 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1 = (product1 >> 32) ^ word1 ^ key0, product1 & _WORD_MASK
        word2, word3 = (product0 >> 32) ^ word3 ^ key1, product0 & _WORD_MASK
        key0, key1 = (key0 + 0x9E3779B9) & _WORD_MASK, (key1 + 0xBB67AE85) & _WORD_MASK
    drawn = (word0, word1, word2, word3)[token & 3]
    return -math.log(-math.log((2.0**32 - 0.5 - drawn) * 2.0**-32))


def chances_given_noise(chances: Sequence[float], noise: Sequence[float]) -> list[float]:
    """Return the chances of one node's guesses given their noise; they add up to less than 1.

    Tokens that are not guessed keep their weight. A softmax of ranks is the rule for a drafter that knows the target's
    distribution up to a small error (docs/sampling.md). N-gram counts do not: the rule trusted them too much both ways.
    """
    weights = [
        chance * math.exp(_SHARPNESS * one) / _MEAN_NOISE_FACTOR for chance, one in zip(chances, noise, strict=True)
    ]
    total = sum(weights) + max(1.0 - sum(chances), 1e-6)
    return [weight / total for weight in weights]


OWN, SHARED = 0, 1
"""Source numbers: the request's own text, and the outputs of its tenant's requests."""

_MAX_FOLLOWERS = 24
"""If a match has more followers, only the latest ones count."""
_MIN_MASS = 0.01
"""Shorter matches are skipped once the longer ones leave less chance than this."""
_RECENCY = tuple(0.35**rank for rank in range(_MAX_FOLLOWERS))
"""Weights of followers, latest first: the latest one is the likeliest to repeat."""


@dataclass(frozen=True, slots=True)
class NgramContext:
    """The states of a context in both tries."""

    own: State
    shared: State

    @property
    def match_length(self) -> int:
        """Tokens of the longest suffix found in either trie."""
        return max(len(self.own), len(self.shared)) - 1


@dataclass(slots=True)
class Guess:
    """A token that may come next."""

    token: int
    chance: float
    source: int


class Predictor:
    """Blends the matches of a context, longest first: each takes its share of the chance that longer ones leave.

    Followers of a longer match do not count in a shorter match, whose occurrences mostly include the longer one's.
    """

    def __init__(self, shared: Trie, by_recency: bool, min_match: int) -> None:
        self.shared = shared
        self._by_recency = by_recency
        self._min_match = min_match
        self._confidence = Confidence()

    def predict(self, own: Trie, context: NgramContext, local: LocalConfidence) -> list[Guess]:
        """Return guesses with their chances, likeliest first; the chances add up to less than 1."""
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
        guesses.sort(key=lambda guess: guess.chance, reverse=True)
        return guesses

    def learn(self, own: Trie, context: NgramContext, local: LocalConfidence, token: int) -> None:
        """Learn that the target committed `token` after the context."""
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
        """Yield source, confidence cell and unseen followers of each match, longest first; own text before shared."""
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


Chances = dict[int, tuple[float, float]]
"""Token to its chance, plain and given the noise."""


class NgramRequest:
    """One request: its own trie, fed by prompt and output, and the contexts of its live nodes."""

    def __init__(self, tree: Tree, predictor: Predictor, trie: Trie, max_match: int) -> None:
        self.sampling = tree.author.sampling
        self.vocab_size = tree.author.vocab_size
        self.local = LocalConfidence()
        self.trust = NoiseTrust()
        self._tokens = list(tree.author.tokens)
        self._num_indexed = 0
        self._num_shared = len(self._tokens)
        self._predictor = predictor
        self.trie = trie
        self._max_match = max_match
        self._root = 0
        self._contexts: dict[int, NgramContext] = {0: NgramContext(trie.start(), predictor.shared.start())}
        self._expanded: dict[tuple[int, int], int] = {}
        self._chances: dict[int, Chances] = {}

    @property
    def ready(self) -> bool:
        """Whether all committed tokens are indexed; before that there are no guesses."""
        return self._num_indexed == len(self._tokens)

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
                self._predictor.learn(self.trie, context, self.local, token)
                context = self._advance(context, token)
        else:
            self._tokens.extend(tokens)
        # A new epoch has a new node 0: drop what was known about the old one.
        live = set(live) - {0}
        self._contexts = {node: kept for node, kept in self._contexts.items() if node in live}
        self._expanded = {edge: node for edge, node in self._expanded.items() if node in live}
        self._chances = {node: kept for node, kept in self._chances.items() if node in live}
        self._contexts[root] = context
        self._root = root

    def guess(self, node: FrontierNode) -> list[Guess]:
        """Return guesses for a frontier node's children, likeliest first."""
        if not self.ready:
            return []
        context = self._contexts.get(node.node)
        if context is None:
            above = self._contexts[node.parent]
            own = self.trie.step(above.own, node.token)
            context = NgramContext(own, self._predictor.shared.step(above.shared, node.token))
            self._contexts[node.node] = context
        return self._predictor.predict(self.trie, context, self.local)

    def match_length(self, node: int) -> int:
        """Return how many of the last tokens of an expanded node's context occurred before."""
        return self._contexts[node].match_length

    def remember(self, node: FrontierNode, chances: Chances) -> None:
        """Keep the guesses after a node until a commit shows which was right."""
        self._expanded[node.parent, node.token] = node.node
        self._chances[node.node] = chances

    def unshared(self, overlap: int) -> list[int]:
        """Return output not returned before, led by up to `overlap` earlier tokens, so that n-grams cross the seam."""
        start = max(0, self._num_shared - overlap)
        self._num_shared = len(self._tokens)
        return self._tokens[start:]

    @property
    def num_unshared(self) -> int:
        """Output tokens that `unshared` would return, without the overlap."""
        return len(self._tokens) - self._num_shared

    def _advance(self, context: NgramContext, token: int) -> NgramContext:
        self.trie.append(token)
        self._num_indexed += 1
        shared: State = self._predictor.shared.step(context.shared, token)
        longest = self._max_match + 1
        return NgramContext(self.trie.context()[:longest], shared[:longest])

    def _learn_noise(self, tokens: Sequence[int]) -> None:
        node: int | None = self._root
        for token in tokens:
            if node is None:
                return
            chances = self._chances.get(node, {}).get(token)
            if chances is not None:
                self.trust.learn(*chances)
            node = self._expanded.get((node, token))
