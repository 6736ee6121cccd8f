"""Stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, however the text is cut into pieces.

    The first is the one that ends first; of those that end together, the longest. Text that may still turn out to
    begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Adds text. Returns what may be shown; after a hit nothing more comes."""
        if self.hit:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        cut = self._cut(text)
        if cut is not None:
            self.hit = True
            self._held = ""
            return text[:cut]
        safe = self._safe_length(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Ends the text without a hit. Returns what was held back."""
        text, self._held = self._held, ""
        return text

    def _cut(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _safe_length(self, text: str) -> int:
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first_characters:
                tail = text[at:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return at
        return len(text)
