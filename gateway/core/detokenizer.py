"""The text of an answer while it grows: token ids to text, one token at a time, and stop strings in it."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

_MAX_HELD_TOKENS = 16
"""Tokens that are held back because their text ends in U+FFFD; of that the last few alone can be half a character."""
_CHARACTER_TOKENS = 4
"""The most tokens that one character can be spread over."""


class Detokenizer(ABC):
    """The detokenizer of one answer.

    What `push` and `finish` return adds up to exactly what decoding all ids at once gives, and no piece ends inside a
    character. Which of the two kinds fits depends on the tokenizer's decoder; `Tokenizer.detokenizer` knows.
    """

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Adds a token. Returns the text that became final, which may be empty."""

    @abstractmethod
    def finish(self) -> str:
        """Ends the answer. Returns what was held back; half a character becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """For byte-level vocabularies: each token stands for fixed bytes, and the text is those bytes as UTF-8.

    Only an unfinished character is held back, at most three bytes.
    """

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See the base."""
        return self._decoder.decode(self._text_bytes(token_id))

    def finish(self) -> str:
        """See the base."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """For every other vocabulary: decodes a short window of tokens twice and takes the difference.

    A run of byte tokens is held back until it ends, because one bad byte changes the text of the whole run.

        ids of the answer   ...  a b c   d e
        _context                 a b c          emitted last; joins what follows as in the whole
        _pending                         d e    not emitted yet
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        is_hidden: Callable[[int], bool],
        is_byte: Callable[[int], bool],
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`marks`: texts, by id, of special tokens that are shown; they end a character that is not complete."""
        self._decode = decode
        self._is_hidden = is_hidden
        self._is_byte = is_byte
        self._marks = marks or {}
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """See the base."""
        if (mark := self._marks.get(token_id)) is not None:
            return self.finish() + mark
        if self._is_hidden(token_id):  # ends no run of byte tokens either
            return ""
        self._pending.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = self._new_text()
        if not text:
            return ""
        if not text.endswith("\ufffd"):
            return self._emit(len(self._pending), text)
        cut = self._cut() if len(self._pending) > _MAX_HELD_TOKENS else 0
        return self._emit(cut, self._new_text(cut)) if cut else ""

    def _cut(self) -> int:
        """How many pending tokens are final though the character behind them is not: bytes may still be part of it."""
        # A model that says U+FFFD for ever would else have all of it decoded again for each token.
        cut = len(self._pending) - _CHARACTER_TOKENS
        while cut and self._is_byte(self._pending[cut - 1]):
            cut -= 1
        return cut

    def _emit(self, number: int, text: str) -> str:
        self._context, self._pending = self._pending[:number], self._pending[number:]
        self._context_text = self._decode(self._context)
        return text

    def finish(self) -> str:
        """See the base."""
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text

    def _new_text(self, number: int | None = None) -> str:
        """Text of the first `number` pending tokens, or of all."""
        text = self._decode(self._context + self._pending[:number])
        return text[len(self._context_text) :] if text.startswith(self._context_text) else ""


class StopMatcher:
    """Lets text through up to the first stop string, or with it, however the text is cut into pieces.

    The first is the one that ends first; of those that end together, the longest. Text that may still turn out to
    begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string is let through, too."""
        self._keep = keep
        self._stops = tuple(stops)
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
        safe = len(text) - max(overlap_length(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Ends the text without a hit. Returns what was held back."""
        text, self._held = self._held, ""
        return text

    def _cut(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[0 if self._keep else 1] if found else None


def overlap_length(text: str, mark: str) -> int:
    """How many characters at the end of a text the mark may begin with."""
    if text[-1:] in mark:
        for length in range(min(len(text), len(mark) - 1), 0, -1):
            if mark.startswith(text[-length:]):
                return length
    return 0
