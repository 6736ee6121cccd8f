from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from silent_progress import silent

from outrider.models.store_gguf import convert_gguf, unpermute


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_every_weight_comes_back_bit_by_bit(tmp_path: Path, out: Path) -> None:
    tensors = tiny_gguf.weights()
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tensors)
    convert_gguf(tmp_path / "tiny.gguf", out, silent)
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for name, weight in tensors.items():
        assert converted[name].dtype == np.float32
        np.testing.assert_array_equal(converted[name], tiny_gguf.after_quantization(name, weight), err_msg=name)


@given(num_heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.integers(1, 3))
def test_unpermute_undoes_the_order_of_llama_cpp(num_heads: int, half: int, columns: int) -> None:
    weight = np.arange(num_heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    np.testing.assert_array_equal(unpermute(tiny_gguf.permute(weight, num_heads), num_heads), weight)


def test_config_says_what_the_metadata_says(tmp_path: Path, out: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", out, silent)
    config = json.loads((out / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": tiny_gguf.HIDDEN,
        "intermediate_size": tiny_gguf.FFN,
        "num_hidden_layers": tiny_gguf.NUM_LAYERS,
        "num_attention_heads": tiny_gguf.NUM_HEADS,
        "num_key_value_heads": tiny_gguf.NUM_KV_HEADS,
        "head_dim": tiny_gguf.HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 128,
        "vocab_size": len(tiny_gguf.VOCAB),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert expected.items() <= config.items()
    assert "quantization_config" not in config
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_progress_rises_to_its_total(tmp_path: Path, out: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", out, lambda *report: seen.append(report))
    done = [report[1] for report in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2] == sum(weight.nbytes for weight in tiny_gguf.weights().values())
