"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything loads torch: threads that spin while they wait would slow each other down on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before anything imports triton: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the default model, fetched and converted at its first use."""
    from outrider.models.store import resolve_model

    return resolve_model("SmolLM2-135M-Instruct")
