"""A request's committed tokens as a draft model holds them: context, uncached tokens and root."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.drafting.model.features import PendingFeatures
from outrider.drafting.tree_growth import Tree
from outrider.models.drafters.config import ContextWindow


class ContextCut(NamedTuple):
    """The part left out of a long context: a drafter is shown the first tokens and, right behind them, the last ones.

    A head guesses badly behind texts much longer than those that it was trained on. The first tokens are kept because
    attention that is not needed elsewhere goes there (StreamingLLM, arXiv 2309.17453). Place p of the drafter's KV
    holds KV position p of the sequence if p is below `sinks`, and p + `gap` from there on.

    Attention depends on distances alone. So rotary positions are p + `gap` for all places, and keys behind the gap do
    not depend on what a request leaves out.
    """

    sinks: int = 0
    gap: int = 0
    """A multiple of the page size."""

    @property
    def window_start(self) -> int:
        """KV position of the first token behind the gap."""
        return self.sinks + self.gap


WHOLE = ContextCut()


def cut_context(cut: ContextCut, length: int, window: ContextWindow, page_size: int) -> ContextCut:
    """Return the cut of a context of `length` KV positions, which was cut by `cut` so far.

    A whole context is cut when it is longer than one and a half windows, and cut again when more than two are left. A
    cut leaves a window and up to a page more. So a prompt near two windows is not computed as a whole and then cut.
    """
    sinks = num_sink_pages(window, page_size) * page_size
    size = max(window.size, sinks)
    if not window.size or length - cut.gap <= (2 * size if cut.gap else 3 * size // 2):
        return cut
    gap = (length - size) // page_size * page_size - sinks
    return ContextCut(sinks, gap) if gap > cut.gap else cut


def num_sink_pages(window: ContextWindow, page_size: int) -> int:
    """Return how many pages at the beginning of a long context are kept."""
    return -(-window.sinks // page_size) if window.size else 0


class UncachedToken(NamedTuple):
    """A committed token between context and root."""

    slot: int
    """Tree slot of the token's KV; -1 if the token was not run."""
    is_final: bool
    """Whether the KV is fit for the context: computed with the target's feature, or by a model that takes none."""

    @property
    def lacks_kv(self) -> bool:
        """Whether the token has no final KV."""
        return self.slot < 0 or not self.is_final


UNRUN = UncachedToken(-1, False)


