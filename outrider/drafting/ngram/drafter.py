"""NGRAM: guesses that text goes on as it did before. Needs no model; the tries hold prompt bodies and outputs."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence

from outrider.config.draft import DraftOptions
from outrider.drafting.base import Candidate, Drafter, FrontierNode
from outrider.drafting.ngram.predictor import Guess, NgramRequest, Predictor, chances_given_noise, point_gumbel
from outrider.drafting.ngram.trie import Trie
from outrider.drafting.tree_growth import Tree

_INDEX_SLICE = 64
"""Tokens indexed between two looks at the clock: 0.3 ms, up to 1.5 where text repeats."""
_SHARE_EVERY = 64
"""A running request shares its output with others in pieces of this many tokens."""
_MIN_CAPACITY = 1024
_MAX_TENANTS = 1024
"""Tenants whose outputs are kept, beside those with open requests."""
_MIN_CHANCE = 1e-4
"""Guesses below this are not worth a node anywhere."""


class _Tenant:
    """State shared by the requests of one tenant: a trie of their outputs, and how far its matches are trusted."""

    def __init__(self, options: DraftOptions) -> None:
        self.trie = Trie(options.capacity, options.branch_length)
        self.predictor = Predictor(self.trie, options.match_type == "BFS", options.min_match_window_size)
        self.num_users = 0
        """Number of open requests, and of outputs that are not in the trie yet."""


class NgramDrafter(Drafter):
    """Matches suffixes of the context in the request's own trie, and in a trie shared by its tenant's requests."""

    sources = ("ngram", "ngram_shared")

    def __init__(self, options: DraftOptions) -> None:
        self._options = options
        self._requests: dict[int, NgramRequest] = {}
        self._unindexed: deque[int] = deque()
        self._to_share: deque[tuple[_Tenant, list[int]]] = deque()
        self._share = options.request_capacity
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # least recently opened first
        self._tenant_of: dict[int, _Tenant] = {}
        self._shared_size = 0

    def open(self, tree: Tree) -> None:
        """Begin a request. `work` indexes the rest of a long prompt; until that is done there are no guesses."""
        trie = Trie(self._share, self._options.branch_length)
        tenant = self._tenants.pop(tree.author.tenant, None) or _Tenant(self._options)
        self._tenants[tree.author.tenant] = tenant
        tenant.num_users += 1
        own = NgramRequest(tree, tenant.predictor, trie, self._options.max_match_window_size)
        self._requests[tree.handle] = own
        self._tenant_of[tree.handle] = tenant
        self._share_capacity()
        own.index(_INDEX_SLICE)
        if not own.ready:
            self._unindexed.append(tree.handle)

    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        """Learn from committed tokens, extend the trie, and forget dead nodes."""
        own = self._requests[request]
        own.commit(tokens, root, live)
        if own.num_unshared >= _SHARE_EVERY:
            self._share_output(own, self._tenant_of[request])

    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        """Return the followers of each node's context; with temperature, weighed by the shared noise."""
        return [self._expand(node) for node in frontier]

    def close(self, request: int) -> None:
        """Free the request; its last output goes to its tenant's trie."""
        own, tenant = self._requests.pop(request), self._tenant_of.pop(request)
        tenant.num_users -= 1
        self._share_capacity()
        if own.num_unshared:
            self._share_output(own, tenant)
        self._drop_tenants()

    def work(self, deadline: float) -> list[int]:
        """Index prompts in turns, so that a long one keeps no other waiting, then share outputs."""
        finished = []
        while self._unindexed and time.perf_counter() < deadline:
            handle = self._unindexed.popleft()
            own = self._requests.get(handle)
            if own is None:
                continue
            own.index(_INDEX_SLICE)
            if own.ready:
                finished.append(handle)
            else:
                self._unindexed.append(handle)
        while self._to_share and time.perf_counter() < deadline:
            tenant, text = self._to_share.popleft()
            size = tenant.trie.size
            for token in text[:_INDEX_SLICE]:
                tenant.trie.append(token)
            if len(text) > _INDEX_SLICE:
                self._to_share.appendleft((tenant, text[_INDEX_SLICE:]))
            else:
                tenant.trie.end_text()
                tenant.num_users -= 1
            self._shared_size += tenant.trie.size - size
            self._drop_tenants()
        return finished

    @property
    def has_work(self) -> bool:
        """Whether prompts or outputs wait for their trie."""
        return bool(self._unindexed or self._to_share)

    def forget_target(self) -> None:
        """Forget the outputs of all tenants."""
        self._to_share.clear()
        self._tenants.clear()
        self._shared_size = 0

    def gauges(self) -> Mapping[str, int]:
        """Return the number of nodes in the tries of all tenants."""
        return {"shared_trie_nodes": sum(len(tenant.trie) for tenant in self._tenants.values())}

    def _share_capacity(self) -> None:
        """Share the capacity of requests' tries evenly among them, and likewise that of tenants with open requests."""
        open_tenants = set(self._tenant_of.values())
        for tenant in open_tenants:
            tenant.trie.capacity = max(_MIN_CAPACITY, self._options.capacity // len(open_tenants))
        even = self._options.total_capacity // max(1, len(self._requests))
        share = max(_MIN_CAPACITY, min(self._options.request_capacity, even))
        if share != self._share:
            self._share = share
            for own in self._requests.values():
                own.trie.capacity = share

    def _drop_tenants(self) -> None:
        """Forget unused tenants, least recently opened first, until the rest is within bounds."""
        if self._shared_size <= self._options.capacity and len(self._tenants) <= _MAX_TENANTS:
            return
        for name in [name for name, tenant in self._tenants.items() if not tenant.num_users][: len(self._tenants) - 1]:
            self._shared_size -= self._tenants.pop(name).trie.size
            if self._shared_size <= self._options.capacity and len(self._tenants) <= _MAX_TENANTS:
                return

    def _share_output(self, own: NgramRequest, tenant: _Tenant) -> None:
        tenant.num_users += 1
        self._to_share.append((tenant, own.unshared(self._options.max_match_window_size)))

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
        """Return how many children a node gets: the longer the match, the fewer."""
        options = self._options
        widest, narrowest = options.max_bfs_breadth, options.min_bfs_breadth
        lengths = max(1, options.max_match_window_size - options.min_match_window_size)
        share = min(1.0, (match_length - options.min_match_window_size) / lengths)
        return round(widest - share * (widest - narrowest))


def _weigh_by_noise(own: NgramRequest, node: FrontierNode, guesses: list[Guess]) -> list[Guess]:
    """Return the guesses with chances blended with those given the noise, as far as the request trusts the noise."""
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
