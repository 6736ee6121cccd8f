"""A model's reasoning before it answers, separated from the answer by the markers of its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.tokenizer import overlap_length


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and after the reasoning."""

    begin: str
    end: str
    label: str = ""
    """A word after the first marker that is not part of the reasoning."""


_MARKERS = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "kimi": ReasoningMarkers("◁think▷", "◁/think▷"),
    "seed": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningMarkers("<|channel>", "<channel|>", "thought"),
}
"""Markers by their names in --reasoning-parser."""


def find_markers(parser: str, template: str | None) -> ReasoningMarkers | None:
    """Return the markers of a parser, for "auto" those in the chat template; None without reasoning."""
    if parser != "auto":
        return _MARKERS.get(parser)
    return next((one for one in _MARKERS.values() if template and one.end in template), None)


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """How an answer that may hold reasoning begins."""

    markers: ReasoningMarkers
    begun: bool
    """Whether the prompt ends inside the reasoning; otherwise the answer has to begin with the marker."""

    @classmethod
    def of(cls, markers: ReasoningMarkers | None, prompt: str) -> ReasoningStart | None:
        """Return how the answer to a rendered conversation begins; None if it holds no reasoning."""
        prompt = prompt[-256:].rstrip()
        if markers is None or prompt.endswith(markers.end):
            return None
        return cls(markers, prompt.endswith(markers.begin + markers.label))


class ReasoningSplitter:
    """Splits reasoning from an answer that comes in pieces. White space next to the markers is dropped with them."""

    def __init__(self, start: ReasoningStart | None) -> None:
        """Without a start, everything is the answer's text."""
        self._held = ""
        self._spaces: list[str] = []
        """White space before the marker, or after the last reasoning, which more reasoning may follow."""
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._begin = "" if start is None else start.markers.begin + start.markers.label
        self._end = "" if start is None else start.markers.end
        self._step = self._take_text if start is None else self._inside if start.begun else self._before
        self._has_reasoned = False
        self.text_start = 0
        """Characters so far that came before the text."""
        self.num_tokens = 0
        """Tokens of the reasoning, markers included."""

    def push(self, piece: str, *, num_tokens: int = 1) -> None:
        """Add the text that came with `num_tokens` tokens."""
        if self._step == self._take_text:  # the last step, and nothing is held back
            self._text.append(piece)
            return
        self.text_start += len(piece)
        was_inside = self._step == self._inside
        self._held += piece
        self._run(final=False)
        if was_inside or self._step == self._inside:
            self.num_tokens += num_tokens

    def take(self, *, final: bool) -> tuple[str, str]:
        """Return new reasoning and text; `final`: nothing more comes, so also return what was held back."""
        if final:
            self._run(final=True)
        parts = "".join(self._reasoning), "".join(self._text)
        self._reasoning.clear()
        self._text.clear()
        return parts

    def _run(self, *, final: bool) -> None:
        while (self._held or self._spaces) and self._step(final):
            pass

    def _before(self, final: bool) -> bool:
        """Do this step. Like every step, return whether the next one has something to do at once."""
        text = self._held.lstrip()
        self._spaces.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if text.startswith(self._begin):
            self._held = text[len(self._begin) :]
            self._step = self._inside
        elif self._begin.startswith(text) and not final:
            return False
        else:
            self._held = "".join([*self._spaces, text])
            self._step = self._take_text
        self._spaces.clear()
        return True

    def _inside(self, final: bool) -> bool:
        text, marker, rest = self._held.partition(self._end)
        if not marker:
            safe = len(text) - (0 if final else overlap_length(text, self._end))
            text, rest = text[:safe], text[safe:]
        shown = text.rstrip()
        if shown:
            self._reasoning += [*self._spaces, shown] if self._has_reasoned else [shown.lstrip()]
            self._has_reasoned = True
            self._spaces.clear()
        self._spaces.append(text[len(shown) :])
        self._held = rest
        if marker:
            self._step = self._behind
        return bool(marker)

    def _behind(self, final: bool) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._take_text
        return bool(self._held)

    def _take_text(self, final: bool) -> bool:
        self.text_start -= len(self._held)
        self._text.append(self._held)
        self._held = ""
        return False
