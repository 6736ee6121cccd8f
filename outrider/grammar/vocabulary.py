"""A model's tokens as the grammar library sees them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llguidance
from llguidance import LLTokenizer

from outrider.errors import ConfigError

LIBRARY = f"llguidance {llguidance.__version__}"


class GrammarVocabulary:
    """Which bytes each token stands for, and which tokens end an answer.

    Special tokens stand for no bytes, so that no grammar ever allows one inside of a text. Ids past the tokenizer's own
    are never legal.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.end_ids = frozenset(end_ids)

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> GrammarVocabulary:
        """Of a model's folder: takes its `tokenizer.json`, about 0.3 s for 49k tokens.

        `vocab_size`: ids below this are legal. `end_ids`: tokens that end an answer. Raises ConfigError if the library
        cannot read the tokenizer, or if nothing can end an answer.
        """
        ends = sorted({token for token in end_ids if token < vocab_size})
        if not ends:
            raise ConfigError("the model has no end-of-sequence token, so that no constrained answer could end")
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: the grammar library cannot read the tokenizer: {error}") from None
        return cls(tokenizer, vocab_size, ends)

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.size // 32)
