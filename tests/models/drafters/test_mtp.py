"""MiMo as a target, and the head in its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chains import load, recompute_chain, run_chain
from safetensors.torch import load_file, save_file
from tiny_heads import HIDDEN, VOCAB, Layer, rms, save_mimo
from tiny_models import relative_error, run_one, save_tiny, token_ids
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.loader import load_model


@pytest.mark.parametrize("tied", [False, True])
def test_the_target_is_qwen2_beside_its_head(tied: bool, tmp_path: Path) -> None:
    reference = save_mimo(tmp_path, tie_word_embeddings=tied)
    model, ids = load_model(tmp_path), token_ids(20)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(run_one(model, model.new_kv(20), ids, torch.arange(20)), expected) <= 1e-5


def test_another_familys_extra_tensors_stay_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen2")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.mtp_layers.0.input_proj.weight": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"unexpected tensor model\.mtp_layers"):
        load_model(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_chain_computes_the_formulas(tied: bool, tmp_path: Path) -> None:
    reference = save_mimo(tmp_path, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.mtp_layers.0"
    eps = ModelConfig.from_folder(tmp_path).rms_norm_eps
    model = load("NEXTN", target_model_path=str(tmp_path))
    assert model.feature_layers == (4,)  # after the final norm
    assert (model.hidden_size, model.feature_size, model.vocab_size, model.num_layers) == (HIDDEN, HIDDEN, VOCAB, 1)
    embedding, output = reference.model.embed_tokens.weight.detach(), reference.lm_head.weight.detach()
    layer = Layer(tensors, prefix, eps)

    def normed(name: str, rows: Tensor) -> Tensor:
        return rms(rows, tensors[f"{prefix}.{name}.weight"], eps)

    def whole(ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        tokens = embedding[ids].clone()
        tokens[0] = 0  # position 0 has no token
        pairs = torch.cat((normed("hidden_layernorm", features), normed("token_layernorm", tokens)), 1)
        stream = pairs @ tensors[f"{prefix}.input_proj.weight"].T
        found = normed("final_layernorm", layer(normed("input_layernorm", stream), stream))
        return found @ output.T, found

    ids, features = token_ids(8), torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits, guesses = run_chain(model, ids, features, 4)
    assert relative_error(logits, recompute_chain(whole, ids, features, guesses)) <= 1e-5


def test_the_head_may_be_given_as_the_draft(tmp_path: Path) -> None:
    save_mimo(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    model = load("NEXTN", speculative_draft_model_path=str(tmp_path / "target"))
    assert len(model.token_ids_hash) == 64
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_window_size": 64}))
    assert load("NEXTN", speculative_draft_model_path=str(tmp_path / "target")).window == (64, 16)


def test_a_target_without_a_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-draft-model-path: NEXTN needs it"):
        load("NEXTN")
    save_tiny(tmp_path, "Qwen2")
    with pytest.raises(ConfigError, match=r"NEXTN reads a head in MiMo's layout, .* and this is Qwen2"):
        load("NEXTN", target_model_path=str(tmp_path))
    save_mimo(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "mtp_layers" not in name}
    save_file(kept, path)
    with pytest.raises(ConfigError, match=r"missing from the checkpoint"):
        load("NEXTN", target_model_path=str(tmp_path))
