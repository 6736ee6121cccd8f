"""The served model's tokenizer, read from its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from gateway.core.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from outrider.chat_template import ChatTemplate, read_config
from outrider.errors import ConfigError
from outrider.models.store_folder import hash_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Text to token ids and back, and the chat template that belongs to them."""

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
        """The chat template for requests with tools: some models have one of its own for them."""
        self.digest = digest
        """SHA-256 of tokenizer.json, hexadecimal."""
        self.config = dict(config or {})
        """tokenizer_config.json, as it is."""
        decoders = _decoder_types(inner)
        self._byte_level = decoders == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in decoders
        self._special = {t.content: token_id for token_id, t in inner.get_added_tokens_decoder().items() if t.special}
        self._added = {t.content: token_id for token_id, t in inner.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self.longest_token = max(map(len, inner.get_vocab(with_added_tokens=True)), default=1)
        """Characters of the longest token, an upper bound of the text that one token stands for."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ConfigError."""
        path = folder / "tokenizer.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"the tokenizer cannot be read: {path}: {error.strerror}") from None
        try:
            inner = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"{path} is not a tokenizer: {error}") from None
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
        """Tokens in the vocabulary, added ones included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts a beginning-of-sequence token where the model wants one."""
        # The batch call gives up the interpreter lock, the single one does not.
        return list(self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; special tokens are left out or spelled out."""
        return str(self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def added_id(self, text: str) -> int | None:
        """The token, beside those that the tokenizer has learned, that stands for the whole text; None without one."""
        return self._added.get(text)

    def detokenizer(self, *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """Fresh state for one answer; special tokens are left out, but those `shown`, or all spelled out."""
        hidden = self._special.keys() - shown if skip_special_tokens else frozenset()

        def is_hidden(token_id: int) -> bool:
            token = self._inner.id_to_token(token_id)
            return token is None or token in hidden

        if self._byte_level:
            return ByteDetokenizer(lambda token_id: b"" if is_hidden(token_id) else self.token_bytes(token_id))
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        marks = {self._special[mark]: mark for mark in shown & self._special.keys()} if skip_special_tokens else {}
        return WindowDetokenizer(decode, is_hidden=is_hidden, is_byte=self._is_byte, marks=marks)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, special tokens spelled out; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(self._inner.id_to_token(token_id) or "")
        return known

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
    # GPT-2's alphabet: printable bytes stand for themselves, the other 68 for characters from U+0100 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
