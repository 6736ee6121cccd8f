"""Models divided among ranks say what they say whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import relative_error, run_one, save_tiny, token_ids

from outrider.errors import ConfigError
from outrider.layers.linear import RMSNorm
from outrider.models.config import ModelConfig
from outrider.models.cuts import cut, spans
from outrider.models.loader import load_decoder
from outrider.models.weights import stored_tensors
from outrider_tools.quantize import FORMATS, quantize

sys.path.append(str(Path(__file__).parents[1] / "verify"))
from rank_threads import ranked

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("Llama", 2, {}),
    ("Llama", 4, {"tie_word_embeddings": True, "vocab_size": 96}),
    ("Llama", 4, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("Qwen2", 4, {}),
    ("Qwen3", 2, {}),
    ("Phi3", 2, {}),
    ("Gemma3Text", 2, {"head_dim": 8}),
    ("Mixtral", 2, {}),
    ("GptOss", 4, {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    (
        "Qwen2Moe",
        2,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 2,
        },
    ),
]


@pytest.mark.parametrize(("family", "world", "changes"), CASES)
def test_ranks_together_are_the_model(family: str, world: int, changes: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path, family, **changes)
    whole = load_decoder(tmp_path)
    ids, slots = token_ids(9, 96), torch.arange(20, 29)
    with ranked(tmp_path, world) as model:
        found = run_one(model, model.new_kv(64), ids, slots)  # type: ignore[arg-type]
    expected = run_one(whole, whole.new_kv(64), ids, slots)
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 3e-6


def test_a_rank_reads_its_part_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    stored = stored_tensors(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = stored[name].read()
    for rank in range(4):
        # Two KV heads of 8 channels among four ranks: the first two have the first head.
        found = spans(name, (16, 32), (8, 32), config, rank, 4)
        assert found == [[(rank // 2 * 8, rank // 2 * 8 + 8)], [(0, 32)]]
        assert torch.equal(stored[name].read(found), whole[rank // 2 * 8 :][:8])
    name = "model.layers.0.mlp.down_proj.weight"
    found = spans(name, (32, 48), (32, 24), config, 1, 2)
    assert torch.equal(stored[name].read(found), stored[name].read()[:, 24:])


@pytest.mark.parametrize(
    ("name", "family"),
    [(name, family) for name in FORMATS for family in ("Llama", "Phi3")]
    # Of experts' matrices those whose packing or scales are unlike the others'.
    + [(name, "Qwen3Moe") for name in ("awq", "fp8-block", "mxfp4")],
)
def test_quantized_matrices_are_divided(name: str, family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny(source, family, **sizes, **(mixture if family == "Qwen3Moe" else {}))
    quantize(source, out, name, 32, torch.device("cpu"), 1 << 30, lambda *_: None)
    whole = load_decoder(out)
    ids, slots = token_ids(9, 96), torch.arange(20, 29)
    with ranked(out, 2) as model:
        found = run_one(model, model.new_kv(64), ids, slots)  # type: ignore[arg-type]
    assert relative_error(found, run_one(whole, whole.new_kv(64), ids, slots)) < 3e-6


def test_blocks_that_two_ranks_would_share_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", hidden_size=64, intermediate_size=320, head_dim=16)
    quantize(tmp_path / "source", tmp_path / "out", "fp8-block", 32, torch.device("cpu"), 1 << 30, lambda *_: None)
    with pytest.raises(ConfigError, match=r"gate_proj has scales of blocks of 128, of which 320 channels .*; use 1$"):
        cut(ModelConfig.from_folder(tmp_path / "out"), 2)


@pytest.mark.parametrize(
    ("family", "world", "changes", "words"),
    [
        ("Llama", 3, {}, "num_attention_heads 4 cannot be divided among 3 ranks; use 1, 2 or 4$"),
        (
            "Llama",
            2,
            {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
            "num_attention_heads 9 cannot be divided among 2 ranks; use 1 or 3$",
        ),
        (
            "Llama",
            4,
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6},
            "num_key_value_heads 6 .*; use 1, 2, 3, 6 or 12$",
        ),
        ("Llama", 4, {"intermediate_size": 50}, "intermediate_size 50 cannot be divided among 4 ranks; use 1 or 2$"),
        ("Phi3", 4, {}, "2 KV heads in one matrix with q, fewer than 4 ranks; use 1 or 2$"),
        ("Olmo2", 2, {}, "Olmo2ForCausalLM norms all heads together"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    family: str, world: int, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size: .*{words}"):
        cut(ModelConfig.from_folder(tmp_path), world)


def test_a_norm_that_was_made_beforehand_is_taken_once_and_for_its_rows_alone() -> None:
    norm = RMSNorm((8,), 1e-6, torch.float32, torch.device("cpu"))
    norm.weight.fill_(2.0)
    rows, made = torch.randn(3, 8), torch.zeros(3, 8)
    plain = norm(rows)
    norm.note(rows, made)
    assert norm(rows) is made and torch.equal(norm(rows), plain)
    norm.note(rows, made)
    assert torch.equal(norm(rows.clone()), plain) and torch.equal(norm(rows), plain)
