"""The tokenizer inside a GGUF file, written out as Hugging Face files.

GGUF names its pre-tokenizer by a word alone (`tokenizer.ggml.pre`), so each word that we accept is spelled out here.
A wrong pre-tokenizer still round-trips text and merely yields other ids than the model was trained on; an unknown
word is therefore an error and never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.errors import ConfigError

# gguf.TokenType: the vocabulary entries that are matched in the text before any merge.
CONTROL_TOKEN = 3
USER_TOKEN = 4


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) for the GGUF metadata `fields`.

    Raises ConfigError for a tokenizer of another kind than byte-level BPE with known splitting.
    """
    tokenizer = build_tokenizer(fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tokenizer_config(fields)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE of the GGUF metadata: vocabulary, merges, pre-tokenizer, decoder and added tokens."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"the GGUF file has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is read")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    token_types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [pair(line) for line in fields["tokenizer.ggml.merges"]]

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer(fields.get("tokenizer.ggml.pre", ""))
    tokenizer.decoder = decoders.ByteLevel()
    # The ids stay as they are, because the added tokens are in the vocabulary already.
    typed = list(zip(tokens, token_types, strict=True))
    tokenizer.add_special_tokens([added_token(text, special=True) for text, type_ in typed if type_ == CONTROL_TOKEN])
    tokenizer.add_tokens([added_token(text, special=False) for text, type_ in typed if type_ == USER_TOKEN])
    return tokenizer


def pair(line: str) -> tuple[str, str]:
    """The two halves of a merge. The byte alphabet has no space, so the one in the line parts them."""
    left, right = line.split(" ")
    return left, right


def added_token(text: str, *, special: bool) -> AddedToken:
    """A token matched verbatim: surrounding spaces stay, and nothing is normalised."""
    return AddedToken(text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)


def pre_tokenizer(word: str) -> pre_tokenizers.PreTokenizer:
    """How text is split before merging, for the word that GGUF has for it."""
    if word == "smollm":
        split: pre_tokenizers.PreTokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return split
    raise ConfigError(f"the GGUF file splits text in a way not known here: tokenizer.ggml.pre is {word!r}")


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json says: the roles of the special tokens and the chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # This class takes tokenizer.json as it is. Model-named classes rebuild parts of it by rules of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for role, word in roles.items():
        token_id = fields.get(f"tokenizer.ggml.{word}_token_id")
        if token_id is not None:
            config[role] = tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
