"""KV pages and their owners: requests and the radix cache."""

from __future__ import annotations

from outrider.cache.pages import PagePool, RadixCache
from verify_service.engine.request import Request


class Memory:
    """Pages of running requests, and the radix cache, which has the pages of their prompts as soon as these are
    computed, and keeps those of ended requests until they are needed.

    A request holds one reference to each of its pages; the radix cache holds one to each page in its tree. Tree slots
    lie behind the committed tokens, in pages that only this request holds: shared pages are full of committed tokens.
    """

    def __init__(
        self, num_pages: int, page_size: int, keep_prefixes: bool = True, share_generated: bool = True
    ) -> None:
        """`share_generated`: whether KV that decoding computed may serve as another prompt's, too.

        If not, the prompt but for its last token, which is the first root, is all that the radix cache takes and gives.
        """
        self.pool = PagePool(num_pages, page_size)
        self.radix = RadixCache(self.pool)
        self.num_pages, self.page_size = num_pages, page_size
        self.feature_epoch = 0
        """Counts how often the store of features was begun anew; 0 while there is none.

        Pages that were filled before have KV and no features, so they are not shared with what comes after.
        """
        self._keep_prefixes = keep_prefixes
        self._share_generated = share_generated
        self._refused: Request | None = None
        """The request that did not fit when it was asked for last; None once pages have been given back since, or the
        radix cache has got some."""

    @property
    def num_used(self) -> int:
        """Pages that a request or the radix cache holds."""
        return self.num_pages - self.pool.num_free

    @property
    def num_available(self) -> int:
        """Pages that can be had without a preemption."""
        return self.pool.num_free + self.radix.num_evictable()

    def attach(self, request: Request) -> None:
        """Give a request that has computed nothing the pages of its prefix that the radix cache has, or its leader.

        The root is never one of them, nor is what the request needs the logits of: one that asks for log-probabilities
        of its prompt computes all of it.
        """
        if request.pages and request.feature_epoch != self.feature_epoch:
            return  # what there is now has features, what it was given before has none
        pages = self.radix.match(request.tokens, self._most_matched(request), tenant=request.params.tenant)
        leader = request.leader
        if leader is not None and self._is_kept(leader):
            led = leader.pages[: min(leader.cached_len, request.shared_len) // self.page_size]
            if len(led) > len(pages):
                self.pool.share(led)
                self.pool.release(pages)
                pages = led
        self.pool.release(request.pages)
        request.pages = pages
        request.cached_len = len(pages) * self.page_size
        request.feature_epoch = self.feature_epoch

    def num_shareable(self, request: Request, other: Request, least: int) -> int:
        """How many of a request's first tokens could be in pages of `other`, which runs; 0 if these are not `least`
        more than the request has."""
        if not self._is_kept(request) or not self._is_kept(other) or request.params.tenant != other.params.tenant:
            return 0
        most = min(self._most_matched(request), self._shared(other, other.prompt_len))
        ours, theirs = request.tokens, other.tokens
        start, length, size = request.cached_len, request.cached_len + least, self.page_size
        # What comes first differs seldom, and may be long.
        if length > most or ours[start:length] != theirs[start:length] or ours[:start] != theirs[:start]:
            return 0
        while length + size <= most and ours[length : length + size] == theirs[length : length + size]:
            length += size
        return length

    def new_feature_epoch(self) -> None:
        """Features of everything computed from now on are stored; the radix cache forgets pages without any."""
        self.feature_epoch += 1
        self.radix.clear()

    def fits(self, request: Request, num_more: int = 0) -> bool:
        """Whether pages for a waiting request's tokens, one more, and `num_more` could be had without a preemption.

        They are free or evictable; or of its prefix, and used by others already.
        """
        # One page more than it has tokens, lest it be preempted by its first round.
        missing = -(-request.committed_len // self.page_size) + 1 + num_more - self.num_available
        if missing <= 0:
            return True
        # Looking for a long prefix takes long: it finds no more than all that are used, and nothing new until pages are
        # given back.
        if request is self._refused or missing > self.radix.num_pages - self.radix.num_evictable():
            return False
        most = self._most_matched(request)
        fits = missing <= self.radix.num_held(request.tokens, most, tenant=request.params.tenant)
        self._refused = None if fits else request
        return fits

    def reserve(self, request: Request, length: int) -> bool:
        """Make the request's pages cover `length` positions, evicting from the cache if need be."""
        missing = -(-length // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        self.refill(missing)
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def refill(self, num_pages: int) -> None:
        """Have so many pages free, if evicting can bring it about: while a round runs, so that the next need not."""
        if num_pages > self.pool.num_free:
            self.radix.evict(num_pages - self.pool.num_free)

    def release(self, request: Request) -> None:
        """Take a request's pages; what is full of valid KV stays in the radix cache."""
        self._keep(request, request.cached_len)
        self.pool.release(request.pages)
        request.pages = []
        request.cached_len = 0
        self._refused = None

    def keep_prompt(self, request: Request) -> None:
        """Have the radix cache take what is full of valid KV of a prompt's pages, which stay the request's as well.

        Not where it has other pages with the same tokens: as long as the request ran, they could not be evicted.
        """
        self._keep(request, min(request.cached_len, request.prompt_len), extends=True)

    def _keep(self, request: Request, length: int, extends: bool = False) -> None:
        if request.pages and self._is_kept(request):
            num_full = self._shared(request, length) // self.page_size
            tokens, pages = request.tokens[: num_full * self.page_size], request.pages[:num_full]
            if self.radix.insert(tokens, pages, tenant=request.params.tenant, extends=extends):
                self._refused = None

    def _is_kept(self, request: Request) -> bool:
        """Whether the radix cache takes pages of the request."""
        return self._keep_prefixes and request.feature_epoch == self.feature_epoch

    def _most_matched(self, request: Request) -> int:
        """How many of a waiting request's first tokens it may have of the radix cache."""
        return self._shared(request, request.most_shared)

    def _shared(self, request: Request, length: int) -> int:
        """How many of the request's first `length` tokens may be in the radix cache."""
        return length if self._share_generated else min(length, request.prompt_len - 1)
