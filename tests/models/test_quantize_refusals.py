"""What `outrider quantize` says no to, before it computes for long."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import save_tiny

from outrider.errors import ConfigError
from outrider_tools import quantize as module
from outrider_tools.quantize import quantize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_tiny(folder, hidden_size=64, intermediate_size=160, head_dim=16)
    return folder


def make(source: Path, out: Path, calibration: str = "none") -> int:
    return quantize(source, out, "int4", 32, torch.device("cpu"), 1 << 30, lambda *_: None, calibration)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b" \n", "holds no text"),
        (b"words", "no tokenizer.json to read it with"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(source: Path, tmp_path: Path, content: bytes | None, words: str) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--calibration {text}: .*{words}"):
        make(source, tmp_path / "out", str(text))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_told_before_the_model_reads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "calibration_moments", None)
    with pytest.raises(ConfigError, match=f"--out {tmp_path}: exists"):
        make(source, tmp_path, "own")


def test_the_disk_needs_room_for_what_is_written_and_not_for_the_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = make(source, tmp_path / "measured")
    assert size < 0.8 * (source / "model.safetensors").stat().st_size
    for share, fits in ((1.0, True), (0.5, False)):
        free = SimpleNamespace(free=size * share)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: free)
        if fits:
            make(source, tmp_path / "out")
        else:
            with pytest.raises(ConfigError, match="MB are free there"):
                make(source, tmp_path / "none")


def test_experts_that_share_a_tensor_are_refused(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    save_tiny(tmp_path / "gpt-oss", "GptOss", hidden_size=64, head_dim=16, **sizes)
    with pytest.raises(ConfigError, match=r"experts\.\w+_proj holds all experts"):
        make(tmp_path / "gpt-oss", tmp_path / "out")
    assert not (tmp_path / "out").exists()
