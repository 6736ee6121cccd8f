"""Who owns which KV page."""

from __future__ import annotations

import torch

from outrider.cache.pages import PagePool
from outrider.cache.radix import RadixCache
from verify_service.request import Request


class Memory:
    """Pages of running requests, and the radix cache that keeps those of ended ones until they are needed.

    A request holds one reference to each of its pages; the radix cache holds one to each page in its tree. Tree slots
    lie behind the committed tokens, in pages that only this request holds: shared pages are full of committed tokens.
    """

    def __init__(self, num_pages: int, page_size: int, keep_prefixes: bool = True) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.radix = RadixCache(self.pool)
        self.page_size = page_size
        self._keep_prefixes = keep_prefixes

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.pool.num_pages

    @property
    def num_used(self) -> int:
        """Pages that a request or the radix cache holds."""
        return self.pool.num_pages - self.pool.num_free

    def attach(self, request: Request) -> None:
        """Give a request the cached pages of its prefix; the root is never taken from the cache."""
        pages = self.radix.match(request.tokens, max_length=request.committed_len - 1)
        self._extend(request, pages)
        request.cached_len = len(pages) * self.page_size

    def fits(self, length: int) -> bool:
        """Whether `length` positions could be had from free and evictable pages."""
        return self._pages_for(length) <= self.pool.num_free + self.radix.num_evictable()

    def reserve(self, request: Request, length: int) -> bool:
        """Make the request's pages cover `length` positions, evicting from the cache if need be."""
        missing = self._pages_for(length) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            self.radix.evict(missing - self.pool.num_free)
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        self._extend(request, pages)
        return True

    def release(self, request: Request) -> None:
        """Take a request's pages; what is full of valid KV stays in the radix cache."""
        if request.pages:
            num_full = request.cached_len // self.page_size if self._keep_prefixes else 0
            self.radix.insert(request.tokens[: num_full * self.page_size], request.pages[:num_full])
            self.pool.release(request.pages)
        request.pages = []
        request.slots = request.slots[:0]
        request.cached_len = 0

    def check_integrity(self) -> None:
        """Raise RuntimeError if references and pages disagree."""
        self.pool.check_integrity()
        self.radix.check_integrity()

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _extend(self, request: Request, pages: list[int]) -> None:
        request.pages.extend(pages)
        first = torch.tensor(pages, dtype=torch.int64) * self.page_size
        slots = (first[:, None] + torch.arange(self.page_size)).reshape(-1)
        request.slots = torch.cat([request.slots, slots])
