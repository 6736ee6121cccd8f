"""A tokenizer of 61 tokens that JSON can be written with, for models that know no language."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from outrider.grammar.compiler import GrammarVocabulary
from outrider.grammar.spec import Grammar, GrammarKind

VOCAB = 61
END = 60
_SPACE = "Ġ"  # a space, as byte-level tokenizers write it
_LONGER = ['{"', '":', f'"{_SPACE}', f",{_SPACE}", '",', "true", "false", "null", "ab", "12", "[]", f":{_SPACE}", "yes"]
_SINGLE = [*'{}[]":,.-0123456789abcdefghijklmnopqrstuvyx_', _SPACE, "Ċ"]
TOKENS = [*_SINGLE, *_LONGER, "<pad>", "<end>"]


def byte_level(
    pieces: Iterable[str], merges: Sequence[tuple[str, str]] = (), unk_token: str | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer of these pieces, by their order, written as byte-level ones write bytes."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token=unk_token))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def tiny_vocabulary(folder: Path) -> GrammarVocabulary:
    """Of a tokenizer that is written into `folder`."""
    inner = byte_level(TOKENS)
    inner.add_special_tokens(["<pad>", "<end>"])
    inner.save(str(folder / "tokenizer.json"))
    return GrammarVocabulary.from_folder(folder, VOCAB, [END])


def text_of(token_ids: list[int]) -> str:
    """The text of an answer, without what ends it."""
    text = "".join(TOKENS[token] for token in token_ids if token < VOCAB - 2)
    return text.replace(_SPACE, " ").replace("Ċ", "\n")


OBJECT = Grammar(GrammarKind.JSON_OBJECT)
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    """{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
    "b": {"type": "array", "items": {"enum": ["ab", "x", null]}, "maxItems": 3}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"], "additionalProperties": false}""",
)
REGEX = Grammar(GrammarKind.REGEX, r"(ab|x){2,6}\.[0-9]{1,4}")
CHOICE = Grammar.of_choices(["yes", "yes, yes", "no", "abba"])
