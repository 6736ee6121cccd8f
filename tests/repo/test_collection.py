"""Tests are found where packages are missing that not every platform has: one module that is not ends the whole run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("missing", ["llvmlite", "triton"])
def test_tests_of_kernels_are_collected_without_a_package(missing: str) -> None:
    tests = Path(__file__).parent.parent
    arguments = ["--collect-only", "-q", str(tests / "kernels"), str(tests / "gpu" / "test_exchange_gpu.py")]
    lines = f"import sys; sys.modules[{missing!r}] = None; import pytest; sys.exit(pytest.main({arguments!r}))"
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert found.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), found.stdout
