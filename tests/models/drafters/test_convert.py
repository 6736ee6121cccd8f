"""Pickled heads and token maps become safe files, or are refused."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load, run_chain
from safetensors.torch import load_file
from tiny_heads import EAGLE3_FIELDS, HIDDEN, eagle3_tensors, save_head
from tiny_models import token_ids

from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.models.drafters.loader import read_token_map
from outrider_tools.convert import convert


def save_bin(folder: Path, content: Any, name: str = "pytorch_model.bin") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(EAGLE3_FIELDS))
    torch.save(content, folder / name)
    return folder / name


def test_a_converted_head_is_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = eagle3_tensors()
    save_bin(tmp_path / "bin", tensors)
    (tmp_path / "bin" / "tokenizer.json").write_text("{}")
    assert main(["convert", str(tmp_path / "bin"), str(tmp_path / "out")]) == 0
    assert "16 tensors" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    found = load_file(tmp_path / "out" / "model.safetensors")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # whoever may read the one may read the other
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    save_head(tmp_path / "safe", EAGLE3_FIELDS, tensors)
    ids, raw = token_ids(5), torch.randn(5, 3 * HIDDEN)
    logits = []
    for name in ("out", "safe"):
        model = load("EAGLE3", speculative_draft_model_path=str(tmp_path / name))
        logits.append(run_chain(model, ids, model.project(raw), 2)[0])
    assert torch.equal(*logits)
    assert main(["convert", str(tmp_path / "bin"), str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


def test_sharded_wrapped_and_shared_tensors(tmp_path: Path) -> None:
    save_bin(tmp_path / "a", {"x": torch.ones(2, 3)}, "one.bin")
    save_bin(tmp_path / "a", {"state_dict": {"y": torch.arange(3)}}, "two.bin")
    index = {"weight_map": {"x": "one.bin", "y": "two.bin"}}
    (tmp_path / "a" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert(tmp_path / "a", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["y"].tolist() == [0, 1, 2]
    assert not (tmp_path / "out" / "pytorch_model.bin.index.json").exists()
    whole = torch.arange(6.0).view(2, 3)
    save_bin(tmp_path / "b", {"whole": whole, "turned": whole.t(), "part": whole[1]})
    convert(tmp_path / "b", tmp_path / "out-b")
    found = load_file(tmp_path / "out-b" / "model.safetensors")
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]] and found["part"].tolist() == [3, 4, 5]


@pytest.mark.parametrize("ids", [[5, 2, 9], torch.tensor([5, 2, 9]), torch.tensor([5, 2, 9], dtype=torch.int32)])
def test_a_token_map_becomes_json(ids: Any, tmp_path: Path) -> None:
    torch.save(ids, tmp_path / "freq.pt")
    with pytest.raises(ConfigError, match=r"ends in \.json"):
        convert(tmp_path / "freq.pt", tmp_path / "freq.safetensors")
    assert convert(tmp_path / "freq.pt", tmp_path / "freq.json").endswith("3 token ids")
    assert json.loads((tmp_path / "freq.json").read_text()) == [5, 2, 9]
    assert read_token_map(tmp_path / "freq.json", 10).tolist() == [2, 5, 9]


@pytest.mark.parametrize("ids", [[], [1, -1], [1.5], ["a"], [True], torch.ones(2), torch.ones(2, 2).int(), {"a": 1}])
def test_what_is_no_token_map_is_refused(ids: Any, tmp_path: Path) -> None:
    torch.save(ids, tmp_path / "freq.pt")
    with pytest.raises(ConfigError, match="must be a list of token ids"):
        convert(tmp_path / "freq.pt", tmp_path / "freq.json")
    assert [path.name for path in tmp_path.iterdir()] == ["freq.pt"]


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_code_in_a_file_never_runs(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", {"x": torch.ones(1), "y": Touch(tmp_path / "touched")})
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: holds more than tensors"):
        convert(tmp_path / "bin", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def test_tensors_that_repeat_a_few_bytes_are_refused(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", {"x": torch.ones(1).expand(1 << 40)})
    with pytest.raises(ConfigError, match="tensor x is larger than what the file holds"):
        convert(tmp_path / "bin", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([torch.ones(1)], "must hold named tensors, and holds list"),
        ({}, "must hold named tensors"),
        ({"a": 3}, "'a' is int"),
        ({1: torch.ones(1)}, "1 is Tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "only plain tensors"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "only plain tensors"),
    ],
)
def test_what_holds_no_weights_is_refused(content: Any, problem: str, tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", content)
    with pytest.raises(ConfigError, match=problem):
        convert(tmp_path / "bin", tmp_path / "out")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    path = save_bin(tmp_path / "bin", {"a": torch.ones(100)})
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(ConfigError, match="compressed entries"):
        convert(tmp_path / "bin", tmp_path / "out")
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ConfigError, match="zip format"):
        convert(tmp_path / "bin", tmp_path / "out")
    path.unlink()
    with pytest.raises(ConfigError, match="nothing to convert"):
        convert(tmp_path / "bin", tmp_path / "out")
    for name in ("a.bin", "b.bin"):
        save_bin(tmp_path / "bin", {"a": torch.ones(1)}, name)
    with pytest.raises(ConfigError, match="2 files of weights"):
        convert(tmp_path / "bin", tmp_path / "out")
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../a.bin"}}')
    with pytest.raises(ConfigError, match="files beside it"):
        convert(tmp_path / "bin", tmp_path / "out")
