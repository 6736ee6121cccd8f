"""A request's committed tokens as a draft model holds them: context, uncached tokens and root."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.drafting.model.features import PendingFeatures
from outrider.drafting.tree_growth import Tree
from outrider.models.drafters.config import ContextWindow


class ContextCut(NamedTuple):
    """What is left out of a long context: a drafter is shown its first tokens and, right behind, its last ones.

    A head guesses little behind texts much longer than those that it was trained on; the first tokens are where
    attention goes that is wanted nowhere (StreamingLLM, arXiv 2309.17453). Place p of the drafter's KV holds KV
    position p of the sequence for p below `sinks`, and p + `gap` from there on.

    Attention depends on distances alone. So rotary positions are p + `gap` for all, and keys behind the gap are the
    same whatever a request leaves out.
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
    """The cut of a context of so many KV positions, of which `cut` was left out so far.

    A whole context is cut where it is longer than one and a half windows, and again where more than two are left; then
    a window is left, and up to a page more. A prompt near two windows is so not computed as a whole and cut at once.
    """
    sinks = num_sink_pages(window, page_size) * page_size
    size = max(window.size, sinks)
    if not window.size or length - cut.gap <= (2 * size if cut.gap else 3 * size // 2):
        return cut
    gap = (length - size) // page_size * page_size - sinks
    return ContextCut(sinks, gap) if gap > cut.gap else cut


def num_sink_pages(window: ContextWindow, page_size: int) -> int:
    """Pages at the begin of a long context that are kept."""
    return -(-window.sinks // page_size) if window.size else 0


class UncachedToken(NamedTuple):
    """A committed token between context and root."""

    slot: int
    """Tree slot of its KV; -1 if it was not run."""
    is_final: bool
    """Whether its KV is what the context should hold: computed with the target's feature, or by a model without."""

    @property
    def lacks_kv(self) -> bool:
        """Whether there is no such KV."""
        return self.slot < 0 or not self.is_final


UNRUN = UncachedToken(-1, False)


@dataclass(slots=True, eq=False)
class DraftContext:
    """One request: tokens before position `end` are context, `uncached` holds those from there to before `root`.

    KV positions are `lag` less than positions; the first `lag` tokens have none. Of a context that is cut, the first
    tokens are apart from the others: they are computed when their features are here, and are context from the start.
    """

    tree: Tree
    row: int
    """Of the runner."""
    lag: int
    """See BurstShape.lag."""
    features: PendingFeatures
    steps_left: int = 0
    """Lockstep: steps of its tree that are still to be run."""
    renews_root: bool = False
    """Whether a root that was run before its features came is run again with them."""
    cut: ContextCut = WHOLE
    """What is left out between the first tokens and the others."""
    sinks: PendingFeatures | None = None
    """Features of the first tokens of a context that is cut, until these are computed."""
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
    """Of the author, as the forest knows it."""
    seen: int = 1
    """Ids of the author below this were looked at for nodes that others appended."""
    root_in_burst: bool = False
    """Whether the burst under way runs the root."""
    num_sent: int = 0
    """Nodes that were appended to the author's tree since the forest followed a commit."""

    def __post_init__(self) -> None:
        author = self.tree.author
        self.known, self.epoch = author.committed_len, author.epoch
        self.root, self.end = self.known - 1, self.lag + self.cut.sinks + self.cut.gap
        self.uncached = [UNRUN] * max(0, self.root - self.end)

    @property
    def first_unrun(self) -> int:
        """Index in `uncached` of the first token that was not run; one past the last if all were."""
        for index, (slot, _) in enumerate(self.uncached):
            if slot < 0:
                return index
        return len(self.uncached)

    @property
    def num_with_features(self) -> int:
        """How many of `uncached`, and the root behind them, could be run with the target's features."""
        return min(max(self.feature_end - self.end, 0), len(self.uncached) + 1)

    def to_run(self, *, root: bool) -> tuple[list[int], int]:
        """Indices in `uncached` of what a burst is to run, in order; how many, from the first, take target features.

        These are the tokens whose KV can become final; with `root` also those that were not run, and the root, whose
        index is one past the last.
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
        """Whether the root is to be run again: it was run without the target's feature, which is here by now."""
        return (
            self.renews_root and self.root_run and not self.root_final and self.num_with_features > len(self.uncached)
        )

    @property
    def kv_len(self) -> int:
        """Places of the context."""
        return self.end - self.lag - self.cut.gap

    @property
    def num_sinks(self) -> int:
        """First tokens of a context that is cut, if they can be computed and were not."""
        if self.sinks is None or (self.lag and self.sinks.end_from(0) < self.cut.sinks):
            return 0
        return self.cut.sinks

    def take_features(self, start: int, values: Any) -> None:
        """Keep the target's features of positions `start`, ..., as far as something is still to be run with them."""
        if self.sinks is not None and start < self.cut.sinks:
            self.sinks.add(start, values[: self.cut.sinks - start], since=0)
        self.features.add(start, values, since=self.end - 1)

    @property
    def feature_end(self) -> int:
        """One past the last position that the target's features reach without a gap from the context on."""
        if not self.lag:
            return self.root + 1
        return self.features.end_from(self.end - 1) + 1

    def follow(self, slots: list[int], count: int, *, root_run: bool) -> None:
        """`count` tokens were committed; `slots` are those of the old root and of the found nodes behind it."""
        is_final = not self.lag
        uncached = [UncachedToken(slot, is_final) if slot >= 0 else UNRUN for slot in slots]
        if self.root_final and uncached:
            uncached[0] = UncachedToken(slots[0], True)
        uncached += [UNRUN] * (count - len(slots))
        # Where the old root has no KV position, it is in no tree slot either.
        self.uncached += uncached[self.end - self.root :] if self.end > self.root else uncached
        self.root += count
        self.known += count
        self.num_sent = 0
        self.root_run = root_run
        self.root_final = root_run and not self.lag

    def take_final(self, *, accept_own: bool) -> list[int]:
        """Take leading tokens whose KV is final off `uncached`, and return their tree slots.

        With `accept_own`, KV computed with the draft's own features is taken, too.
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
        """Leading tokens of `uncached` whose tree slots no later token needs for its parent's own feature."""
        if not self.lag or self.root_run:
            return len(self.uncached)
        first = self.first_unrun
        return first - 1 if first else len(self.uncached)
