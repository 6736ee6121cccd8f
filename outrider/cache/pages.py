"""KV memory in pages of equal size, and a cache that keeps prefixes after their requests and finds them by tokens."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Hands out page numbers 0..num_pages-1. Page p covers slots p * page_size .. (p + 1) * page_size - 1.

    A page has one reference for each owner: each request whose page table names the page, and the radix cache.

        free        refs 0    in the free list
        private     refs 1    one request writes to it
        shared      refs >1   full, read-only; freed when the last owner releases it
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages, got {num_pages} pages of {page_size} slots")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is handed out first, while its lines may still be in the CPU's cache. The stack
        # starts in descending order, so a fresh pool gives 0, 1, 2, ... and page tables are contiguous.
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self.observer: EvictableCount | None = None
        """Notified when a page gets a second owner, and when it has only one left."""

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return `num_pages` pages with one reference each; None, and no change, if fewer are free."""
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
        """Drop one reference of each page. Raises ValueError, and changes nothing, if a reference is not held."""
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
        """Return the number of a page's owners; 0 means free."""
        return self._refs[page]

    def _check_owned(self, page: int, needed: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is outside the pool of {self.num_pages}")
        if self._refs[page] < needed:
            raise ValueError(f"page {page} has {self._refs[page]} references, {needed} are needed")


def page_slots(pages: Sequence[int] | NDArray[np.int32], page_size: int, start: int, end: int) -> NDArray[np.int32]:
    """Return the KV slots of positions start .. end - 1 under page table `pages`, int32 [end - start]."""
    first = start // page_size
    used = np.array(pages[first : (end - 1) // page_size + 1], np.int32)
    slots: NDArray[np.int32] = np.add.outer(used * page_size, np.arange(page_size, dtype=np.int32)).reshape(-1)
    begin = start - first * page_size
    return slots[begin : begin + end - start]


class EvictableCount:
    """Counts the pages of a tree that can be evicted: no request uses them or any page below them.

    A page is blocked by its own use, and by each blocked page that directly follows it. An update goes up until it
    reaches a page that stays as it was.
    """

    def __init__(self, pool: PagePool) -> None:
        self.value = 0
        self._pool = pool
        self._parents: dict[int, int | None] = {}
        """The page before each page of the tree; None for the first of a sequence."""
        self._num_blockers: dict[int, int] = {}
        """Number of blockers of each page of the tree: its own use, and each blocked page directly behind it."""
        pool.observer = self

    def add(self, pages: Sequence[int], parent: int | None) -> None:
        """Add a run of pages that the tree took behind `parent`."""
        for page in pages:
            self._parents[page], self._num_blockers[page] = parent, 0
            self.value += 1
            if self._pool.num_refs(page) > 1:
                self.shared(page)
            parent = page

    def remove(self, pages: Sequence[int]) -> None:
        """Remove pages that the tree gives up, which must not be blocked."""
        for page in pages:
            del self._parents[page], self._num_blockers[page]
        self.value -= len(pages)

    def is_blocked(self, page: int) -> bool:
        """Whether a page of the tree is blocked, and so not counted."""
        return self._num_blockers[page] > 0

    def shared(self, page: int) -> None:
        """Update for a page that got a second owner."""
        above: int | None = page if page in self._num_blockers else None
        while above is not None:
            self._num_blockers[above] += 1
            if self._num_blockers[above] > 1:
                return
            self.value -= 1
            above = self._parents[above]

    def unshared(self, page: int) -> None:
        """Update for a page that has one owner left."""
        above: int | None = page if page in self._num_blockers else None
        while above is not None:
            self._num_blockers[above] -= 1
            if self._num_blockers[above]:
                return
            self.value += 1
            above = self._parents[above]


Chunk = tuple[int | str, ...]
"""A page's tokens. The first chunk of a prefix begins with the tenant's name, so that tenants share no page."""


@dataclass(slots=True, eq=False)
class _Node:
    """A run of full pages. Children are keyed by their first page's tokens, so siblings differ in their first page."""

    parent: _Node | None
    chunks: list[Chunk]
    pages: list[int]
    children: dict[Chunk, _Node] = field(default_factory=dict)
    last_used: int = 0


class RadixCache:
    """A radix tree over full pages of tokens; eviction takes unused leaf pages, least recently used first.

    Who holds a reference on a page of the tree:

        the tree itself        1, from `insert` until `evict`
        each request using it  1, from `match` (or its own `allocate`) until it calls `pool.release`

    So a page with exactly one reference is used by no request and may be evicted once everything below it is gone. A
    used page can hang below an unused one, if its request had computed that prefix in pages of its own before it
    inserted them. The unused page then stays.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._root = _Node(None, [], [])
        self._clock = 0
        self._evictable = EvictableCount(pool)
        self.num_pages = 0

    def match(self, token_ids: Sequence[int], max_length: int | None = None, *, tenant: str = "") -> list[int]:
        """Return the pages of the tenant's longest known prefix, at most `max_length` tokens long.

        Only full pages match. The caller gets one reference on each page, and must release it. Pass len(prompt) - 1 as
        `max_length`, since the last prompt token must be computed for its logits; None means no bound.
        """
        pages = self._find(token_ids, max_length, tenant)
        self._pool.share(pages)
        return pages

    def num_held(self, token_ids: Sequence[int], max_length: int | None = None, *, tenant: str = "") -> int:
        """Return how many of the pages that `match` would give are in use or have pages in use below them.

        Marks the path as just used.
        """
        return sum(map(self._evictable.is_blocked, self._find(token_ids, max_length, tenant)))

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], *, tenant: str = "", extends: bool = False) -> int:
        """Keep the full pages of a tenant's `token_ids`, whose KV lies in `pages`, page by page.

        The tree takes its own reference on every page that is new to it. If it already has the same tokens in another
        page, it keeps that one and does not take the caller's copy. Either way the caller keeps its own references and
        must release them.

        `extends`: take no pages behind a page where the tree keeps its own copy, which would have to stay while the
        caller uses the pages behind it.

        Returns:
            Number of pages that the tree took.

        Raises ValueError: fewer pages than full pages of tokens.
        """
        chunks = self._chunks(token_ids, len(token_ids), tenant)
        if len(pages) < len(chunks):
            raise ValueError(f"{len(chunks)} full pages of tokens need as many pages, got {len(pages)}")
        node, matched = self._walk(chunks)
        if matched == len(chunks) or (extends and matched and node.pages[-1] != pages[matched - 1]):
            return 0
        new = list(pages[matched : len(chunks)])
        self._pool.share(new)
        self._evictable.add(new, node.pages[-1] if node.pages else None)
        leaf = _Node(node, chunks[matched:], new)
        leaf.last_used = self._clock
        node.children[chunks[matched]] = leaf
        self.num_pages += len(new)
        return len(new)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that no request uses, least recently used first. Returns how many were freed."""
        heap = [(leaf.last_used, id(leaf), leaf) for leaf in self._nodes() if not leaf.children]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < num_pages:
            _, _, leaf = heapq.heappop(heap)
            freed += self._trim(leaf, num_pages - freed)
            if leaf.pages:
                continue  # the rest is in use, or enough is freed
            parent = leaf.parent
            if parent is not None and parent is not self._root and not parent.children:
                heapq.heappush(heap, (parent.last_used, id(parent), parent))
        return freed

    def clear(self) -> None:
        """Forget everything. Requests keep the pages that they use."""
        self._evictable = EvictableCount(self._pool)
        for node in self._nodes():
            self._pool.release(node.pages)
        self._root.children.clear()
        self.num_pages = 0

    def num_evictable(self) -> int:
        """Return the number of pages that `evict` could free now."""
        return self._evictable.value

    def _find(self, token_ids: Sequence[int], max_length: int | None, tenant: str) -> list[int]:
        """Return the pages of the tenant's longest known prefix, at most `max_length` tokens long."""
        limit = len(token_ids) if max_length is None else min(max_length, len(token_ids))
        node, _ = self._walk(self._chunks(token_ids, max(limit, 0), tenant))
        pages: list[int] = []
        while node.parent is not None:
            pages[:0] = node.pages
            node = node.parent
        return pages

    def _walk(self, chunks: list[Chunk]) -> tuple[_Node, int]:
        """Follow `chunks` as far as the tree has them, marking the path as just used.

        Returns:
            The node that ends exactly there, split off if the path ended inside a node, and the number of chunks found.
        """
        self._clock += 1
        node, found = self._root, 0
        while found < len(chunks) and (child := node.children.get(chunks[found])) is not None:
            length = _common(child.chunks, chunks, found)
            node = child if length == len(child.chunks) else self._split(child, length)
            node.last_used = self._clock
            found += length
        return node, found

    def _trim(self, leaf: _Node, num_pages: int) -> int:
        """Release up to `num_pages` unused pages from the leaf's end, and unlink the leaf if it is empty then."""
        key, keep = leaf.chunks[0], len(leaf.pages)
        least = max(keep - num_pages, 0)
        while keep > least and self._pool.num_refs(leaf.pages[keep - 1]) == 1:
            keep -= 1
        gone = leaf.pages[keep:]
        self._evictable.remove(gone)
        self._pool.release(gone)
        del leaf.pages[keep:], leaf.chunks[keep:]
        self.num_pages -= len(gone)
        if not keep and leaf.parent is not None:
            del leaf.parent.children[key]
        return len(gone)

    def _split(self, node: _Node, length: int) -> _Node:
        """Split a node after `length` pages; returns the new upper part, which takes the node's place."""
        parent = node.parent if node.parent is not None else self._root
        upper = _Node(parent, node.chunks[:length], node.pages[:length])
        upper.last_used = node.last_used
        parent.children[upper.chunks[0]] = upper
        node.chunks, node.pages, node.parent = node.chunks[length:], node.pages[length:], upper
        upper.children[node.chunks[0]] = node
        return upper

    def _chunks(self, token_ids: Sequence[int], length: int, tenant: str) -> list[Chunk]:
        size = self._page_size
        chunks: list[Chunk] = [tuple(token_ids[start : start + size]) for start in range(0, length - size + 1, size)]
        if chunks:
            chunks[0] = (tenant, *chunks[0])
        return chunks

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _common(ours: list[Chunk], theirs: list[Chunk], start: int) -> int:
    """Return how many leading chunks of `ours` equal those of `theirs` from `start` on."""
    length = 0
    while length < len(ours) and start + length < len(theirs) and ours[length] == theirs[start + length]:
        length += 1
    return length
