"""KV pages and their owners: requests and the radix cache."""

from __future__ import annotations

from outrider.cache.pages import PagePool, RadixCache
from verify_service.engine.request import Request


class Memory:
    """Pages of running requests, and the radix cache. The cache gets the pages of a prompt as soon as these are
    computed, and keeps those of ended requests until they are needed.

    A request holds one reference to each of its pages; the radix cache holds one to each page in its tree. Tree slots
    lie behind the committed tokens, in pages that only this request holds: shared pages are full of committed tokens.
    """

    def __init__(
        self, num_pages: int, page_size: int, keep_prefixes: bool = True, share_generated: bool = True
    ) -> None:
        """`share_generated`: whether KV that decoding computed may serve other prompts, too.

        If not, the radix cache takes and gives only prompts, each without its last token, which is the first root.
        """
        self.pool = PagePool(num_pages, page_size)
        self.radix = RadixCache(self.pool)
        self.num_pages, self.page_size = num_pages, page_size
        self.feature_epoch = 0
        """How often a feature store was begun; 0 while there is none.

        Pages filled before have KV but no features, so later requests do not share them.
        """
        self._keep_prefixes = keep_prefixes
        self._share_generated = share_generated
        self._refused: Request | None = None
        """The request that did not fit when last asked for; None again once pages were given back, or the radix cache
        got some."""

    @property
    def num_used(self) -> int:
        """Pages that a request or the radix cache holds."""
        return self.num_pages - self.pool.num_free

    @property
    def num_available(self) -> int:
        """Pages that can be had without a preemption."""
        return self.pool.num_free + self.radix.num_evictable()

    def attach(self, request: Request) -> None:
        """Give a request that has computed nothing the pages of its prefix, from the radix cache or its leader.

        These never hold the root, nor tokens whose logits the request needs: one that asks for log-probabilities of its
        prompt computes all of it.
        """
        if request.pages and request.feature_epoch != self.feature_epoch:
            return  # pages that it would get now have features, those that it has do not
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
        """Return how many of a request's first tokens it could take from the running request `other`; 0 if that is not
        at least `least` more than it has."""
        if not self._is_kept(request) or not self._is_kept(other) or request.params.tenant != other.params.tenant:
            return 0
        most = min(self._most_matched(request), self._shared(other, other.prompt_len))
        ours, theirs = request.tokens, other.tokens
        start, length, size = request.cached_len, request.cached_len + least, self.page_size
        # Compare the first tokens last: they rarely differ, and may be many.
        if length > most or ours[start:length] != theirs[start:length] or ours[:start] != theirs[:start]:
            return 0
        while length + size <= most and ours[length : length + size] == theirs[length : length + size]:
            length += size
        return length

    def new_feature_epoch(self) -> None:
        """Begin an epoch in which features of all computed tokens are stored; the radix cache forgets all pages."""
        self.feature_epoch += 1
        self.radix.clear()

    def fits(self, request: Request, num_more: int = 0) -> bool:
        """Whether a waiting request can have pages for its tokens, one page more, and `num_more`, without a preemption.

        These may be free, evictable, or hold its prefix and be used by other requests already.
        """
        # One page more than its tokens need, so that its first round does not preempt it.
        missing = -(-request.committed_len // self.page_size) + 1 + num_more - self.num_available
        if missing <= 0:
            return True
        # Looking up a long prefix takes long. It is of no use if all used pages would be too few, or if nothing was
        # given back since it was last done.
        if request is self._refused or missing > self.radix.num_pages - self.radix.num_evictable():
            return False
        most = self._most_matched(request)
        fits = missing <= self.radix.num_held(request.tokens, most, tenant=request.params.tenant)
        self._refused = None if fits else request
        return fits

    def reserve(self, request: Request, length: int) -> bool:
        """Make the request's pages cover `length` positions, evicting if need be. Returns whether there were enough."""
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
        """Evict until `num_pages` pages are free, if possible. Done while a round runs, it saves the next from it."""
        if num_pages > self.pool.num_free:
            self.radix.evict(num_pages - self.pool.num_free)

    def release(self, request: Request) -> None:
        """Take back a request's pages; those full of valid KV stay in the radix cache."""
        self._keep(request, request.cached_len)
        self.pool.release(request.pages)
        request.pages = []
        request.cached_len = 0
        self._refused = None

    def keep_prompt(self, request: Request) -> None:
        """Let the radix cache share the request's pages of its prompt that are full of valid KV.

        It takes none behind tokens of which it has other pages: while the request runs, those could not be evicted.
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
        """Return how many of its first tokens a waiting request may take from the radix cache."""
        return self._shared(request, request.most_shared)

    def _shared(self, request: Request, length: int) -> int:
        """Return how many of the request's first `length` tokens may be in the radix cache."""
        return length if self._share_generated else min(length, request.prompt_len - 1)
