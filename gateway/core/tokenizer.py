"""The served model's tokenizer, and the text of an answer that grows token by token, with stop strings in it."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from gateway.core.gate import Turns
from outrider.chat_template import ChatTemplate, read_config
from outrider.models.store_folder import hash_tokenizer, read_tokenizer

_MAX_HELD_TOKENS = 16
"""Most tokens held back because their text ends in U+FFFD; only the last few can be an incomplete character."""
_CHARACTER_TOKENS = 4
"""The most tokens that one character can be spread over."""
_LARGE_SIZE = 1 << 16
"""Work on more characters or tokens than this is large: the library takes some 300 bytes of memory for each token."""

T = TypeVar("T")


class ByteDetokenizer:
    """For byte-level vocabularies: each token stands for fixed bytes, and the text is those bytes as UTF-8.

    Only an incomplete character is held back, at most three bytes.
    """

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Add a token. Return the text that became final, which may be empty."""
        return self._decoder.decode(self._text_bytes(token_id))

    def finish(self) -> str:
        """End the answer. Return what was held back; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window of tokens twice and takes the difference.

    A run of byte tokens is held back until it ends, because one bad byte changes the text of the whole run.

        ids of the answer   ...  a b c   d e
        _context                 a b c          emitted last; what follows joins it as in the whole text
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
        """`marks`: texts, by id, of special tokens that are shown; they end an incomplete character."""
        self._decode = decode
        self._is_hidden = is_hidden
        self._is_byte = is_byte
        self._marks = marks or {}
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token. Return the text that became final, which may be empty."""
        if (mark := self._marks.get(token_id)) is not None:
            return self.finish() + mark
        if self._is_hidden(token_id):  # does not end a run of byte tokens, either
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
        """Return how many pending tokens are final though the last character is not: bytes may still belong to it."""
        # Without this, all output of a model that says U+FFFD forever would be decoded again for each token.
        cut = len(self._pending) - _CHARACTER_TOKENS
        while cut and self._is_byte(self._pending[cut - 1]):
            cut -= 1
        return cut

    def _emit(self, number: int, text: str) -> str:
        self._context, self._pending = self._pending[:number], self._pending[number:]
        self._context_text = self._decode(self._context)
        return text

    def finish(self) -> str:
        """End the answer. Return what was held back; an incomplete character becomes U+FFFD."""
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text

    def _new_text(self, number: int | None = None) -> str:
        """Return the text of the first `number` pending tokens, or of all."""
        text = self._decode(self._context + self._pending[:number])
        return text[len(self._context_text) :] if text.startswith(self._context_text) else ""


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""The detokenizer of one answer. Its pieces add up to exactly what decoding all ids at once gives, and no piece ends
inside a character."""


class StopMatcher:
    """Lets text through up to the first stop string, or including it, however the text is cut into pieces.

    The first stop string is the one that ends first; of those that end together, the longest. Text that may still turn
    out to begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: let the stop string through, too."""
        self._keep = keep
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """Add text. Return what may be shown, nothing after a hit."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else start]
        safe = len(text) - overlap_length(text, *self._stops)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """End the text without a hit. Return what was held back."""
        text, self._held = self._held, ""
        return text


