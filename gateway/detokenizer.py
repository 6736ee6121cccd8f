"""Token ids to text, one token at a time.

What `push` and `finish` return adds up to exactly what decoding all ids at once gives, and no piece ends inside a
character. Which of the two kinds fits depends on the tokenizer's decoder; `Tokenizer.detokenizer` knows.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class Detokenizer(ABC):
    """State of one answer."""

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
    ) -> None:
        self._decode = decode
        self._is_hidden = is_hidden
        self._is_byte = is_byte
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """See the base."""
        if self._is_hidden(token_id):  # ends no run of byte tokens either
            return ""
        self._pending.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return text

    def finish(self) -> str:
        """See the base."""
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text

    def _new_text(self) -> str:
        text = self._decode(self._context + self._pending)
        return text[len(self._context_text) :] if text.startswith(self._context_text) else ""
