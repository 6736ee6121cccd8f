"""A match is the longest prefix of full pages that was kept, and eviction takes nothing that is in use."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from page_integrity import check_pages, check_radix

from outrider.cache.pages import PagePool, RadixCache

PAGE_SIZE = 2
NUM_PAGES = 24

# Two tokens make shared prefixes, splits and page-border differences common.
prompts = st.lists(st.integers(0, 1), max_size=13)


class RadixMachine(RuleBasedStateMachine):
    """The cache against a dictionary from prefix to page, driven as an engine drives it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.cache = RadixCache(self.pool)
        self.model: dict[tuple[int, ...], int] = {}
        self.running: list[tuple[list[int], list[int]]] = []

    def expected(self, tokens: list[int], limit: int) -> list[int]:
        pages = []
        for end in range(PAGE_SIZE, limit + 1, PAGE_SIZE):
            if tuple(tokens[:end]) not in self.model:
                break
            pages.append(self.model[tuple(tokens[:end])])
        return pages

    @rule(tokens=prompts)
    def start(self, tokens: list[int]) -> None:
        limit = len(tokens) - 1
        free = {self.model[prefix] for prefix in self.evictable()}
        num_held = sum(page not in free for page in self.expected(tokens, limit))
        assert self.cache.num_held(tokens, max_length=limit) == num_held
        pages = self.cache.match(tokens, max_length=limit)
        assert pages == self.expected(tokens, limit)
        assert len(pages) * PAGE_SIZE <= max(limit, 0)
        needed = -(-len(tokens) // PAGE_SIZE) - len(pages)
        own = self.pool.allocate(needed)
        if own is None:
            self.check_eviction(needed - self.pool.num_free)
            own = self.pool.allocate(needed)
        if own is None:
            self.pool.release(pages)
        else:
            self.running.append((tokens, pages + own))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        tokens, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if keep:
            self.keep(tokens, pages)
        self.pool.release(pages)

    def keep(self, tokens: list[int], pages: list[int], extends: bool = False) -> None:
        taken = 0
        for index in range(len(tokens) // PAGE_SIZE):
            prefix = tuple(tokens[: (index + 1) * PAGE_SIZE])
            if prefix not in self.model:
                if extends and index and self.model[prefix[:-PAGE_SIZE]] != pages[index - 1]:
                    break
                self.model[prefix] = pages[index]
                taken += 1
        assert self.cache.insert(tokens, pages, extends=extends) == taken

    def evictable(self) -> set[tuple[int, ...]]:
        """Prefixes whose pages no request uses, nor any page of a longer one."""
        used = [prefix for prefix, page in self.model.items() if self.pool.num_refs(page) > 1]
        return {prefix for prefix in self.model if not any(longer[: len(prefix)] == prefix for longer in used)}

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """A request that goes on with its pages; below another's copy of its prefix some may hang."""
        tokens, pages = data.draw(st.sampled_from(self.running))
        self.keep(tokens, pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Such a request takes nothing from what others could have."""
        tokens, pages = data.draw(st.sampled_from(self.running))
        available = self.pool.num_free + self.cache.num_evictable()
        self.keep(tokens, pages, extends=True)
        assert self.pool.num_free + self.cache.num_evictable() == available

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        self.check_eviction(count)

    def check_eviction(self, count: int) -> None:
        evictable = self.evictable()
        freed = self.cache.evict(count)
        assert freed == min(count, len(evictable))
        gone = {prefix for prefix, page in self.model.items() if self.pool.num_refs(page) == 0}
        assert len(gone) == freed and gone <= evictable
        for prefix in gone:
            del self.model[prefix]
        # Nothing is left without the prefix that it continues.
        assert all(prefix[:-PAGE_SIZE] in self.model for prefix in self.model if len(prefix) > PAGE_SIZE)

    @invariant()
    def books_agree(self) -> None:
        check_radix(self.cache)
        check_pages(self.pool)
        assert self.cache.num_pages == len(self.model)
        assert self.cache.num_evictable() == len(self.evictable())
        owned = {page for _, pages in self.running for page in pages} | set(self.model.values())
        assert self.pool.num_free == NUM_PAGES - len(owned)


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=examples(30))


def kept(cache: RadixCache, pool: PagePool, tokens: list[int]) -> list[int]:
    """Insert a finished request's tokens; returns its pages, now the cache's alone."""
    pages = pool.allocate(len(tokens) // PAGE_SIZE)
    assert pages is not None
    cache.insert(tokens, pages)
    pool.release(pages)
    return pages


def is_kept(cache: RadixCache, pool: PagePool, tokens: list[int]) -> bool:
    pages = cache.match(tokens)
    pool.release(pages)
    return len(pages) * PAGE_SIZE == len(tokens)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    for first in (1, 2, 3):
        kept(cache, pool, [first, 0])
    pool.release(cache.match([1, 0]))
    assert cache.evict(1) == 1
    assert [is_kept(cache, pool, [first, 0]) for first in (1, 2, 3)] == [True, False, True]


def test_eviction_takes_the_end_of_a_branch_before_its_start() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    kept(cache, pool, [1, 2, 3, 4, 5, 6])
    assert cache.evict(2) == 2
    assert is_kept(cache, pool, [1, 2])
    assert cache.num_pages == 1


def test_a_matched_page_survives_eviction_until_released() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    kept(cache, pool, [1, 2, 3, 4])
    pages = cache.match([1, 2, 3, 4], max_length=3)
    assert len(pages) == 1
    assert cache.evict(NUM_PAGES) == 1
    assert pool.num_refs(pages[0]) == 2
    pool.release(pages)
    assert cache.evict(NUM_PAGES) == 1
    assert pool.num_free == NUM_PAGES


def test_an_unused_prefix_of_a_used_page_stays() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    kept(cache, pool, [1, 2])
    own = pool.allocate(2)
    assert own is not None
    assert cache.insert([1, 2, 3, 4], own) == 1  # the first page is there already
    assert cache.num_evictable() == 0
    assert cache.evict(NUM_PAGES) == 0
    pool.release(own)
    assert cache.num_evictable() == 2
    assert cache.evict(NUM_PAGES) == 2


def test_counting_evictable_pages_looks_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    kept(cache, pool, list(range(16)))
    in_use = cache.match(list(range(4)))
    monkeypatch.delattr(PagePool, "num_refs")
    assert cache.num_evictable() == 6
    pool.release(in_use)
    assert cache.num_evictable() == 8


def test_the_whole_prompt_never_matches_below_its_last_token() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    kept(cache, pool, [1, 2, 3, 4])
    pages = cache.match([1, 2, 3, 4], max_length=3)
    assert len(pages) == 1
    pool.release(pages)


def test_too_few_pages_are_refused() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    with pytest.raises(ValueError, match="2 full pages"):
        RadixCache(pool).insert([1, 2, 3, 4], [0])


def test_integrity_check_finds_a_page_freed_behind_its_back() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    pages = kept(cache, pool, [1, 2])
    pool.release(pages)
    with pytest.raises(AssertionError, match="free"):
        check_radix(cache)


def test_tenants_share_no_page() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    cache = RadixCache(pool)
    tokens = [1, 0, 1, 1, 0, 0]
    for tenant in ("", "a", "b"):
        pages = pool.allocate(3)
        assert pages is not None and cache.match(tokens, tenant=tenant) == []
        assert cache.insert(tokens, pages, tenant=tenant) == 3
        pool.release(pages)
        # A prefix splits the run of pages, a suffix of a prefix matches nothing.
        found = cache.match(tokens[:2], tenant=tenant)
        assert found == pages[:1] and cache.match(tokens[2:], tenant=tenant) == []
        pool.release(found)
        check_radix(cache)
    assert cache.evict(NUM_PAGES) == 9 and pool.num_free == NUM_PAGES
