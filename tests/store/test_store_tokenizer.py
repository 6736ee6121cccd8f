from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.models.store_gguf import build_tokenizer, write_tokenizer

FIELDS: dict[str, Any] = {
    "llama.context_length": 128,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": tiny_gguf.VOCAB,
    "tokenizer.ggml.token_type": [3] * len(tiny_gguf.SPECIAL) + [1] * (len(tiny_gguf.VOCAB) - len(tiny_gguf.SPECIAL)),
    "tokenizer.ggml.merges": tiny_gguf.MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": tiny_gguf.TEMPLATE,
}


def test_digits_stay_apart_though_merges_would_join_them() -> None:
    assert build_tokenizer(FIELDS).encode(" the123 12").tokens == ["Ġthe", "1", "2", "3", "Ġ", "1", "2"]


def test_no_space_is_put_before_the_text() -> None:
    assert build_tokenizer(FIELDS).encode("the").tokens == ["t", "he"]


def test_special_tokens_are_matched_whole_and_keep_their_ids() -> None:
    tokenizer = build_tokenizer(FIELDS)
    encoding = tokenizer.encode("<|im_start|> the<|im_end|><|endoftext|>")
    assert encoding.tokens == ["<|im_start|>", "Ġthe", "<|im_end|>", "<|endoftext|>"]
    assert [encoding.ids[0], *encoding.ids[2:]] == [1, 2, 0]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == " the"
    assert tokenizer.get_vocab_size() == len(tiny_gguf.VOCAB)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = build_tokenizer(FIELDS)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_files_hold_the_roles_and_the_template(tmp_path: Path) -> None:
    write_tokenizer(FIELDS, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == tiny_gguf.TEMPLATE
    roles = {role: config[role] for role in ("bos_token", "eos_token", "unk_token", "pad_token")}
    assert roles == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(" the12").tokens == ["Ġthe", "1", "2"]
