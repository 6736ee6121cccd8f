"""Free memory of a process, with and without a container's limit."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from outrider.models.capacity import cpu_tokens, free_memory

GIB = 2**30
FREE = 8 * GIB
_OTHERS = ("Buffers", "SReclaimable", "Shmem", "Active", "Inactive", "Slab")


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")


@pytest.fixture(autouse=True)
def eight_free(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Eight GiB available, of which seven hold pages of files."""
    folder = tmp_path_factory.mktemp("proc")
    fields = ("MemTotal", 16), ("MemFree", 1), ("MemAvailable", 8), ("Cached", 7), *((name, 0) for name in _OTHERS)
    (folder / "meminfo").write_text("".join(f"{name}: {size * GIB >> 10} kB\n" for name, size in fields))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(folder))


@pytest.mark.parametrize(
    ("most", "used", "files", "free"),
    [
        ("max", 3 * GIB, 0, FREE),
        (f"{2 * GIB}", GIB, 0, GIB),
        (f"{2 * GIB}", GIB, GIB // 2, 3 * GIB // 2),
        (f"{2 * GIB}", 3 * GIB, 0, 0),
        (f"{64 * GIB}", GIB, 0, FREE),
    ],
)
def test_a_limit_bounds_what_the_machine_has(most: str, used: int, files: int, free: int, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 4096\ninactive_file {files}\nactive_file 0\n")
    assert free_memory(tmp_path) == free


def test_so_does_that_of_older_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n")
    assert free_memory(tmp_path) == 3 * GIB // 2
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert free_memory(tmp_path) == FREE


def test_without_either_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == FREE


def test_the_kv_cache_on_a_cpu_takes_a_quarter_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.models.capacity.free_memory", lambda: GIB)
    assert cpu_tokens(2**15) == GIB // 4 // 2**15
