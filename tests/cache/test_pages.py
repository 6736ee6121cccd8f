"""No page has two private owners, none is lost, and an allocation is all or nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from page_integrity import check_pages

from outrider.cache.pages import PagePool

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain count of the references handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, 4)
        self.refs: Counter[int] = Counter()

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        if count > NUM_PAGES - len(self.refs):
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count
        assert not self.refs.keys() & set(pages)
        self.refs.update(pages)

    @rule(pages=st.lists(st.integers(-1, NUM_PAGES), max_size=4))
    def share(self, pages: list[int]) -> None:
        if all(page in self.refs for page in pages):
            self.pool.share(pages)
            self.refs.update(pages)
        else:
            with pytest.raises(ValueError, match="page"):
                self.pool.share(pages)

    @rule(pages=st.lists(st.integers(-1, NUM_PAGES), max_size=4))
    def release(self, pages: list[int]) -> None:
        if all(self.refs[page] >= count for page, count in Counter(pages).items()):
            self.pool.release(pages)
            self.refs.subtract(pages)
        else:
            with pytest.raises(ValueError, match="page"):
                self.pool.release(pages)
        self.refs = +self.refs

    @invariant()
    def counts_agree(self) -> None:
        check_pages(self.pool)
        assert self.pool.num_free == NUM_PAGES - len(self.refs)
        assert all(self.pool.num_refs(page) == self.refs[page] for page in range(NUM_PAGES))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(30))


def test_a_fresh_pool_gives_pages_in_order() -> None:
    assert PagePool(5, 16).allocate(3) == [0, 1, 2]


def test_integrity_check_finds_a_page_that_is_free_and_owned() -> None:
    pool = PagePool(3, 4)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="page 0"):
        check_pages(pool)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_pool_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="pool"):
        PagePool(*sizes)
