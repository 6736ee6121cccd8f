from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "outrider" / "v1"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    subprocess.run([ROOT / "scripts" / "gen_stubs", folder], env={**os.environ, "PYTHON": sys.executable}, check=True)
    return folder / "outrider" / "v1"


def test_the_committed_stubs_are_what_the_protos_give(fresh: Path) -> None:
    expected = {path.name: path.read_text() for path in fresh.iterdir()}
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2*.py*")}
    assert committed.keys() == expected.keys()
    for name, text in expected.items():
        assert committed[name] == text, f"outrider/v1/{name} is outdated; run: make stubs"
