"""Heads and draft models that do not fit their target are refused at the start, in a line that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load
from tiny_blocks import ZLAB_FIELDS, backbone
from tiny_heads import EAGLE3_FIELDS, FIELDS, HIDDEN, Tensors, eagle3_tensors, save_head, save_mimo
from tiny_models import save_tiny

from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import algorithm_of, check_drafter
from outrider.models.store_folder import hash_token_ids

TOKENIZER: dict[str, Any] = {
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "post_processor": None,
    "truncation": None,
}


def check(algorithm: str, head: Path, target: Path) -> None:
    check_drafter(DraftOptions(speculative_algorithm=(algorithm,), speculative_draft_model_path=str(head)), target)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("changes", "change", "message"),
    [
        (
            {"vocab_size": 5000},
            without(),
            "vocabulary of 5000, the target one of 97; use a head trained for",
        ),
        ({}, without("d2t"), "tensor d2t missing from the checkpoint; the draft vocabulary of 50 is not the target's"),
        (
            {},
            without("lm_head.weight"),
            r"tensor lm_head\.weight missing from the checkpoint; the draft vocabulary",
        ),
        ({"hidden_size": 64}, without(), "features of hidden size 64, the target's is 32"),
        ({"num_attention_heads": 3}, without(), "num_attention_heads"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_anything_is_loaded(
    changes: dict[str, Any], change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "target")
    save_head(tmp_path / "head", {**EAGLE3_FIELDS, **changes}, change(eagle3_tensors()))
    with pytest.raises(ConfigError, match=rf"^draft model .*head: .*{message}"):
        check("EAGLE3", tmp_path / "head", tmp_path / "target")


@pytest.mark.parametrize("layers", [3, -1, "sliding_attention", ["sliding_attention"]])
def test_layer_types_that_are_none_are_refused(layers: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    save_head(tmp_path / "head", {**ZLAB_FIELDS, "layer_types": layers}, backbone())
    with pytest.raises(ConfigError, match="layer_types of a block head must be 2 times"):
        check("DFLASH", tmp_path / "head", tmp_path / "target")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["0.0.linear.weight", "0.1.weight"]),
        ({}, ["medusa_head.0.0.linear.weight"]),
        ({}, ["emb.0.weight", "proj.0.weight", "head.0.weight", "ln.0.weight"]),
        ({"speculators_model_type": "eagle"}, ["embed_tokens.weight", "fusion_fc.weight", "transformer.mlp.up.weight"]),
    ],
)
def test_other_kinds_of_heads_are_no_language_models(fields: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    save_head(tmp_path, {**FIELDS, **fields}, {name: torch.zeros(2, 2) for name in names})
    with pytest.raises(ConfigError, match=f"holds no known kind of draft; its tensors include {min(names)}; use"):
        algorithm_of(tmp_path)


def test_a_tied_model_without_an_embedding_by_name_is_a_language_model(tmp_path: Path) -> None:
    save_head(
        tmp_path, FIELDS, {name: torch.zeros(2, 2) for name in ("lm_head.weight", "model.layers.0.mlp.up.weight")}
    )
    assert algorithm_of(tmp_path) == "STANDALONE"


def test_a_target_that_cannot_be_read_is_what_is_named(tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    save_head(tmp_path / "target", {"n_layer": 4}, {})
    with pytest.raises(ConfigError, match=r"^target .*target: config\.json: num_hidden_layers is missing"):
        check("EAGLE3", tmp_path / "head", tmp_path / "target")


def test_a_module_of_another_model_and_one_of_another_layout_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    save_mimo(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ConfigError, match="wide: the head takes features of hidden size 64, the target's is 32"):
        check("NEXTN", tmp_path / "wide", tmp_path / "target")
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    with pytest.raises(ConfigError, match=r"NEXTN: .*head holds a head of EAGLE3; give --speculative-algorithm EAGLE3"):
        check("NEXTN", tmp_path / "head", tmp_path / "target")
    with pytest.raises(ConfigError, match="heads in the layouts of DeepSeek and Qwen3-Next are not supported"):
        check("NEXTN", tmp_path / "target", tmp_path / "target")


@pytest.mark.parametrize(
    ("fc", "message"),
    [
        (torch.full((HIDDEN, 3 * HIDDEN), torch.nan), r"tensor fc\.weight holds NaN or infinity"),
        (torch.ones(HIDDEN, 3 * HIDDEN, dtype=torch.int8), r"tensor fc\.weight is torch\.int8; a head's weights are"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(fc: torch.Tensor, message: str, tmp_path: Path) -> None:
    save_head(tmp_path, EAGLE3_FIELDS, {**eagle3_tensors(), "fc.weight": fc})
    with pytest.raises(ConfigError, match=message):
        load("EAGLE3", speculative_draft_model_path=str(tmp_path))


def digest(folder: Path, tokenizer: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return hash_token_ids(folder)


def test_a_tokenizer_that_was_saved_anew_is_the_same_and_other_ids_are_not(tmp_path: Path) -> None:
    model = TOKENIZER["model"]
    saved = {**TOKENIZER, "post_processor": {"type": "TemplateProcessing"}, "truncation": {"max_length": 9}}
    saved["model"] = {"merges": [["a", "b"]], "vocab": {"ab": 2, "b": 1, "a": 0}, "type": "BPE", "fuse_unk": False}
    others = [
        {**TOKENIZER, "model": {**model, "vocab": {"a": 1, "b": 0, "ab": 2}}},
        {**TOKENIZER, "model": {**model, "merges": []}},
        {**TOKENIZER, "added_tokens": [{"id": 4, "content": "<end>"}]},
        {**TOKENIZER, "pre_tokenizer": None},
        {**TOKENIZER, "model": {**model, "ignore_merges": True}},
        {**TOKENIZER, "added_tokens": [{"id": 3, "content": "<end>", "special": True, "lstrip": True}]},
    ]
    usual = digest(tmp_path / "usual", TOKENIZER)
    assert digest(tmp_path / "saved", saved) == usual
    assert len({usual, *(digest(tmp_path / str(at), other) for at, other in enumerate(others))}) == 7
