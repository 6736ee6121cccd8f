"""Prefixes that stay in memory after their requests, found again by their tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from outrider.cache.pages import EvictableCount, PagePool

Chunk = tuple[int | str, ...]
"""A page's tokens. A prefix's first one begins with the tenant's name, so that tenants share no page."""


class _Node:
    """A run of full pages; children are keyed by their first page's tokens, so siblings differ in their first page."""

    __slots__ = ("children", "chunks", "last_used", "pages", "parent")

    def __init__(self, parent: _Node | None, chunks: list[Chunk], pages: list[int]) -> None:
        self.parent = parent
        self.chunks = chunks
        self.pages = pages
        self.children: dict[Chunk, _Node] = {}
        self.last_used = 0


class RadixCache:
    """A radix tree over full pages of tokens; eviction takes unused leaf pages, least recently used first.

    Who holds a reference on a page of the tree:

        the tree itself        1, from `insert` until `evict`
        each request using it  1, from `match` (or its own `allocate`) until it calls `pool.release`

    so a page with exactly one reference is used by no request and may be evicted, once everything below it is gone. A
    page that is used can hang below one that is not: its request computed the same prefix in pages of its own before
    it was inserted. Such a prefix stays.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._root = _Node(None, [], [])
        self._clock = 0
        self._evictable = EvictableCount(pool)
        self.num_pages = 0

    def match(self, token_ids: Sequence[int], max_length: int | None = None, *, tenant: str = "") -> list[int]:
        """Pages of the longest prefix known of the tenant, at most `max_length` tokens long.

        Only full pages match. The caller gets one reference on each page and releases it. Pass len(prompt) - 1 as
        `max_length`, since the last prompt token must be computed for its logits; None means no bound.
        """
        limit = len(token_ids) if max_length is None else min(max_length, len(token_ids))
        chunks = self._chunks(token_ids, max(limit, 0), tenant)
        node, _ = self._walk(chunks)
        pages: list[int] = []
        while node.parent is not None:
            pages[:0] = node.pages
            node = node.parent
        self._pool.share(pages)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], *, tenant: str = "") -> int:
        """Keep the full pages of a tenant's `token_ids`, whose KV lies in `pages`, page by page.

        The tree takes a reference of its own on every page that is new to it. Where it already has the same tokens in
        another page it keeps that one, and the caller's copy stays the caller's alone. Either way the caller keeps its
        own references and releases them as ever.

        Returns:
            The number of pages that the tree took.

        Raises ValueError: fewer pages than full pages of tokens.
        """
        chunks = self._chunks(token_ids, len(token_ids), tenant)
        if len(pages) < len(chunks):
            raise ValueError(f"{len(chunks)} full pages of tokens need as many pages, got {len(pages)}")
        node, matched = self._walk(chunks)
        if matched == len(chunks):
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
        """Forget everything. Pages that requests use stay theirs."""
        self._evictable.clear()
        for node in self._nodes():
            self._pool.release(node.pages)
        self._root.children.clear()
        self.num_pages = 0

    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self._evictable.value

    def _walk(self, chunks: list[Chunk]) -> tuple[_Node, int]:
        """Follow `chunks` as far as the tree knows them, marking the way as just used.

        Returns:
            The node that ends exactly there, split off if the way ended inside one, and the number of chunks found.
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
        """Give up to `num_pages` unused pages from the leaf's end back to the pool; an emptied leaf is unlinked."""
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
        """Cut a node after `length` pages; returns the new upper part, which takes the node's place."""
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
    """How many of `ours` equal `theirs` from `start` on."""
    length = 0
    while length < len(ours) and start + length < len(theirs) and ours[length] == theirs[start + length]:
        length += 1
    return length
