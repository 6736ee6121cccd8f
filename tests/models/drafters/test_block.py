"""Block heads in every layout compute what their papers and the engines that serve them say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load, path_logits
from safetensors.torch import load_file
from tiny_blocks import (
    BLOCK,
    DEEPSPEC_FIELDS,
    HIDDEN,
    LAYERS,
    VOCAB,
    ZLAB_FIELDS,
    backbone,
    dspark_tensors,
    plain_block,
    plain_logits,
)
from tiny_heads import DRAFT_IDS, save_head
from tiny_models import relative_error, save_tiny
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.drafters.base import offered_projection
from outrider.models.drafters.heads import BlockHead

LENGTH, PATH = 9, [7, 30, 12, 55]


def raw_features(length: int = LENGTH) -> Tensor:
    return torch.randn(length, 2 * HIDDEN, generator=torch.Generator().manual_seed(11))


def test_dflash_takes_embedding_and_output_matrix_from_the_target(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    tensors = backbone()
    save_head(tmp_path / "head", ZLAB_FIELDS, tensors)
    model = load(
        "DFLASH", speculative_draft_model_path=str(tmp_path / "head"), target_model_path=str(tmp_path / "target")
    )
    assert model.feature_layers == (1, 3)
    assert offered_projection(model) is not None
    target = load_file(tmp_path / "target" / "model.safetensors")
    embedding = target["model.embed_tokens.weight"]
    rows = plain_block(tensors, embedding, raw_features(), PATH[0])
    wanted = plain_logits(tensors, target.get("lm_head.weight", embedding), rows[1:], PATH)
    found = path_logits(model, raw_features(), PATH)
    assert relative_error(found, wanted) <= 1e-5
    # Behind the block nothing is known.
    assert path_logits(model, raw_features(), [*PATH, 3]).isneginf().any(1).tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark_adds_what_the_token_before_says(tmp_path: Path, kind: str) -> None:
    tensors = dspark_tensors(kind)
    save_head(tmp_path, DEEPSPEC_FIELDS | {"markov_head_type": kind}, tensors)
    model = load("DSPARK", speculative_draft_model_path=str(tmp_path))
    assert model.feature_layers == (0, 2)
    rows = plain_block(tensors, tensors["embed_tokens.weight"], raw_features(), PATH[0])
    wanted = plain_logits(tensors, tensors["lm_head.weight"], rows, PATH, kind)
    assert relative_error(path_logits(model, raw_features(), PATH), wanted) <= 1e-5
    plain = plain_logits(tensors, tensors["lm_head.weight"], rows, PATH)
    assert relative_error(plain, wanted) > 0.1, "the sequential part says little here"
    assert len(path_logits(model, raw_features(), [*PATH, 3, 4])) == BLOCK + 1


def test_speculators_put_the_layers_in_an_object_and_cut_the_vocabulary(tmp_path: Path) -> None:
    tensors = dspark_tensors()
    ids = torch.tensor(DRAFT_IDS)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][ids]
    layer = {name: value for name, value in DEEPSPEC_FIELDS.items() if name not in ("mask_token_id", "markov_rank")}
    fields = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": BLOCK,
        "mask_token_id": DEEPSPEC_FIELDS["mask_token_id"],
        "markov_rank": DEEPSPEC_FIELDS["markov_rank"],
        "aux_hidden_state_layer_ids": [0, 2],
        "draft_vocab_size": len(DRAFT_IDS),
        "transformer_layer_config": layer,
    }
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    save_head(tmp_path / "head", fields, tensors)
    model = load("DSPARK", speculative_draft_model_path=str(tmp_path / "head"))
    assert model.feature_layers == (0, 2)
    rows = plain_block(tensors, tensors["embed_tokens.weight"], raw_features(), PATH[0])
    wanted = plain_logits(tensors, tensors["lm_head.weight"], rows, PATH, "vanilla")
    assert relative_error(path_logits(model, raw_features(), PATH), wanted) <= 1e-5
    # A token map keeps what is in both, of both matrices.
    kept = DRAFT_IDS[3:9]
    (tmp_path / "map.json").write_text(str([*kept, 1]))
    cut = load(
        "DSPARK",
        speculative_draft_model_path=str(tmp_path / "head"),
        speculative_token_map=str(tmp_path / "map.json"),
    )
    assert cut.target_ids is not None and cut.target_ids.tolist() == kept
    assert relative_error(path_logits(cut, raw_features(), PATH), wanted[:, 3:9]) <= 1e-5


@pytest.mark.parametrize(
    ("algorithm", "changes", "names"),
    [
        ("DFLASH", {}, "DSPARK"),
        ("DSPARK", {"block_size": 1}, "block_size"),
        ("DSPARK", {"block_size": 1000}, "block_size"),
        ("DSPARK", {"mask_token_id": VOCAB}, "mask_token_id"),
        ("DSPARK", {"mask_token_id": None}, "mask_token_id"),
        ("DSPARK", {"target_layer_ids": []}, "target_layer_ids"),
        ("DSPARK", {"markov_head_type": "lstm"}, "markov_head_type"),
        ("DSPARK", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, algorithm: str, changes: dict[str, Any], names: str) -> None:
    save_head(tmp_path, DEEPSPEC_FIELDS | changes, dspark_tensors())
    with pytest.raises(ConfigError, match=names):
        load(algorithm, speculative_draft_model_path=str(tmp_path))


def test_a_quantized_head_is_refused_by_the_tensor_that_is(tmp_path: Path) -> None:
    name = "layers.0.mlp.up_proj.weight_scale"
    save_head(tmp_path, DEEPSPEC_FIELDS, dspark_tensors() | {name: torch.ones(1)})
    with pytest.raises(ConfigError, match=f"{name} is quantized"):
        load("DSPARK", speculative_draft_model_path=str(tmp_path))


def test_windows_are_the_options_or_the_layers_own(tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 6}
    save_head(tmp_path, DEEPSPEC_FIELDS | sliding, dspark_tensors())
    model = load("DSPARK", speculative_draft_model_path=str(tmp_path))
    assert isinstance(model, BlockHead) and model.block.window == 6 and model.window == (6, 16)
    options: dict[str, Any] = {"speculative_draft_window_size": 40, "speculative_draft_sink_size": 20}
    model = load("DSPARK", speculative_draft_model_path=str(tmp_path), **options)
    assert isinstance(model, BlockHead) and model.block.window == 6 and model.window == (40, 20)
    save_head(tmp_path, DEEPSPEC_FIELDS | {"draft_window_size": 512}, dspark_tensors())
    assert load("DSPARK", speculative_draft_model_path=str(tmp_path)).window == (512, 16)
