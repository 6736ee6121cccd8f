from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.errors import ConfigError
from outrider.models.store import given_folder
from outrider.models.store_folder import (
    Manifest,
    check_model_folder,
    count_tokens,
    matches_manifest,
    tensor_shapes,
    write_manifest,
)


def make_folder(path: Path, *, without: str = "") -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name != without:
            (path / name).write_text("{}")
    return path


def make_index(path: Path, *shards: str) -> None:
    weight_map = {f"weight.{number}": shard for number, shard in enumerate(shards)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_complete_folder_passes(tmp_path: Path) -> None:
    check_model_folder(make_folder(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_model_folder(make_folder(tmp_path, without=name))


def test_what_this_user_may_not_read_is_told_from_what_is_missing(
    other_user: Callable[[], AbstractContextManager[None]],
) -> None:
    with tempfile.TemporaryDirectory() as name:  # which, unlike pytest's, another user can be let into
        folder = make_folder(Path(name))
        folder.chmod(0o755)
        (folder / "model.safetensors").chmod(0)
        with other_user(), pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read: Permission denied"):
            check_model_folder(folder)
        folder.chmod(0)
        with other_user(), pytest.raises(ConfigError, match=rf"^{folder}/model: Permission denied"):
            given_folder(f"{folder}/model")
        folder.chmod(0o700)


def test_an_empty_tokenizer_is_told_from_a_missing_one(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "tokenizer.json").write_text("")
    with pytest.raises(ConfigError, match=r"tokenizer.json is empty; save the tokenizer again"):
        check_model_folder(tmp_path)
    check_model_folder(tmp_path, needs_tokenizer=False)


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"model": {}, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}'],
    ids=["json", "model", "panic"],
)
def test_what_is_no_tokenizer_is_named_with_the_way_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/tokenizer\.json is not a tokenizer: .*; save it again with"):
        count_tokens(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt"])
def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (make_folder(tmp_path, without="model.safetensors") / name).touch()
    with pytest.raises(ConfigError, match=rf"{name}, a pickle file, which can run code"):
        check_model_folder(tmp_path)


def test_gguf_weights_are_refused(tmp_path: Path) -> None:
    (make_folder(tmp_path, without="model.safetensors") / "model.Q4_0.gguf").touch()
    with pytest.raises(ConfigError, match="GGUF files are not read"):
        check_model_folder(tmp_path)


def test_a_folder_without_weights_is_told_the_ways_to_them(tmp_path: Path) -> None:
    make_folder(tmp_path, without="model.safetensors")
    with pytest.raises(ConfigError, match=r"has no weights: .* models pull .*outrider convert FOLDER") as caught:
        check_model_folder(tmp_path)
    assert "head" not in caught.value.message, "a target's folder is looked at, too"
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match="has no weights"):
        check_model_folder(tmp_path)
    (tmp_path / "model-1-of-2.safetensors").touch()
    with pytest.raises(
        ConfigError,
        match=r"has model-1-of-2\.safetensors, but no model\.safetensors\.index\.json.* name a file that has all",
    ):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_what_git_left_in_a_file_s_place_is_told(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path, without="model.safetensors" if "index" in name else "")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=rf"/{name} is a pointer of git LFS.*; run git lfs pull"):
        check_model_folder(tmp_path)


def test_a_file_whose_download_broke_off_is_told_with_the_way_out(tmp_path: Path) -> None:
    path = make_folder(tmp_path) / "model.safetensors"
    save_file({"weight": np.zeros(100, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read as safetensors: .*; .*fetch it again"):
        tensor_shapes(path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    make_folder(tmp_path, without="model.safetensors")  # trainers put the model's config.json beside it
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"holds an adapter .*; merge it into its model"):
            check_model_folder(tmp_path)
        (tmp_path / "config.json").unlink(missing_ok=True)
    (make_folder(tmp_path) / "model.safetensors").touch()
    check_model_folder(tmp_path)


def test_every_shard_must_be_there(tmp_path: Path) -> None:
    make_folder(tmp_path, without="model.safetensors")
    make_index(tmp_path, "model-1-of-2.safetensors", "model-2-of-2.safetensors")
    (tmp_path / "model-1-of-2.safetensors").touch()
    with pytest.raises(ConfigError, match=r"lacks 1 of its 2 shards, for example model-2-of-2\.safetensors"):
        check_model_folder(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").touch()
    check_model_folder(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "model.bin", ""])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, shard: str) -> None:
    make_folder(tmp_path, without="model.safetensors")
    make_index(tmp_path, shard)
    with pytest.raises(ConfigError, match="no safetensors file of the same folder"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (make_folder(tmp_path) / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_model_folder(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        check_model_folder(tmp_path / "nowhere")


def test_a_manifest_matches_only_itself_and_whole_files(tmp_path: Path) -> None:
    manifest: Manifest = {"source": "tiny-model==1.0", "sha256": "ab", "converter_version": 1}
    assert not matches_manifest(tmp_path, manifest)
    write_manifest(make_folder(tmp_path), manifest)
    assert matches_manifest(tmp_path, manifest)
    assert not matches_manifest(tmp_path, {**manifest, "converter_version": 2})
    assert not matches_manifest(tmp_path, {**manifest, "sha256": "cd"})
    (tmp_path / "model.safetensors").write_text("")
    assert not matches_manifest(tmp_path, manifest)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": 3}'])
def test_a_broken_manifest_matches_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "outrider.json").write_text(content)
    assert not matches_manifest(tmp_path, {"source": "tiny-model==1.0", "sha256": "ab", "converter_version": 1})
