"""Drafting inside the round on the executor's side: which requests are drafted for, and which trees a round takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PromptChunk, RoundTokens
from outrider.cache.kv import FeatureStore
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.context import WHOLE, ContextCut, cut_context, num_sink_pages
from outrider.drafting.model.round_drafter import (
    MAX_COMMITTED,
    NO_ROWS,
    ChoiceShape,
    GrownNodes,
    RoundDrafter,
    RoundExecutor,
    RoundShape,
    RoundTrees,
    RowLimits,
    VerifiedTrees,
)
from outrider.errors import raise_device_failure
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.capacity import ROUND_REGION
from outrider.models.drafters.base import DraftModel
from outrider.tree.handshake import PROJECTED, Projection
from verify_service.engine.request import Request
from verify_service.engine.round import NO_SOURCES, Entry, Growth, Nodes, NodeSources
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.ranks import ExecutorLink, RankedDrafter
from verify_service.executors.round_buffers import MAX_DEPTH, Bucket, RequestRows

log = get_logger(__name__)

_CATCH_UP_TOKENS = 2048
"""Limit on the committed tokens without draft KV that the drafter computes behind one round."""
_REPEATS = 5
_SLOT_STEP = 4
_FLOOR = -12.0
"""Path score below which no node is run or verified."""


@dataclass(frozen=True, slots=True)
class GrowthCost:
    """Device seconds of the drafting behind a round."""

    fixed: float
    """Seconds of the drafter's forward over committed tokens, which gives the first level, and of the choice."""
    step: float
    """Seconds of every further level."""

    def seconds(self, num_steps: int) -> float:
        """Return the seconds of growth by so many levels; 0 for none."""
        return self.fixed + (num_steps - 1) * self.step if num_steps else 0.0


_FREE = GrowthCost(0.0, 0.0)


@dataclass(frozen=True)
class DraftingOptions:
    """Limits of the trees that grow inside the round."""

    name: str
    """The drafter's name in traces."""
    branching: int = 8
    """Candidate children of a node."""
    lone_branching: int = 16
    """Candidate children of a node behind rounds of one request."""
    max_steps: int = 8
    max_width: int = 128
    """Largest number of nodes in a step."""
    region: int = ROUND_REGION
    """Tree slots of a request."""


def stored_features(store: FeatureStore, model: DraftModel, slots: Tensor) -> Tensor:
    """Return the features that rounds stored at `slots`, as a drafter takes them; see FeatureRows."""
    found = torch.empty(len(slots), store.width, dtype=store.dtype, device=store.device)
    store.gather(slots, store.parts, found)
    return model.finish_product(found) if PROJECTED in store.parts else model.project(found)


def feature_store(model: DraftModel, target: LanguageModel, num_slots: int) -> FeatureStore | None:
    """Return memory for the features of the target that a drafter takes; None if its model takes none."""
    if not model.feature_layers:
        return None
    hidden, layers = target.config.hidden_size, model.feature_layers
    weight = model.projection()
    if weight is None:
        return FeatureStore(layers, hidden, num_slots, target.dtype, target.device)
    data = weight.detach().cpu().contiguous().view(torch.uint8).numpy().data
    dtype = str(weight.dtype).removeprefix("torch.")
    projection = Projection(layers, weight.shape[0], dtype, data.cast("B"), name="")
    return FeatureStore((), hidden, num_slots, target.dtype, target.device, projection)


