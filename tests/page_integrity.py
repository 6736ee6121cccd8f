"""Whether the pages of the KV cache, and the radix tree over them, are what they say."""

from __future__ import annotations

from collections import Counter

from outrider.cache.pages import PagePool, RadixCache
from verify_service.engine.memory import Memory
from verify_service.engine.scheduler import Scheduler


def check_memory(memory: Memory) -> None:
    check_pages(memory.pool)
    check_radix(memory.radix)


def check_owners(scheduler: Scheduler) -> None:
    """Every page has one reference of each request that names it, and one of the radix tree if that has it."""
    memory = scheduler.memory
    check_memory(memory)
    owners = Counter[int](page for node in memory.radix._nodes() for page in node.pages)
    for request in {*scheduler.running, *scheduler._ended}:
        owners.update(request.pages)
    assert memory.pool._refs == [owners[page] for page in range(memory.num_pages)]
    assert not any(request.pages for request in scheduler.waiting), "a request that waits holds pages"


def check_pages(pool: PagePool) -> None:
    """Every page is either free once or referenced."""
    free = set(pool._free)
    assert len(free) == len(pool._free), "a page is in the free list twice"
    for page, refs in enumerate(pool._refs):
        assert refs >= 0 and (refs == 0) == (page in free), f"page {page} has {refs} references and free={page in free}"


def check_radix(cache: RadixCache) -> None:
    """The tree is well formed and holds a reference on each of its pages."""
    seen: set[int] = set()
    for node in cache._nodes():
        assert node.pages and len(node.pages) == len(node.chunks)
        is_first = node.parent is cache._root
        tokens = (chunk[is_first and at == 0 :] for at, chunk in enumerate(node.chunks))
        assert all(len(chunk) == cache._page_size for chunk in tokens), "a chunk is not a page long"
        assert node.parent is not None and node.parent.children.get(node.chunks[0]) is node
        assert is_first or node.parent.last_used >= node.last_used, "a node was used after its parent"
        for page in node.pages:
            assert page not in seen and cache._pool.num_refs(page) > 0, f"page {page} is held twice or free"
            seen.add(page)
    assert len(seen) == cache.num_pages
