"""EAGLE-1 and EAGLE-2 heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load, recompute_chain, run_chain
from tiny_heads import EAGLE3_FIELDS, FIELDS, HIDDEN, VOCAB, Layer, eagle3_tensors, eagle_tensors, rms, save_head
from tiny_models import relative_error, save_tiny, token_ids
from torch import Tensor
from torch.nn import functional

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.kinds import check_drafter

EAGLE_FIELDS = {**FIELDS, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return save_tiny(tmp_path / "target")


def load_eagle(folder: Path, **options: str) -> DraftModel:
    return load(
        "EAGLE",
        speculative_draft_model_path=str(folder / "head"),
        target_model_path=str(folder / "target"),
        **options,
    )


@pytest.mark.parametrize(("bias", "num_layers"), [(True, 1), (False, 1), (True, 2)])
def test_a_chain_computes_the_formulas(bias: bool, num_layers: int, target: Any, tmp_path: Path) -> None:
    tensors = eagle_tensors(bias, num_layers)
    save_head(tmp_path / "head", {**EAGLE_FIELDS, "num_hidden_layers": num_layers}, tensors)
    model = load_eagle(tmp_path)
    assert model.feature_layers == (4,)  # the target's last hidden state after its final norm
    assert (model.hidden_size, model.feature_size, model.vocab_size) == (HIDDEN, HIDDEN, VOCAB)
    assert model.target_ids is None
    embedding, output = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    layers = [Layer(tensors, f"layers.{number}") for number in range(num_layers)]

    def whole(ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.cat((embedding[ids], features), 1)
        stream = functional.linear(pairs, tensors["fc.weight"], tensors.get("fc.bias"))
        for number, layer in enumerate(layers):
            rows = rms(stream, tensors[f"layers.{number}.input_layernorm.weight"]) if number else stream
            stream = layer(rows, stream)
        return stream @ output.T, stream

    ids, features = token_ids(8), torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(2))
    assert torch.equal(model.project(features), features)
    logits, guesses = run_chain(model, ids, features, 4)
    assert relative_error(logits, recompute_chain(whole, ids, features, guesses)) <= 1e-5


def test_the_targets_matrix_is_cut_to_a_token_map(target: Any, tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE_FIELDS, eagle_tensors())
    (tmp_path / "map.json").write_text(json.dumps([90, 5, 17, 5]))
    model = load_eagle(tmp_path, speculative_token_map=str(tmp_path / "map.json"))
    assert model.vocab_size == 3
    assert model.target_ids is not None and model.target_ids.tolist() == [5, 17, 90]
    rows = torch.randn(4, HIDDEN)
    expected = rows @ target.lm_head.weight.detach()[[5, 17, 90]].T
    assert relative_error(model.logits(rows), expected) <= 1e-6


def test_a_token_needs_its_feature(target: Any, tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE_FIELDS, eagle_tensors())
    model = load_eagle(tmp_path)
    batch = ForwardBatch(
        token_ids(1), torch.zeros(1, dtype=torch.int64), [Segment(1, torch.zeros(1, dtype=torch.int64))]
    )
    with pytest.raises(ValueError, match="needs features"):
        model.forward(batch, None, model.new_kv(1), TorchAttention())


def test_kinds_of_heads_are_told_apart(target: Any, tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE_FIELDS, eagle_tensors())
    with pytest.raises(ConfigError, match=r"--speculative-algorithm EAGLE3: .* holds a head of EAGLE"):
        load("EAGLE3", speculative_draft_model_path=str(tmp_path / "head"), target_model_path=str(tmp_path / "target"))
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    with pytest.raises(ConfigError, match=r"--speculative-algorithm EAGLE: .* holds a head of EAGLE3"):
        load_eagle(tmp_path)


def test_a_language_model_as_a_head_and_a_head_as_a_language_model_are_named_as_such(
    target: Any, tmp_path: Path
) -> None:
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())

    def check(algorithm: str, folder: Path) -> None:
        options = DraftOptions(speculative_algorithm=(algorithm,), speculative_draft_model_path=str(folder))
        check_drafter(replace(options, target_model_path=str(tmp_path / "target")), tmp_path / "target")

    for algorithm in ("EAGLE", "EAGLE3"):
        with pytest.raises(ConfigError, match=r"holds a language model, not a head; give .* STANDALONE"):
            check(algorithm, tmp_path / "target")
    with pytest.raises(ConfigError, match=r"STANDALONE: .* holds a head of EAGLE3; give .* EAGLE3"):
        check("STANDALONE", tmp_path / "head")
    check("EAGLE3", tmp_path / "head")
    check("STANDALONE", tmp_path / "target")
    (tmp_path / "head" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match=r"the tokenizer of .*head is \w{12}, the target's \w{12}"):
        check("EAGLE3", tmp_path / "head")
    save_tiny(tmp_path / "target", hidden_size=40)
    with pytest.raises(ConfigError, match="hidden size"):
        check("EAGLE3", tmp_path / "head")


def test_the_target_must_be_given_and_fit(tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE_FIELDS, eagle_tensors())
    with pytest.raises(ConfigError, match="--target-model-path"):
        load("EAGLE", speculative_draft_model_path=str(tmp_path / "head"))
    save_tiny(tmp_path / "target", hidden_size=40)
    with pytest.raises(ConfigError, match="hidden size 32, the target's is 40"):
        load_eagle(tmp_path)
