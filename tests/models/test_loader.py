"""Weights are checked by name and shape, then loaded with visible progress."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import relative_error, run_one, save_tiny, token_ids
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models import weights
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace tensors of the single weight file; None removes one."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, ["model.layers.1.mlp.up_proj.weight", "missing"]),
        ({"model.extra.weight": torch.zeros(2)}, ["unexpected", "model.extra.weight"]),
        ({"model.layers.3.mlp.up_proj.weight": torch.zeros(48, 32)}, ["unexpected", "model.layers.3"]),
        ({"model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 32)}, ["k_proj.weight", "[8, 32]", "[16, 32]"]),
        ({"model.norm.weight": torch.zeros(32, 1)}, ["model.norm.weight", "[32, 1]"]),
    ],
)
def test_wrong_tensor_is_named(changes: dict[str, Tensor | None], words: list[str], tmp_path: Path) -> None:
    save_tiny(tmp_path)
    rewrite(tmp_path, changes)
    with pytest.raises(ConfigError) as raised:
        load_model(tmp_path)
    for word in words:
        assert word in raised.value.message


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    rewrite(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load_model(tmp_path)


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, {"lm_head.weight": reference.model.embed_tokens.weight.detach().clone()})
    model, ids = load_model(tmp_path), token_ids(8)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(run_one(model, model.new_kv(8), ids, torch.arange(8)), expected) <= 1e-5


@pytest.mark.parametrize("shape", [(97, 32), (101, 32)])
def test_a_tied_checkpoint_with_a_head_of_its_own_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, {"lm_head.weight": torch.randn(shape)})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is true .* lm_head\.weight is another matrix"):
        load_model(tmp_path)


def test_a_tied_checkpoint_whose_head_differs_in_its_last_row_is_refused(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tie_word_embeddings=True, vocab_size=300)
    head = reference.model.embed_tokens.weight.detach().clone()
    head[-1] += 1.0
    rewrite(tmp_path, {"lm_head.weight": head})
    with pytest.raises(ConfigError, match=r"lm_head\.weight is another matrix"):
        load_model(tmp_path)


def test_a_tied_checkpoint_may_have_its_one_matrix_under_the_heads_name(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, ids = load_model(tmp_path), token_ids(8)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(run_one(model, model.new_kv(8), ids, torch.arange(8)), expected) <= 1e-5


def test_a_missing_head_is_told_with_what_would_tie_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight missing from .*; .* tie_word_embeddings is true"):
        load_model(tmp_path)


def _write_shards(folder: Path, files: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str]) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_one_file_counts_beside_an_index(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _write_shards(tmp_path, {}, {"lm_head.weight": "model-00001-of-00001.safetensors"})
    load_model(tmp_path)


@pytest.mark.parametrize("whole", ["a.safetensors", "c.safetensors"])
def test_a_tensor_in_two_shards_is_the_one_that_the_index_names(tmp_path: Path, whole: str) -> None:
    reference = save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    name = "model.norm.weight"
    # Files are read in the order of their names.
    other = {name: tensors[name] + 1.0, "lm_head.weight": tensors.pop("lm_head.weight")}
    weight_map = dict.fromkeys(tensors, whole) | {"lm_head.weight": "b.safetensors"}
    _write_shards(tmp_path, {whole: tensors, "b.safetensors": other}, weight_map)
    model, ids = load_model(tmp_path), token_ids(8)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(run_one(model, model.new_kv(8), ids, torch.arange(8)), expected) <= 1e-5


def test_an_index_that_names_another_shard_harms_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    weight_map = dict.fromkeys(tensors, "b.safetensors") | {"lm_head.weight": "a.safetensors"}
    _write_shards(tmp_path, {"a.safetensors": tensors, "b.safetensors": head}, weight_map)
    load_model(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_weights_are_refused(keep: int, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", 3])
def test_index_cannot_reach_outside_its_folder(name: str | int, tmp_path: Path) -> None:
    save_tiny(tmp_path / "inside")
    save_tiny(tmp_path)
    (tmp_path / "inside" / "model.safetensors").unlink()
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="no safetensors file of the same folder"):
        load_model(tmp_path / "inside")


def test_each_file_is_opened_once_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, max_shard_size="20KB")
    opened: list[Path] = []
    shards: list[weakref.ref[Any]] = []

    class Shard:
        def __init__(self, path: Path, **options: Any) -> None:
            opened.append(path)
            shards.append(weakref.ref(self))
            self._shard = safe_open(path, **options)
            self.get_tensor = self._shard.get_tensor

    monkeypatch.setattr(weights, "safe_open", Shard)
    model = load_model(tmp_path)
    assert sorted(opened) == sorted(tmp_path.glob("*.safetensors")) and len(opened) > 2
    assert isinstance(model, CausalLM) and not any(shard() for shard in shards), "it is kept with the model"


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    save_tiny(tmp_path, max_shard_size="20KB")
    calls: list[tuple[int, int]] = []
    load_model(tmp_path, progress=lambda done, total: calls.append((done, total)))
    shards = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    assert {total for _, total in calls} == {size}
    done = [done for done, _ in calls]
    assert done == sorted(done) and done[-1] == size and len(done) > 20
