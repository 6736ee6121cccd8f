"""Tiny draft models, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "models"))
# An engine behind its sockets is described with the draft service.
sys.path.append(str(Path(__file__).parent.parent / "draft"))

from tiny_drafts import FeatureDraft, chain_draft

from outrider.models.drafters.base import DraftModel
from outrider.models.loader import load_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import save_tiny  # takes seconds to import

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, head_dim=16)
    return folder


@pytest.fixture(scope="session")
def plain_model(tiny_folder: Path) -> DraftModel:
    return chain_draft(load_model(tiny_folder))


@pytest.fixture(scope="session")
def feature_model(tiny_folder: Path) -> DraftModel:
    return FeatureDraft(load_model(tiny_folder))


@pytest.fixture(params=["plain", "features"])
def model(request: pytest.FixtureRequest) -> DraftModel:
    """Either kind."""
    found: DraftModel = request.getfixturevalue("plain_model" if request.param == "plain" else "feature_model")
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
