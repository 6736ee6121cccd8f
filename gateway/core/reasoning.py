"""What a model thinks before it answers, told apart from the answer by the markers of its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.tokenizer import overlap_length


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What stands before and behind the reasoning."""

    begin: str
    end: str
    label: str = ""
    """A word behind the beginning that is no part of the reasoning."""


_MARKERS = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "kimi": ReasoningMarkers("◁think▷", "◁/think▷"),
    "seed": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningMarkers("<|channel>", "<channel|>", "thought"),
}
"""By what --reasoning-parser calls them."""


def find_markers(parser: str, template: str | None) -> ReasoningMarkers | None:
    """The markers of a parser; those that a chat template names where it is "auto"; None without reasoning."""
    if parser != "auto":
        return _MARKERS.get(parser)
    return next((one for one in _MARKERS.values() if template and one.end in template), None)


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """How an answer that may hold reasoning begins."""

    markers: ReasoningMarkers
    begun: bool
    """Whether the prompt ends in the reasoning; else the answer has to begin with the marker."""

    @classmethod
    def of(cls, markers: ReasoningMarkers | None, prompt: str) -> ReasoningStart | None:
        """`prompt`: the rendered conversation; None where its answer holds no reasoning."""
        prompt = prompt[-256:].rstrip()
        if markers is None or prompt.endswith(markers.end):
            return None
        return cls(markers, prompt.endswith(markers.begin + markers.label))


class ReasoningSplitter:
    """Splits an answer that comes in pieces. White space beside the markers is dropped with them."""

    def __init__(self, start: ReasoningStart | None) -> None:
        """Without a start all is the answer's text."""
        self._held = ""
        self._spaces: list[str] = []
        """White space behind the last reasoning, which more may follow."""
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._begin = "" if start is None else start.markers.begin + start.markers.label
        self._end = "" if start is None else start.markers.end
        self._step = self._take_text if start is None else self._inside if start.begun else self._before
        self._has_reasoned = False
        self.num_tokens = 0
        """Tokens of the reasoning, markers included."""

    def push(self, piece: str, *, num_tokens: int = 1) -> None:
        """Adds the text that came with some tokens."""
        if self._step == self._take_text:  # for good, and nothing is held
            self._text.append(piece)
            return
        was_inside = self._step == self._inside
        self._held += piece
        self._run(final=False)
        if was_inside or self._step == self._inside:
            self.num_tokens += num_tokens

    def take(self, *, final: bool) -> tuple[str, str]:
        """New pieces of reasoning and text; `final`: nothing more comes, and what was held back is told."""
        if final:
            self._run(final=True)
        parts = "".join(self._reasoning), "".join(self._text)
        self._reasoning.clear()
        self._text.clear()
        return parts

    def _run(self, *, final: bool) -> None:
        while self._held and self._step(final):
            pass

    def _before(self, final: bool) -> bool:
        """Whether more is to be done at once, as with all steps."""
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._held = text[len(self._begin) :]
            self._step = self._inside
        elif self._begin.startswith(text) and not final:
            return False
        else:
            self._step = self._take_text
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
        self._text.append(self._held)
        self._held = ""
        return False