def overlap_length(text: str, *marks: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of the marks."""
    # Place by place, not mark by mark: a place that was passed is never looked at again, whatever the marks are.
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) and mark != end for mark in marks):
            return length
    return 0


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Converts text to token ids and back, and holds the model's chat template."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        digest: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        """The chat template for requests with tools: some models have a separate one for them."""
        self.digest = digest
        """SHA-256 of tokenizer.json, hexadecimal."""
        self.config = dict(config or {})
        """The content of tokenizer_config.json."""
        decoders = _decoder_types(inner)
        self._byte_level = decoders == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in decoders
        self._special = {t.content: token_id for token_id, t in inner.get_added_tokens_decoder().items() if t.special}
        self._added = {t.content: token_id for token_id, t in inner.get_added_tokens_decoder().items()}
        self._bytes = cache(lambda token_id: self._find_bytes(inner.id_to_token(token_id) or ""))
        self._shown_bytes: dict[frozenset[str], Callable[[int], bytes]] = {}
        """Functions from token ids to shown bytes, by the special tokens that are left out."""
        self.longest_token = max(map(len, inner.get_vocab(with_added_tokens=True)), default=1)
        """Characters of the longest token, an upper bound for the text of one token."""
        self._large_work = ThreadPoolExecutor(1, "large-text")
        """One thread, since work whose client has left goes on when the next one has its turn."""
        self._large_turns = Turns()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ConfigError."""
        inner = read_tokenizer(folder)
        config = read_config(folder / "tokenizer_config.json")
        return cls(
            inner,
            chat_template=ChatTemplate.load(folder),
            tool_template=ChatTemplate.load(folder, "tool_use"),
            digest=hash_tokenizer(folder),
            config=config,
        )

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary, added ones included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids; `add_special_tokens` adds a beginning-of-sequence token if the model wants one."""
        # The batch call releases the interpreter lock, the single one does not.
        return list(self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether a large text has more than `num_tokens` tokens, found without the memory that all of them take.

        Tokens are counted in pieces of the text; where it is cut, there may be a few more than in the whole.
        """
        if len(text) <= _LARGE_SIZE:
            return False
        found = 0
        for start in range(0, len(text), _LARGE_SIZE):
            found += len(self.encode(text[start : start + _LARGE_SIZE], add_special_tokens=False))
            if found > num_tokens:
                return True
        return False

    async def in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Call `work`, on `size` characters or tokens, in a thread, and return its result.

        Only one large work runs at a time: otherwise a few bodies of megabytes would take gigabytes, and all threads.
        API keys take turns.
        """
        if size <= _LARGE_SIZE:
            return await asyncio.to_thread(work)
        async with self._large_turns:
            waiting = [work]
            try:
                return await asyncio.get_running_loop().run_in_executor(self._large_work, lambda: waiting.pop()())
            finally:
                waiting.clear()  # the executor keeps cancelled work, with its text, until its turn would have come

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; special tokens are left out or spelled out."""
        # The batch call releases the interpreter lock, as in `encode`.
        return str(self._inner.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])

    def added_id(self, text: str) -> int | None:
        """Return the added token, outside the learned vocabulary, that stands for the whole text; None without one."""
        return self._added.get(text)

    def detokenizer(self, *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """Return fresh state for one answer. Special tokens not in `shown` are left out, or all are spelled out."""
        hidden = frozenset(self._special.keys() - shown if skip_special_tokens else ())

        def is_hidden(token_id: int) -> bool:
            token = self._inner.id_to_token(token_id)
            return token is None or token in hidden

        if self._byte_level:
            shown_bytes = cache(lambda token_id: b"" if is_hidden(token_id) else self._bytes(token_id))
            return ByteDetokenizer(self._shown_bytes.setdefault(hidden, shown_bytes))
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        marks = {self._special[mark]: mark for mark in shown & self._special.keys()} if skip_special_tokens else {}
        return WindowDetokenizer(decode, is_hidden=is_hidden, is_byte=self._is_byte, marks=marks)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes, special tokens spelled out; empty for an id without a token."""
        return self._bytes(token_id)

    def _find_bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[c] for c in token)
            except KeyError:
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()

    def _is_byte(self, token_id: int) -> bool:
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(self._inner.id_to_token(token_id) or "") is not None


def _decoder_types(inner: tokenizers.Tokenizer) -> list[str]:
    decoder: dict[str, Any] = json.loads(inner.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence":
        return [str(part["type"]) for part in decoder["decoders"]]
    return [str(decoder["type"])] if decoder else []


def _byte_characters() -> dict[str, int]:
    # GPT-2's alphabet: printable bytes are their own characters, the other 68 are those from U+0100 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
