"""KV of draft requests: tree slots of their nodes, and pages of their contexts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.cache.pages import PagePool
from outrider.drafting.model.burst import Extent, Int32s, Ints
from outrider.drafting.model.context import DraftContext
from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.tree_growth import Refusal
from outrider.protocol.speculation import DeclineReason

if TYPE_CHECKING:
    from outrider.drafting.model.runner import BurstRunner

_MIN_FORCED_TOKENS = 7
"""Uncached tokens of a request that a burst can always compute: a separate forward would delay the burst."""
_MAX_STALE_TOKENS = 6
"""Uncached tokens without final KV at which the running burst has to run them; two commits bring about so many."""
_MIN_MOVE_ALONG = 8
"""Uncached tokens at which a request's KV is moved along with others', so that no burst ends for it a few rounds
later."""


class TreeSlots:
    """The tree regions of R rows. A slot is free, taken, leased to the running burst, or live.

    Attributes:
        live: bool [R, region].
        num_free: int32 [R].
        stacks: int32 [R, region], the free slots of each row, `num_free` of them.
    """

    def __init__(self, num_rows: int, region: int) -> None:
        self.region = region
        self.live = np.zeros((num_rows, region), np.bool_)
        self.num_free = np.full(num_rows, region, np.int32)
        self.stacks = np.empty((num_rows, region), np.int32)
        self.stacks[:] = np.arange(region - 1, -1, -1)
        # Slots that are leased and not known to be filled: as bytes, which are fast to search, and as bools.
        self._leased_bytes = bytearray(num_rows * region)
        self._flat_leased = np.frombuffer(self._leased_bytes, np.bool_)
        self._leased = self._flat_leased.reshape(num_rows, region)
        self._flat_live = self.live.reshape(-1)

    def take(self, row: int, count: int) -> list[int]:
        """Take free slots; the row must have enough. They become live when they are filled."""
        left = int(self.num_free[row]) - count
        self.num_free[row] = left
        taken: list[int] = self.stacks[row, left : left + count].tolist()
        return taken

    def lease(self, rows: Ints, counts: Ints) -> tuple[Int32s, Int32s]:
        """Lease free slots to a burst, at most `counts` of each row; the burst fills some of them.

        Returns where the leased slots of each row begin and end in `stacks`, as `stacks` is now.
        """
        ends = self.num_free[rows]
        starts = np.maximum(ends - counts, 0).astype(np.int32)
        self.num_free[rows] = starts
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._leased[row][self.stacks[row, start:end]] = True
        return starts, ends

    def lease_more(self, rows: Ints, counts: Ints) -> list[Int32s]:
        """Lease further free slots to the running burst, which gets the commits that freed them at the same time.

        `counts`: most leased slots of each row, including those that are leased already and not filled.
        """
        found = []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            first, end = row * self.region, int(self.num_free[row])
            num_leased = self._leased_bytes.count(1, first, first + self.region)
            start = max(end - max(count - num_leased, 0), 0)
            slots = self.stacks[row, start:end].copy()
            if start < end:
                self._leased[row][slots] = True
                self.num_free[row] = start
            found.append(slots)
        return found

    def is_leased(self, row: int) -> bool:
        """Whether a row has leased slots that are not known to be filled."""
        first = row * self.region
        return self._leased_bytes.find(1, first, first + self.region) >= 0

    def fill(self, rows: NDArray[np.integer[Any]] | int, slots: Int32s) -> None:
        """Make slots live that a burst filled. `rows` may be one row for all."""
        if isinstance(rows, int):
            self._leased[rows][slots] = False
            self.live[rows][slots] = True
            return
        places = (rows * self.region + slots).astype(np.intp)
        self._flat_leased[places] = False
        self._flat_live[places] = True

    def free_dead(self, rows: NDArray[np.integer[Any]] | int, slots: Int32s) -> None:
        """Free slots that a burst filled with nodes that are dead now. `rows` may be one row for all."""
        self._leased[rows, slots] = False
        self.free(rows, slots)

    def end_leases(self, rows: NDArray[np.integer[Any]]) -> None:
        """End the leases of rows, given in ascending order: slots that the burst did not fill are free."""
        places, slots = self._leased[rows, ::-1].nonzero()  # the lowest slot of each row comes out first next time
        self._leased[rows] = False
        self._push(rows[places], self.region - 1 - slots)

    def free(self, rows: NDArray[np.integer[Any]] | int, slots: Int32s) -> None:
        """Free live or taken slots. `rows` may be one row for all.

        The running burst may still read the slots until it gets the commit that freed them.
        """
        if isinstance(rows, int):
            self.live[rows][slots] = False
            self._push_of(rows, slots)
            return
        self.live[rows, slots] = False
        order = rows.argsort(kind="stable")
        self._push(rows[order], slots[order])

    def reset(self, row: int) -> None:
        """Free all slots of a row."""
        self.live[row] = False
        self._leased[row] = False
        self.num_free[row] = self.region
        self.stacks[row] = np.arange(self.region - 1, -1, -1)

    def _push(self, rows: NDArray[np.integer[Any]], slots: NDArray[np.integer[Any]]) -> None:
        """Push free slots; `rows` are in ascending groups."""
        if len(rows) and rows[0] == rows[-1]:
            self._push_of(int(rows[0]), slots)
            return
        counts = np.bincount(rows, minlength=len(self.num_free))
        starts = self.num_free - counts.cumsum() + counts
        self.stacks[rows, np.arange(len(rows)) + starts[rows]] = slots
        self.num_free += counts

    def _push_of(self, row: int, slots: NDArray[np.integer[Any]]) -> None:
        start = int(self.num_free[row])
        self.num_free[row] = end = start + len(slots)
        self.stacks[row, start:end] = slots


class DeclinedError(Exception):
    """A request cannot be served any longer."""

    def __init__(self, reason: DeclineReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


class ContextKVManager:
    """Owns the context pages. Methods raise DeclinedError if no page is free, and the runner's errors."""

    def __init__(self, runner: BurstRunner, slots: TreeSlots, options: GrowthOptions) -> None:
        shape = runner.shape
        self.pool = PagePool(shape.num_pages, shape.page_size)
        self.context_lens = np.zeros(shape.num_rows, np.int32)
        """Number of context places of each row."""
        self.num_extended = 0
        """Tokens computed outside of bursts since this was last set to 0."""
        self._forced_limit = min(max(1, shape.region // 8 - 1), shape.max_width - 1)
        self.max_forced = self._forced_limit
        """Most uncached tokens of a request that a burst computes; more are computed in a separate forward."""
        self._num_open = 0
        self._runner = runner
        self._slots = slots
        self._max_uncached = shape.region // 8
        # A move is a launch. Where bursts wait for launches, several commits share one.
        self._min_move = self._max_uncached * 7 // 8 if options.most_steps else 1
        self._freed_rows: list[int] = []
        self._freed_slots: list[int] = []

    def open(self, context: DraftContext) -> None:
        """Begin a request in its row, with pages for all of its tokens so far.

        If pages were taken chunk by chunk, prompts that do not fit together would all run out of pages midway.
        """
        self.context_lens[context.row] = context.kv_len
        self._share_bursts(1)
        self._runner.open(context.row, context.tree.author.sampling)
        # Bursts may read the first tokens of a cut context before the features of these come, if they ever do.
        self._reserve(context, context.kv_len + len(context.uncached))

    def close(self, context: DraftContext) -> None:
        """End a request and free its pages."""
        self.pool.release(context.pages)
        context.pages = []
        self._share_bursts(-1)
        self._runner.close(context.row)

    def is_full(self, context: DraftContext) -> bool:
        """Whether a burst should end so that a request's KV of uncached tokens can be moved."""
        return len(context.uncached) >= self._min_move

    def has_stale_kv(self, context: DraftContext) -> bool:
        """Whether the KV of many uncached tokens must be computed again from the target's features."""
        if not context.lag or len(context.uncached) < _MAX_STALE_TOKENS:
            return False
        return sum(not one.is_final for one in context.uncached) >= _MAX_STALE_TOKENS

    def move_final(self, context: DraftContext, *, along: bool = False) -> None:
        """Move final KV of uncached tokens to the context, if there is enough. The caller then calls `free_slots`.

        `along`: other requests' KV is moved now, so a smaller number is enough.
        """
        if len(context.uncached) < (min(self._min_move, _MIN_MOVE_ALONG) if along else self._min_move):
            return
        # Tokens whose target features are here will be run with them. A block head has no KV without features.
        accept_own = len(context.uncached) > self._max_uncached and context.feature_end <= context.end
        accept_own = accept_own and not context.renews_root
        first = context.kv_len
        slots = context.take_final(accept_own=accept_own)
        if not slots:
            return
        self._reserve(context, context.kv_len)
        self._runner.move(context.row, slots, first)
        self._advanced(context, slots)

    def num_extendable(self, context: DraftContext) -> int:
        """Return how many uncached tokens should be computed in a separate forward before the request's other work."""
        if context.num_sinks:
            return context.num_sinks
        num_uncached = len(context.uncached)
        if not context.lag or not num_uncached:
            return num_uncached if num_uncached > self.max_forced else 0
        feature_end = context.feature_end
        covered = min(feature_end - context.end, num_uncached)
        if feature_end <= context.root:
            covered = min(covered, context.num_movable)
        if covered <= self.max_forced:
            return 0
        # Tokens behind the last one that lacks KV are moved, which is one launch for dozens. The scan stops early: a
        # prompt may have a hundred thousand tokens.
        lacking = (index for index in range(covered) if context.uncached[index].lacks_kv)
        if sum(1 for _ in islice(lacking, self.max_forced + 1)) <= self.max_forced:
            return 0
        return next(index + 1 for index in reversed(range(covered)) if context.uncached[index].lacks_kv)

    def extend(
        self, contexts: Iterable[DraftContext], limit: int
    ) -> tuple[list[DraftContext], list[tuple[DraftContext, Exception]]]:
        """Compute up to `limit` of the tokens that `num_extendable` counts, in one call of the runner, in order.

        Returns the requests that were served, and those that failed with their errors.
        """
        served: list[DraftContext] = []
        failed: list[tuple[DraftContext, Exception]] = []
        extents: list[Extent] = []
        for context in contexts:
            if limit <= 0:
                break
            count = min(self.num_extendable(context), limit)
            if context.num_sinks:
                count = context.num_sinks
            try:
                self._reserve(context, context.kv_len + count)
            except Exception as error:
                failed.append((context, error))
                break  # once this one is closed, its pages may be enough for the others
            extents.append(self._extent(context, count))
            served.append(context)
            limit -= count
        if not extents:
            return served, failed
        try:
            self._runner.extend(extents)
        except Exception as error:
            return [], failed + [(context, error) for context in served]
        for context, extent in zip(served, extents, strict=True):
            count = len(extent.tokens)
            self.num_extended += count
            if context.num_sinks:
                context.sinks = None
                continue
            context.end += count
            slots = [token.slot for token in context.uncached[:count] if token.slot >= 0]
            del context.uncached[:count]
            self._advanced(context, slots)
        self.free_slots()
        return served, failed

    def _extent(self, context: DraftContext, count: int) -> Extent:
        gap, first, features = context.cut.gap, context.end, context.features
        start = first
        if context.num_sinks and context.sinks is not None:
            # The first tokens of a cut context.
            first, features = context.lag, context.sinks
            start = first + gap
        tokens = context.tree.author.tokens[first : first + count]
        parts = [part for _, part in features.cut(first - 1, first - 1 + count)] if context.lag else []
        return Extent(context.row, tokens, start, parts, gap)

    def _share_bursts(self, more: int) -> None:
        """Give each request an even share of a burst, after `more` requests were opened (negative: closed).

        With features, every committed token is run once more. A larger share would keep other requests out of a burst.
        """
        self._num_open += more
        if self._runner.shape.lag:
            share = self._runner.shape.max_width // max(self._num_open, 1) - 1
            self.max_forced = min(max(share, _MIN_FORCED_TOKENS), self._forced_limit)

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
        """Free the slots that `move_final` emptied."""
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