@dataclass(slots=True, eq=False)
class DraftContext:
    """One request: tokens before position `end` are context, `uncached` holds those from there to before `root`.

    A token's KV position is its position minus `lag`; the first `lag` tokens have none. The first tokens of a cut
    context are handled apart: they count as context from the start, and are computed once their features are here.
    """

    tree: Tree
    row: int
    """Row of the runner."""
    lag: int
    """See BurstShape.lag."""
    features: PendingFeatures
    steps_left: int = 0
    """Lockstep: steps of the tree that are still to be run."""
    renews_root: bool = False
    """Whether a root that was run before its features came is run again with them."""
    cut: ContextCut = WHOLE
    """The part left out between the first tokens and the others."""
    sinks: PendingFeatures | None = None
    """Features of the first tokens of a cut context, until these tokens are computed."""
    root: int = field(init=False)
    """Position of the root."""
    end: int = field(init=False)
    """One past the last context token; `lag` if there is none."""
    uncached: list[UncachedToken] = field(init=False)
    root_run: bool = False
    """Whether the KV of the root lies in a tree slot."""
    root_final: bool = False
    """As `UncachedToken.is_final`."""
    pages: list[int] = field(default_factory=list)
    known: int = field(init=False)
    """Committed tokens that the forest has followed."""
    epoch: int = field(init=False)
    """Epoch of the author that the forest has followed."""
    seen: int = 1
    """Ids of the author below this were already searched for nodes that others appended."""
    root_in_burst: bool = False
    """Whether the running burst runs the root."""
    num_sent: int = 0
    """Nodes that were appended to the author's tree since the forest last followed a commit."""

    def __post_init__(self) -> None:
        author = self.tree.author
        self.known, self.epoch = author.committed_len, author.epoch
        self.root, self.end = self.known - 1, self.lag + self.cut.sinks + self.cut.gap
        self.uncached = [UNRUN] * max(0, self.root - self.end)

    @property
    def first_unrun(self) -> int:
        """Index in `uncached` of the first token that was not run; one past the last if all were run."""
        for index, (slot, _) in enumerate(self.uncached):
            if slot < 0:
                return index
        return len(self.uncached)

    @property
    def num_with_features(self) -> int:
        """How many of `uncached` and the root behind them, from the first on, have the target's features here."""
        return min(max(self.feature_end - self.end, 0), len(self.uncached) + 1)

    def to_run(self, *, root: bool) -> tuple[list[int], int]:
        """Return the indices in `uncached` that a burst is to run, in order, and how many of the first take features.

        These are the tokens whose KV can become final. `root` adds tokens that were not run, and the root, whose index
        is one past the last. The features are the target's.
        """
        num_with_features = self.num_with_features
        indices = [
            index
            for index, (slot, is_final) in enumerate(self.uncached)
            if not is_final and (index < num_with_features or (root and slot < 0))
        ]
        if root:
            indices.append(len(self.uncached))
        return indices, bisect_left(indices, num_with_features)

    @property
    def is_root_stale(self) -> bool:
        """Whether the root must be run again: it was run without the target's feature, which is here now."""
        return (
            self.renews_root and self.root_run and not self.root_final and self.num_with_features > len(self.uncached)
        )

    @property
    def kv_len(self) -> int:
        """Number of places in the context."""
        return self.end - self.lag - self.cut.gap

    @property
    def num_sinks(self) -> int:
        """Number of first tokens of a cut context, if they can be computed now and were not yet; else 0."""
        if self.sinks is None or (self.lag and self.sinks.end_from(0) < self.cut.sinks):
            return 0
        return self.cut.sinks

    def take_features(self, start: int, values: Any) -> None:
        """Keep the target's features of positions `start`, ..., as far as tokens still have to be run with them."""
        if self.sinks is not None and start < self.cut.sinks:
            self.sinks.add(start, values[: self.cut.sinks - start], since=0)
        self.features.add(start, values, since=self.end - 1)

    @property
    def feature_end(self) -> int:
        """One past the position of the last token whose target feature is here, with no gap from the context on."""
        if not self.lag:
            return self.root + 1
        return self.features.end_from(self.end - 1) + 1

    def follow(self, slots: list[int], count: int, *, root_run: bool) -> None:
        """Follow a commit of `count` tokens; `slots` are those of the old root and of the found nodes behind it."""
        is_final = not self.lag
        uncached = [UncachedToken(slot, is_final) if slot >= 0 else UNRUN for slot in slots]
        if self.root_final and uncached:
            uncached[0] = UncachedToken(slots[0], True)
        uncached += [UNRUN] * (count - len(slots))
        # If the old root has no KV position, it has no tree slot either.
        self.uncached += uncached[self.end - self.root :] if self.end > self.root else uncached
        self.root += count
        self.known += count
        self.num_sent = 0
        self.root_run = root_run
        self.root_final = root_run and not self.lag

    def take_final(self, *, accept_own: bool) -> list[int]:
        """Remove leading tokens with final KV from `uncached`, and return their tree slots.

        With `accept_own`, KV computed with the draft's own features counts, too.
        """
        slots: list[int] = []
        for slot, is_final in self.uncached:
            if slot < 0 or not (is_final or accept_own):
                break
            slots.append(slot)
        if slots and self.lag:
            del slots[self.num_movable :]
        del self.uncached[: len(slots)]
        self.end += len(slots)
        return slots

    @property
    def num_movable(self) -> int:
        """Number of leading tokens of `uncached` from whose tree slots no later token needs the draft's own feature."""
        if not self.lag or self.root_run:
            return len(self.uncached)
        first = self.first_unrun
        return first - 1 if first else len(self.uncached)
