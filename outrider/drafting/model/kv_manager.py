"""Brings committed tokens into the contexts of a draft model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from outrider.cache.pages import PagePool
from outrider.drafting.model.context import DraftContext
from outrider.drafting.model.options import GrowthOptions
from outrider.drafting.model.plan import BurstRunner, Extent
from outrider.drafting.model.slots import TreeSlots
from outrider.drafting.tree import Refusal
from outrider.protocol.messages import DeclineReason

_LEAST_FORCED = 7
"""Tokens that a burst computes, however many requests share it: a forward apart is one more wait before the burst."""

_MOST_OWN = 6
"""Committed tokens whose true features wait: a burst is given them after about two commits."""


_ALONG = 8
"""Committed tokens that are moved with those of others: no burst should end for them a few rounds later."""


class DeclinedError(Exception):
    """A request cannot be served any longer."""

    def __init__(self, reason: DeclineReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


class Extended(NamedTuple):
    """What became of requests whose tokens were to be computed apart."""

    served: list[DraftContext]
    failed: list[tuple[DraftContext, Exception]]


class ContextKVManager:
    """Owns the context pages. Methods raise DeclinedError where they are used up, and what the runner raises."""

    def __init__(self, runner: BurstRunner, slots: TreeSlots, options: GrowthOptions) -> None:
        shape = runner.shape
        self.pool = PagePool(shape.num_pages, shape.page_size)
        self.context_lens = np.zeros(shape.num_rows, np.int32)
        """KV positions of the context of each row."""
        self.num_extended = 0
        """Tokens computed outside of bursts since someone set this to 0."""
        self._most_forced = min(max(1, shape.region // 8 - 1), shape.max_width - 1)
        self.max_forced = self._most_forced
        """Tokens between context and root that a burst computes; more are computed apart."""
        self._num_open = 0
        self._runner = runner
        self._slots = slots
        self._max_between = shape.region // 8
        # A move is a launch: where launches are what bursts wait for, several commits share one.
        self._worth_moving = self._max_between * 7 // 8 if options.most_steps else 1
        self._freed_rows: list[int] = []
        self._freed_slots: list[int] = []

    def open(self, context: DraftContext) -> None:
        """A request takes its row."""
        self.context_lens[context.row] = context.kv_len
        self._share_bursts(1)
        self._runner.open(context.row, context.sampling)

    def close(self, context: DraftContext) -> None:
        """It leaves its row and its pages."""
        self.pool.release(context.pages)
        context.pages = []
        self._share_bursts(-1)
        self._runner.close(context.row)

    def is_full(self, context: DraftContext) -> bool:
        """Whether committed tokens wait that a burst should end for: their KV is to be moved."""
        return len(context.between) >= self._worth_moving

    def is_untrue(self, context: DraftContext) -> bool:
        """Whether much KV of committed tokens is to be made anew of true features."""
        if not context.lag or len(context.between) < _MOST_OWN:
            return False
        return sum(not one.settled for one in context.between) >= _MOST_OWN

    def settle(self, context: DraftContext, *, along: bool = False) -> None:
        """Move KV of committed tokens that were run as they should be to the context; then call `free_slots`.

        `along`: that of others is moved now, which one more hardly makes longer.
        """
        if len(context.between) < (min(self._worth_moving, _ALONG) if along else self._worth_moving):
            return
        # Those whose true features are here will be run with them.
        own = len(context.between) > self._max_between and context.feature_end <= context.end
        first = context.kv_len
        slots = context.take_settled(own=own)
        if not slots:
            return
        self._reserve(context, context.kv_len)
        self._runner.move(context.row, slots, first)
        self._advanced(context, slots)

    def num_extendable(self, context: DraftContext) -> int:
        """Tokens that should be computed apart before anything else of the request."""
        between = len(context.between)
        if not context.lag or not between:
            return between if between > self.max_forced else 0
        feature_end = context.feature_end
        covered = min(feature_end - context.end, between)
        if feature_end <= context.root:
            covered = min(covered, context.num_movable)
        if covered <= self.max_forced:
            return 0
        # Those behind the last one that lacks its KV are moved: one launch for dozens of them.
        tokens = context.between[:covered]
        lacking = [index for index, one in enumerate(tokens) if one.slot < 0 or not one.settled]
        return lacking[-1] + 1 if len(lacking) > self.max_forced else 0

    def extend(self, contexts: Iterable[DraftContext], limit: int) -> Extended:
        """Compute up to `limit` of those tokens in all, those of the first requests first, at once."""
        served: list[DraftContext] = []
        failed: list[tuple[DraftContext, Exception]] = []
        extents: list[Extent] = []
        for context in contexts:
            if limit <= 0:
                break
            count = min(self.num_extendable(context), limit)
            try:
                self._reserve(context, context.kv_len + count)
            except Exception as error:
                failed.append((context, error))
                continue
            extents.append(self._extent(context, count))
            served.append(context)
            limit -= count
        if not extents:
            return Extended(served, failed)
        try:
            self._runner.extend(extents)
        except Exception as error:
            return Extended([], failed + [(context, error) for context in served])
        for context, extent in zip(served, extents, strict=True):
            self._note_extended(context, len(extent.tokens))
        self.free_slots()
        return Extended(served, failed)

    def _extent(self, context: DraftContext, count: int) -> Extent:
        start = context.end
        tokens = context.tree.author.tokens[start : start + count]
        if not context.lag:
            return Extent(context.row, tokens, start)
        parts = [part for _, _, part in context.features.cut(start - 1, start - 1 + count)]
        return Extent(context.row, tokens, start, parts)

    def _note_extended(self, context: DraftContext, count: int) -> None:
        self.num_extended += count
        context.end += count
        slots = [token.slot for token in context.between[:count] if token.slot >= 0]
        del context.between[:count]
        self._advanced(context, slots)

    def _share_bursts(self, more: int) -> None:
        """So many more requests are open. With true features every committed token is run once more, for each request:
        what does not fit a burst would keep other requests out of it.
        """
        self._num_open += more
        if self._runner.shape.lag:
            share = self._runner.shape.max_width // max(self._num_open, 1) - 1
            self.max_forced = min(max(share, _LEAST_FORCED), self._most_forced)

    def _reserve(self, context: DraftContext, kv_len: int) -> None:
        missing = -(-kv_len // self.pool.page_size) - len(context.pages)
        if missing <= 0:
            return
        pages = self.pool.allocate(missing)
        if pages is None:
            detail = f"{missing} pages are needed, {self.pool.num_free} of {self.pool.num_pages} are free"
            raise DeclinedError(DeclineReason.OVERLOADED, detail)
        context.pages += pages
        self._runner.set_pages(context.row, context.pages)

    def free_slots(self) -> None:
        """The slots that `settle` emptied are free."""
        if self._freed_slots:
            self._slots.free(np.array(self._freed_rows, np.int32), np.array(self._freed_slots, np.int32))
            self._freed_rows.clear()
            self._freed_slots.clear()

    def _advanced(self, context: DraftContext, slots: list[int]) -> None:
        self.context_lens[context.row] = context.kv_len
        self._freed_rows += [context.row] * len(slots)
        self._freed_slots += slots
        if context.lag:
            context.features.forget(context.end - 1)
