"""NGRAM: guesses that text goes on as it did before. No model; the tries hold prompt bodies and outputs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draft_service.drafters.base import Candidate, Drafter, DraftRequest, FrontierNode
from draft_service.drafters.ngram_predictor import Guess, Predictor
from draft_service.drafters.ngram_request import NgramRequest
from draft_service.drafters.noise_trust import chances_given_noise, point_gumbel
from draft_service.drafters.trie import Trie
from outrider.config.draft import DraftOptions

_INDEX_SLICE = 64
"""Tokens indexed between two looks at the clock: 0.3 ms, up to 1.5 where text repeats."""
_SHARE_EVERY = 64
"""Output tokens of a running request that others get to see at once."""
_MIN_CAPACITY = 1024
_MIN_CHANCE = 1e-4
"""Guesses below this are not worth a node anywhere."""


class NgramDrafter(Drafter):
    """Matches the context's suffixes in the request's own trie and in one that all requests share."""

    sources = ("ngram", "ngram_shared")

    def __init__(self, options: DraftOptions) -> None:
        self._options = options
        self._by_recency = options.match_type == "BFS"
        self._requests: dict[int, NgramRequest] = {}
        self._unindexed: deque[int] = deque()
        self._to_share: deque[list[int]] = deque()
        self._share = options.request_capacity
        self.forget_target()

    def open(self, request: DraftRequest) -> None:
        """Indexing the prompt is left to `work`; until it is done there are no guesses."""
        trie = Trie(self._share, self._options.branch_length)
        own = NgramRequest(request, self._predictor, trie, self._options.max_match_window_size)
        self._requests[request.handle] = own
        self._share_capacity()
        own.index(_INDEX_SLICE)
        if not own.ready:
            self._unindexed.append(request.handle)

    def commit(
        self, request: int, tokens: Sequence[int], root: int, live: Collection[int], features: Any | None = None
    ) -> None:
        """Learn, extend the trie, forget dead nodes."""
        own = self._requests[request]
        own.commit(tokens, root, live)
        if own.num_unshared >= _SHARE_EVERY:
            self._to_share.append(own.unshared(self._options.max_match_window_size))

    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        """Followers of each node's context; with temperature, weighed by the shared noise."""
        return [self._expand(node) for node in frontier]

    def close(self, request: int) -> None:
        """Free the request; its last output goes to the shared trie."""
        own = self._requests.pop(request)
        self._share_capacity()
        if own.num_unshared:
            self._to_share.append(own.unshared(self._options.max_match_window_size))

    def work(self, deadline: float) -> list[int]:
        """Index prompts, then share outputs."""
        finished = []
        while self._unindexed and time.perf_counter() < deadline:
            own = self._requests.get(self._unindexed[0])
            if own is not None and not own.ready:
                own.index(_INDEX_SLICE)
            if own is None or own.ready:
                handle = self._unindexed.popleft()
                if own is not None:
                    finished.append(handle)
        while self._to_share and time.perf_counter() < deadline:
            text = self._to_share.popleft()
            for token in text[:_INDEX_SLICE]:
                self._shared.append(token)
            if len(text) > _INDEX_SLICE:
                self._to_share.appendleft(text[_INDEX_SLICE:])
            else:
                self._shared.end_text()
        return finished

    @property
    def has_work(self) -> bool:
        """Whether prompts or outputs wait for their trie."""
        return bool(self._unindexed or self._to_share)

    def forget_target(self) -> None:
        """Start an empty shared trie."""
        options = self._options
        self._to_share.clear()
        self._shared = Trie(options.capacity, options.branch_length)
        self._predictor = Predictor(self._shared, self._by_recency, options.min_match_window_size)

    def gauges(self) -> Mapping[str, int]:
        """Nodes of the shared trie."""
        return {"shared_trie_nodes": len(self._shared)}

    def _share_capacity(self) -> None:
        """Give every request's trie an even share of the nodes that all may have."""
        even = self._options.total_capacity // max(1, len(self._requests))
        share = max(_MIN_CAPACITY, min(self._options.request_capacity, even))
        if share != self._share:
            self._share = share
            for own in self._requests.values():
                own.set_capacity(share)

    def _expand(self, node: FrontierNode) -> list[Candidate]:
        own = self._requests[node.request]
        guesses = [guess for guess in own.guess(node) if guess.chance > _MIN_CHANCE and guess.token < own.vocab_size]
        if not guesses:
            return []
        del guesses[self._breadth(own.match_length(node.node)) :]
        if not own.sampling.greedy:
            guesses = _weigh_by_noise(own, node, guesses)
        return [Candidate(guess.token, math.log(guess.chance), guess.source) for guess in guesses]

    def _breadth(self, match_length: int) -> int:
        """Children of a node: the longer the match, the fewer."""
        options = self._options
        widest, narrowest = options.max_bfs_breadth, options.min_bfs_breadth
        lengths = max(1, options.max_match_window_size - options.min_match_window_size)
        share = min(1.0, (match_length - options.min_match_window_size) / lengths)
        return round(widest - share * (widest - narrowest))


def _weigh_by_noise(own: NgramRequest, node: FrontierNode, guesses: list[Guess]) -> list[Guess]:
    """The guesses with their chances given the noise, as far as the request has shown that it matters."""
    sampling = own.sampling
    noise = [point_gumbel(sampling.seed, sampling.choice_index, node.position, guess.token) for guess in guesses]
    noisy = chances_given_noise([guess.chance for guess in guesses], noise)
    own.remember(node, {guess.token: (guess.chance, chance) for guess, chance in zip(guesses, noisy, strict=True)})
    weight = own.trust.weight
    weighed = [
        Guess(guess.token, max(_MIN_CHANCE, guess.chance + weight * (chance - guess.chance)), guess.source)
        for guess, chance in zip(guesses, noisy, strict=True)
    ]
    weighed.sort(key=lambda guess: guess.chance, reverse=True)
    return weighed
