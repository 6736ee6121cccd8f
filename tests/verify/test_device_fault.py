"""A round that fails ends its requests with a clear status, and the service starts anew (on a CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_fault import TEST_SECONDS, check_device_fault
from tiny_service import tiny_folder


@pytest.mark.timeout(TEST_SECONDS)
def test_a_failing_device_is_a_clear_status_and_a_new_start(tmp_path: Path) -> None:
    check_device_fault(tiny_folder(tmp_path / "tiny"), tmp_path, "cpu")
