"""Cores of a process, with and without a container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.models.capacity import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("6400000 100000", 8),
        ("", 8),
    ],
)
def test_a_quota_bounds_what_the_kernel_allows(text: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_so_does_that_of_older_kernels(quota: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, value in (("quota", quota), ("period", "100000")):
        (tmp_path / "cpu" / f"cpu.cfs_{name}_us").write_text(value)
    assert usable_cores(tmp_path) == cores


def test_without_either_it_is_what_the_kernel_allows(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
