"""KV memory in pages of equal size: reference counts, and the slots of positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Hands out page numbers 0..num_pages-1. Page p covers slots p * page_size .. (p + 1) * page_size - 1.

    A page has one reference for each owner: requests whose page table names it, and the radix cache.

        free        refs 0    in the free list
        private     refs 1    one request writes to it
        shared      refs >1   full, read-only; freed when the last owner releases it
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages, got {num_pages} pages of {page_size} slots")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is handed out first, while its lines may still be in the CPU's cache.
        # It starts in descending order, so a fresh pool gives 0, 1, 2, ... and page tables are contiguous.
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self.observer: EvictableCount | None = None
        """Follows which pages have one owner alone."""

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """`num_pages` pages with one reference each, or None and no change when there are not so many."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. Raises ValueError, and changes nothing, if one of them is free."""
        pages = list(pages)
        for page in pages:
            self._check_owned(page, 1)
        for page in pages:
            self._refs[page] += 1
            if self.observer is not None and self._refs[page] == 2:
                self.observer.shared(page)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page. Raises ValueError, and changes nothing, on a reference that is not held."""
        pages = list(pages)
        for page, needed in Counter(pages).items():
            self._check_owned(page, needed)
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free.append(page)
            elif self.observer is not None and self._refs[page] == 1:
                self.observer.unshared(page)

    def num_refs(self, page: int) -> int:
        """Owners of a page; 0 means free."""
        return self._refs[page]

    def _check_owned(self, page: int, needed: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is outside the pool of {self.num_pages}")
        if self._refs[page] < needed:
            raise ValueError(f"page {page} has {self._refs[page]} references, {needed} are needed")


class EvictableCount:
    """Counts the pages of a tree that no request uses, nor any page below them; updated as pages get and lose owners.

    A page is blocked by its own use and by each blocked page that follows it, so a change ends at the first page above
    that stays as it was.
    """

    def __init__(self, pool: PagePool) -> None:
        self.value = 0
        self._pool = pool
        self._parents: dict[int, int | None] = {}
        """The page before each page of the tree; None for the first of a sequence."""
        self._blocks: dict[int, int] = {}
        """What blocks each page of the tree: its own use counts 1, each blocked page behind it 1."""
        pool.observer = self

    def add(self, pages: Sequence[int], parent: int | None) -> None:
        """The tree took a run of pages behind `parent`."""
        for page in pages:
            self._parents[page], self._blocks[page] = parent, 0
            self.value += 1
            if self._pool.num_refs(page) > 1:
                self.shared(page)
            parent = page

    def remove(self, pages: Sequence[int]) -> None:
        """The tree gives up pages that are not blocked."""
        for page in pages:
            del self._parents[page], self._blocks[page]
        self.value -= len(pages)

    def clear(self) -> None:
        """The tree gave up all."""
        self._parents.clear()
        self._blocks.clear()
        self.value = 0

    def shared(self, page: int) -> None:
        """A page got a second owner."""
        above: int | None = page if page in self._blocks else None
        while above is not None:
            self._blocks[above] += 1
            if self._blocks[above] > 1:
                return
            self.value -= 1
            above = self._parents[above]

    def unshared(self, page: int) -> None:
        """A page has one owner left."""
        above: int | None = page if page in self._blocks else None
        while above is not None:
            self._blocks[above] -= 1
            if self._blocks[above]:
                return
            self.value += 1
            above = self._parents[above]


def page_slots(pages: Sequence[int], page_size: int, start: int, end: int) -> NDArray[np.int32]:
    """KV slots of positions start .. end - 1 of a request whose page table is `pages`, int32 [end - start]."""
    first = start // page_size
    used = np.array(pages[first : (end - 1) // page_size + 1], np.int32)
    slots: NDArray[np.int32] = np.add.outer(used * page_size, np.arange(page_size, dtype=np.int32)).reshape(-1)
    begin = start - first * page_size
    return slots[begin : begin + end - start]
