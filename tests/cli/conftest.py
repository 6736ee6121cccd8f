"""Real services on a tiny model, for the tools that look at them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.models.store import DEFAULT_MODEL

sys.path.append(str(Path(__file__).parent.parent / "verify"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder; 61 words are its vocabulary."""
    from tiny_service import tiny_folder  # takes seconds to import

    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def live(tiny_model: Path) -> Iterator[Cluster]:
    """Gateway, verify and draft."""
    from tiny_service import tiny_options

    draft = DraftOptions(speculative_algorithm=("NGRAM",))
    with Cluster(verify=tiny_options(tiny_model, max_running_requests=8), draft=draft) as running:
        yield running


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the head that ships."""
    folder = tmp_path / "heads" / f"{DEFAULT_MODEL}-EAGLE3"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    monkeypatch.setenv("OUTRIDER_HEADS", str(folder.parent))
    return folder
