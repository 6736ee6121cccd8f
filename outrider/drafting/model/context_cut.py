"""Long contexts as a drafter sees them: their first tokens and, right behind, their last ones.

A head guesses little behind texts much longer than those that it was trained on. Of a long context it is shown the last
tokens, and the first ones, where attention goes that is wanted nowhere (StreamingLLM, arXiv 2309.17453), at distances
as if nothing lay between.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.models.drafters.config import ContextWindow


class ContextCut(NamedTuple):
    """What is left out of a context. Place p of the drafter's KV holds KV position p of the sequence for p below
    `sinks`, and p + `gap` from there on.

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