class RoundDrafts:
    """The drafter of an executor, and its state of each request."""

    def __init__(
        self,
        model: DraftModel,
        options: DraftingOptions,
        rounds: RoundExecutor,
        store: FeatureStore | None,
        attention: AttentionBackend,
        rows: RequestRows,
        *,
        limits: EngineLimits,
        num_pages: int,
        page_size: int,
        link: ExecutorLink,
    ) -> None:
        """`rounds`: the executor, whose rows, limits and pages the drafter uses. `link`: to the other ranks that have
        parts of the draft model."""
        self._link = link
        self._model = model
        self._options = options
        self.max_steps = options.max_steps
        """Largest number of levels that trees grow behind one round."""
        self._rows = rows
        self._page_size = page_size
        self._max_round_tokens = limits.max_round_tokens
        shape = BurstShape(
            num_rows=rows.spare,
            region=options.region,
            branching=options.branching,
            lone_branching=options.lone_branching,
            max_seeds=1,
            max_steps=options.max_steps,
            max_width=options.max_width,
            page_size=page_size,
            num_pages=num_pages,
            max_context=rows.page_tables.shape[1] * page_size,
            feature_size=model.feature_size,
            sink_pages=num_sink_pages(model.window, page_size),
        )
        new_drafter: Callable[..., RoundDrafter] = partial(RankedDrafter, link) if link.is_ranked else RoundDrafter
        self.drafter = new_drafter(
            model,
            shape,
            attention,
            rounds,
            None if store is None else partial(stored_features, store, model),
            max_round_tokens=limits.max_round_tokens,
            vocab_limit=limits.vocab_size,
            floor=_FLOOR,
            chunk_size=_CATCH_UP_TOKENS,
        )
        self.num_behind = 0 if self.drafter.lag else 1
        """Positions behind a round's last token that the drafter writes to: one, if it computes KV of the new root."""
        rows.listener = self
        self.trees = RoundTrees(limits.max_round_tokens, rows.spare, model.device)
        self.num_grown = 0
        """Number of best nodes that grew behind the last round, which the next one may take."""
        self.failed = False
        """Whether drafting is switched off, since it went wrong once."""
        self._max_positions = min(model.max_positions, limits.context_length)
        self._drafted: dict[Request, int] = {}
        """How many committed tokens of each request the drafter has KV of, or leaves out."""
        self._cuts: dict[Request, ContextCut] = {}
        """What the drafter leaves out of requests with long contexts."""
        self._lacks_sinks: set[Request] = set()
        """Requests whose contexts were cut, and whose first tokens are yet to be computed for the cut."""
        self._growing: set[Request] = set()
        """Requests whose trees grew behind the last round."""
        self._has_kv: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        """[num_pages], whether the drafter has KV of all of a page's tokens."""
        self.rests = False
        """Whether the next round, behind which nothing is drafted, stores no features for the drafter.

        The drafter will then take the features of no token for those of that round's tokens.
        """
        self._lacks_features: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        """[num_pages], whether rounds that stored no features computed some of a page's tokens."""
        self._spare_slot = num_pages * page_size
        """Slot of the features of no token."""
        self._costs: dict[int, GrowthCost] = {}
        self._behind: Sequence[Entry] = ()
        """Entries of the round that is being laid out, if the drafter lacks KV of their requests."""
        self._is_fetched = False
        """Whether the host fetches the nodes that grow behind that round, to mask them: all its requests have masks."""
        self._is_deep = False
        """Whether that round has nodes deeper than trees grow here."""

    def cost(self, num_rows: int) -> GrowthCost:
        """Return the measured cost of growth behind rounds of so many requests."""
        return self._costs.get(num_rows, _FREE)

    def has_tree(self, request: Request) -> bool:
        """Whether a tree was grown for the request's root, and it may take nodes of it."""
        return request in self._growing and request.draft_room > 0

    def admitted(self, request: Request, row: int) -> None:
        """See RowListener. The drafter may have KV of pages from the radix cache, and has none of other pages."""
        self._guarded(partial(self.drafter.admit, row, request.params.sampling))
        num_shared = request.cached_len // self._page_size
        self.paged(request.pages[num_shared:])
        known = self._has_kv[request.pages[:num_shared]]
        self._drafted[request] = (num_shared if known.all() else int(known.argmin())) * self._page_size

    def paged(self, pages: Sequence[int]) -> None:
        """See RowListener."""
        self._has_kv[list(pages)] = False
        self._lacks_features[list(pages)] = False

    def enter(self, row: int, place: int, pages: Sequence[int]) -> None:
        """See RowListener."""
        self.drafter.memory.enter_pages(row, place, pages)

    def update(self, updates: Tensor) -> None:
        """See RowListener."""
        self.drafter.memory.update_pages(updates)

    def forget(self, request: Request) -> None:
        """Forget a request that ended or gave up its pages."""
        self._drafted.pop(request, None)
        self._cuts.pop(request, None)
        self._lacks_sinks.discard(request)
        self._growing.discard(request)

    def take_in(self, entry: Entry, max_nodes: int) -> Nodes:
        """Return an entry's nodes and the best of those that have grown for it. Waits for the device."""
        grown = self.trees.fetched(self._rows.row(entry.request), max_nodes)
        return _joined(entry.nodes, grown, min(entry.request.draft_room, MAX_DEPTH))

    def mark(self, entry: Entry) -> None:
        """Note for a traced request where its nodes come from; those without slots grew here."""
        nodes, first = entry.nodes, len(entry.nodes.slots)
        if entry.request.params.trace:
            drafters, given, names = entry.node_sources or NO_SOURCES
            # The parent of a grown node has grown, too, whoever else found it.
            edges = [
                score - (nodes.scores[parent] if parent >= 0 else 0.0)
                for score, parent in zip(nodes.scores[first:], nodes.parents[first:], strict=True)
            ]
            own = [len(names)] * len(edges)
            entry.node_sources = NodeSources([*drafters, *own], [*given, *edges], [*names, self._options.name])

    def lay_out(self, entries: Sequence[Entry], growth: Growth | None) -> None:
        """Lay out which trees the round of these entries takes, and whose are to be grown behind it."""
        self._note_growth()
        if growth is None and not self.num_grown:
            self._behind = ()
            self.trees.set_limits(NO_ROWS)
            return
        self._is_fetched = all(entry.request.is_masked for entry in entries if entry.samples)
        self._is_deep = any(depth > self.max_steps for entry in entries for depth in entry.nodes.depths)
        self._behind = behind = []
        room, limits, row_of = _CATCH_UP_TOKENS, RowLimits(), self._rows.row
        for entry in entries:
            request = entry.request
            is_drafted = growth is not None and self._may_draft(entry, growth)
            if is_drafted and self._model.window.size:
                self._cut(request)
            if is_drafted and (missing := self._missing(request)):
                behind.append(entry)
                room -= missing
                # With fewer tokens left, the drafter catches up behind the next round.
                is_drafted = room >= 0
            if is_drafted:
                self._growing.add(request)
            depth = min(request.draft_room, MAX_DEPTH)
            limits.table_rows.append(row_of(request))
            limits.max_nodes.append(entry.max_grown if depth > 0 else 0)
            limits.max_depth.append(depth)
            limits.is_drafted.append(is_drafted)
        self.trees.set_limits(limits, self.num_grown)

    def note_bare(self, entries: Sequence[Entry]) -> None:
        """Note the pages that a bare round writes to, since they lack features."""
        size = self._page_size
        for entry in entries:
            first, last = entry.start // size, (entry.start + entry.num_tokens - 1) // size
            self._lacks_features[entry.request.pages[first : last + 1]] = True

    def draft(self, bucket: Bucket, growth: Growth | None) -> None:
        """Queue the drafting behind the round that `lay_out` was for. A drafter that fails is switched off."""
        self.num_grown = 0
        if growth is not None or self._behind:
            self._guarded(partial(self._draft, bucket, growth))

    def _draft(self, bucket: Bucket, growth: Growth | None) -> None:
        self._catch_up()
        if growth is not None and self._growing:
            self.drafter.grow(self._shape(bucket, is_deep=self._is_deep), growth.num_steps, growth.num_nodes)
            if self._is_fetched:
                self.trees.fetch(self.drafter.grown)
            self.num_grown = growth.num_nodes

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action. An error switches the drafter off, but is raised if the device is broken.

        If other ranks draft, too, RankError is raised: they may wait for this one, or be a step ahead of it.
        """
        if self.failed:
            return
        try:
            action()
        except Exception as error:
            raise_device_failure(error)
            self._link.give_up_drafting(error)
            self.failed = True
            self._growing.clear()
            self._behind = ()
            log.error(
                "drafting inside rounds is switched off: %s failed with %s: %s; answers go on without it",
                *(self._options.name, type(error).__name__, error),
            )

    def capture(self, buckets: Sequence[Bucket], sizes: Callable[[int], Sequence[int]]) -> None:
        """Capture the drafting behind rounds of these shapes, and measure it; `sizes`: see GrowthPolicy."""
        self.trees.set_limits(NO_ROWS)
        shapes = sorted({self._shape(bucket) for bucket in buckets})
        deep = {self._shape(bucket, is_deep=True) for bucket in buckets}
        self.drafter.capture(
            sorted({*shapes, *deep}),
            [ChoiceShape(size, rows) for rows in {shape.rows for shape in shapes} for size in sizes(rows)],
        )
        largest = {shape.rows: shape for shape in shapes}
        self._costs = {rows: self._measure(shape, sizes(rows)[-1]) for rows, shape in largest.items() if sizes(rows)}

    def _shape(self, bucket: Bucket, *, is_deep: bool = False) -> RoundShape:
        """Return a round's rows, and slots for the tokens it may commit with trees no deeper than they grow here.

        `is_deep`: some trees have deeper nodes, of a draft service.
        """
        slots = bucket.rows * (self.max_steps + 1)
        if slots >= bucket.tokens:
            return RoundShape(bucket.tokens, bucket.rows)
        if is_deep:
            return RoundShape(min(self._max_round_tokens, bucket.rows * MAX_COMMITTED), bucket.rows)
        return RoundShape(-(-slots // _SLOT_STEP) * _SLOT_STEP, bucket.rows)

    def _measure(self, shape: RoundShape, num_nodes: int) -> GrowthCost:
        """Time growth behind a round without tokens."""

        def seconds(num_steps: int) -> float:
            self.drafter.grow(shape, num_steps, num_nodes)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
            events[0].record()
            for event in events[1:]:
                self.drafter.grow(shape, num_steps, num_nodes)
                event.record()
            events[-1].synchronize()
            # Noise only ever adds: other services may start on the device meanwhile.
            return min(float(begin.elapsed_time(end)) for begin, end in pairwise(events)) * 1e-3

        one, more = seconds(1), seconds(self.max_steps)
        return GrowthCost(one, (more - one) / max(self.max_steps - 1, 1))

    def take_verified(self, entries: Sequence[Entry], trees: VerifiedTrees) -> None:
        """Give a finished round's entries that took grown nodes all the nodes that it verified for them."""
        for row, entry in enumerate(entries):
            if not entry.max_grown:
                continue
            token_ids, parents, scores = trees.nodes(row, entry.num_extend)
            depths: list[int] = []
            for parent in parents:
                depths.append(depths[parent] + 1 if parent >= 0 else 1)
            entry.nodes = Nodes(token_ids, parents, depths, entry.nodes.slots, scores)
            self.mark(entry)

    def shared(self, bucket: Bucket) -> list[Tensor]:
        """Return what other ranks that draft need of a round on the device, beside its tokens."""
        return [self.trees.drafted(bucket.rows)] if self._link.is_ranked else []

    def merge(self, base: RoundTokens) -> RoundTokens:
        """Return the round's tokens with its trees, on the device; may be captured."""
        self.trees.to_device()
        return self.trees.merge(base, self.drafter.grown)

    def _note_growth(self) -> None:
        """Note that the requests whose trees grew have draft KV of all committed tokens, and that none grow now."""
        for request in self._growing:
            self._set_drafted(request, len(request.tokens))
        self._growing.clear()

    def _may_draft(self, entry: Entry, growth: Growth) -> bool:
        request = entry.request
        most = len(request.tokens) + MAX_DEPTH + growth.num_steps
        return (
            entry.samples
            and not request.params.disable_speculation
            and request.is_masked == self._is_fetched
            and most <= self._max_positions
        )

    def _missing(self, request: Request) -> int:
        """Return how many of a request's tokens the drafter has yet to compute."""
        sinks = self._cuts[request].sinks if request in self._lacks_sinks else 0
        return len(request.tokens) - self._drafted[request] + sinks

    def _set_drafted(self, request: Request, count: int) -> None:
        """Note that the drafter has KV of so many tokens of a request."""
        known, full = self._drafted[request] // self._page_size, count // self._page_size
        self._drafted[request] = count
        if full > known:
            self._has_kv[request.pages[known:full]] = True

    def _cut(self, request: Request) -> None:
        """Cut a context that is too long. Its first tokens move nearer, and are computed again for that."""
        size, lag, before = self._page_size, self.drafter.lag, self._cuts.get(request, WHOLE)
        cut = cut_context(before, len(request.tokens) - lag, self._model.window, size)
        if cut is before:
            return
        self._cuts[request] = cut
        self._lacks_sinks.add(request)
        first = cut.window_start // size
        known = self._has_kv[request.pages[first:]]
        num_known = len(known) if known.all() else int(known.argmin())
        self._drafted[request] = max(self._drafted[request], (first + num_known) * size + lag)
        self.drafter.cut(self._rows.row(request), cut.gap // size, request.pages)

    def _catch_up(self) -> None:
        """Queue the drafter's forward over tokens that it lacks."""
        lag, room = self.drafter.lag, _CATCH_UP_TOKENS
        chunks: list[PromptChunk] = []
        feature_slots: list[int] = []
        for entry in self._behind:
            request = entry.request
            if request in self._lacks_sinks:
                count = self._cuts[request].sinks
                if chunks and count > room:
                    break
                self._lacks_sinks.discard(request)
                chunks.append(self._chunk(request, 0, count, feature_slots, are_sinks=True))
                room -= count
            begin = max(self._drafted[request], lag)
            end = min(len(request.tokens), begin + max(room, 0))
            if begin < end:
                chunks.append(self._chunk(request, begin - lag, end - lag, feature_slots))
                room -= end - begin
            self._set_drafted(request, max(end, self._drafted[request]))
        self._behind = []
        if chunks:
            self.drafter.compute_context(chunks, feature_slots)

    def _chunk(
        self, request: Request, first: int, past: int, feature_slots: list[int], *, are_sinks: bool = False
    ) -> PromptChunk:
        """Return the tokens at KV positions `first` to `past` - 1; append their features' slots to `feature_slots`."""
        size, lag, gap = self._page_size, self.drafter.lag, self._cuts.get(request, WHOLE).gap
        at, pages = np.arange(first, past, dtype=np.int32), np.array(request.pages, np.int32)
        slots = pages[at // size] * size + at % size
        feature_slots += np.where(self._lacks_features[pages[at // size]], self._spare_slot, slots).tolist()
        row, tokens = self._rows.row(request), request.tokens[first + lag : past + lag]
        if are_sinks:
            own = (self.drafter.memory.sink_start(row) + at).astype(np.int32)
            return PromptChunk(row, tokens, first, own, gap)
        return PromptChunk(row, tokens, first - gap, slots, gap)


def _joined(given: Nodes, grown: GrownNodes, max_depth: int) -> Nodes:
    """Return an entry's nodes, and behind them those that grew and are no deeper than `max_depth`, each node once."""
    token_ids, parents, depths = list(given.token_ids), list(given.parents), list(given.depths)
    scores = [1.0] * len(token_ids)
    there = {pair: node for node, pair in enumerate(zip(parents, token_ids, strict=True))}
    places = {-1: -1}
    for number, (token, parent, score) in enumerate(zip(*grown, strict=True)):
        above = places.get(parent)
        depth = 1 if above is None or above < 0 else depths[above] + 1
        if above is None or depth > max_depth:
            continue
        node = places[number] = there.get((above, token), len(token_ids))
        if node < len(given):
            scores[node] = score
            continue
        token_ids.append(token)
        parents.append(above)
        depths.append(depth)
        scores.append(score)
    return Nodes(token_ids, parents, depths, given.slots, scores)
