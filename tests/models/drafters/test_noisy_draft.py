"""The noisy copy that benchmarks draft with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chains import load
from safetensors.torch import load_file
from tiny_models import save_tiny

from benchmarks.split.noisy_draft import make_noisy
from outrider.errors import ConfigError

CPU = torch.device("cpu")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_matrices_get_noise_of_their_own_size_and_nothing_else_changes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", "Qwen2", hidden_size=128, intermediate_size=256, head_dim=32)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    make_noisy(tmp_path / "a", tmp_path / "b", 0.1, 0, None, CPU)
    before, after = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        change = after[name] - weight
        if weight.dim() == 2 and name != "model.embed_tokens.weight":
            assert 0.095 < float(change.std() / weight.std()) < 0.105
            assert abs(float(change.mean())) < 0.01 * float(weight.std())
        else:
            assert not change.any()
    make_noisy(tmp_path / "a", tmp_path / "c", 0.1, 0, None, CPU)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(tmp_path / "c").items())
    load("STANDALONE", speculative_draft_model_path=str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="exists"):
        make_noisy(tmp_path / "a", tmp_path / "b", 0.1, 0, None, CPU)


def test_a_tied_output_matrix_stays_tied_and_the_format_may_change(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", tie_word_embeddings=True)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    make_noisy(tmp_path / "a", tmp_path / "b", 0.1, 0, torch.bfloat16, CPU)
    found = weights(tmp_path / "b")
    assert "lm_head.weight" not in found
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    load("STANDALONE", torch.bfloat16, speculative_draft_model_path=str(tmp_path / "b"))
