"""The default model's tokenizer and chat template, against the library that its authors use."""

from __future__ import annotations

import functools
from pathlib import Path

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 12345 + 67890 = ?\n"}],
    [
        {"role": "user", "content": "Grüße 🙂"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "<|im_end|> and more"},
    ],
]


@functools.cache
def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_conversations_render_as_transformers_renders_them(model_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_path)
    ours = load(model_path)
    assert ours.chat_template is not None
    for messages in CONVERSATIONS:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat_template.render(messages) == text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=examples(200))
@given(data=st.data())
def test_pieces_add_up_to_the_whole(model_path: Path, data: st.DataObject) -> None:
    tokenizer = load(model_path)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=40))
    detokenizer = tokenizer.detokenizer()
    pieces = [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(token_ids)
