"""Object code that is kept is what was compiled, or it is compiled again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cpu_products import KINDS, made

import kernels
from kernels import cpu
from kernels.cpu import products, rows, stack
from kernels.cpu.isa import Isa, best_isa, needed_isa
from kernels.cpu.layout import StackShape

objects = pytest.importorskip("kernels.cpu.objects", exc_type=ImportError)  # where there is no LLVM nothing is compiled
kept_object = objects.kept_object

pytestmark = pytest.mark.skipif(best_isa() is None, reason="needs a CPU that functions are compiled for")
OBJECT = b"object"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    return tmp_path


def fail() -> bytes:
    pytest.fail("compiled again")


def set_sources(monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    monkeypatch.setattr(objects, "sources", lambda: digest)
    monkeypatch.setattr(objects, "SOURCES", digest)


def test_what_was_compiled_once_is_read_again(home: Path) -> None:
    assert kept_object(Isa.AVX2, "name", lambda: OBJECT) == OBJECT
    assert kept_object(Isa.AVX2, "name", fail) == OBJECT
    (file,) = (home / "code").iterdir()
    assert file.stat().st_mode & 0o077 == 0, "whoever could write it could have it run"


def test_another_name_instruction_set_or_version_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_object(Isa.AVX2, "name", lambda: b"0") == b"0"
    assert kept_object(Isa.AVX2, "other", lambda: b"1") == b"1"
    assert kept_object(Isa.AVX512, "name", lambda: b"2") == b"2"
    set_sources(monkeypatch, "newer")
    assert kept_object(Isa.AVX2, "name", lambda: b"3") == b"3"


def test_what_may_be_compiled_from_sources_of_two_releases_is_not_kept(home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "release" / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    lines = [
        "import os",
        "from kernels.cpu import isa, rows",
        "rows.row_function(isa.needed_isa(), 'norm')",
        f"print(os.listdir({str(home / 'code')!r}))",
        # A service imports this long before it compiles: a model may have to be fetched between.
        f"open({str(copy / 'cpu' / 'layout.py')!r}, 'a').write('# newer')",
        "rows.row_function(isa.needed_isa(), 'top_k')",
    ]
    env = {**os.environ, "PYTHONPATH": str(copy.parent)}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=copy.parent, env=env, check=True, capture_output=True, text=True)
    (kept,) = (home / "code").iterdir()
    assert done.stdout == f"{[kept.name]}\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0), bit=st.integers(0, 7), length=st.none() | st.integers(0))
def test_a_file_that_is_not_as_it_was_written_is_written_again(
    home: Path, place: int, bit: int, length: int | None
) -> None:
    kept_object(Isa.AVX2, "name", lambda: OBJECT)
    (file,) = (home / "code").iterdir()
    whole = file.read_bytes()
    harmed = bytearray(whole if length is None else whole[: length % len(whole)])
    if length is None:
        harmed[place % len(whole)] ^= 1 << bit
    file.write_bytes(harmed)
    assert kept_object(Isa.AVX2, "name", lambda: OBJECT) == OBJECT
    assert file.read_bytes() == whole


@pytest.mark.parametrize("change", ["another's", "anybody can write it", "kept for another name"])
def test_a_file_that_another_user_may_have_put_there_is_not_run(change: str, home: Path) -> None:
    kept_object(Isa.AVX2, "name", lambda: OBJECT)
    (file,) = (home / "code").iterdir()
    if change == "another's":
        if os.geteuid() != 0:
            pytest.skip("needs the right to give files away")
        os.chown(file, 65534, 65534)
    elif change == "anybody can write it":
        file.chmod(0o666)
    else:
        kept_object(Isa.AVX2, "other", lambda: b"other")
        (other,) = set((home / "code").iterdir()) - {file}
        other.replace(file)
    assert kept_object(Isa.AVX2, "name", lambda: b"own") == b"own"
    assert kept_object(Isa.AVX2, "name", fail) == b"own"


def test_sources_that_cannot_be_read_keep_nothing_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".#code.py").symlink_to("user@host.1234")  # as editors lock a file
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "__init__.py"))
    assert cpu.sources() == ""


@pytest.mark.parametrize("obstacle", ["a file", "no home", "no sources"])
def test_where_nothing_can_be_kept_it_is_compiled(
    obstacle: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("no home directory")

    if obstacle == "a file":
        (home / "code").write_text("")
    elif obstacle == "no home":
        monkeypatch.delenv("OUTRIDER_HOME")
        monkeypatch.setattr(Path, "expanduser", homeless)
    else:
        set_sources(monkeypatch, "")
    counts = [kept_object(Isa.AVX2, "name", lambda number=number: bytes([number])) for number in range(2)]
    assert counts == [b"\0", b"\1"]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (obstacle == "a file") and all(str(home / "code") in one for one in warnings)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
def test_kept_code_computes_the_same_bits(kind: str, home: Path) -> None:
    weight, _ = made(kind, 64, 128)
    numbers = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, kept = [], []
    for _ in range(2):
        rows.row_function.cache_clear()
        products._compiled.cache_clear()
        normed = rows.rms_norm(numbers, torch.ones(128), 1e-5)
        found.append((normed, products.tile_product(normed, weight)))
        kept.append({path.name: path.stat().st_mtime_ns for path in (home / "code").iterdir()})
    assert kept[0] == kept[1] and len(kept[0]) >= 2
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_layers_call_the_products_that_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu import code

    isa, shape = needed_isa(), StackShape(64, 2, 2, 64, 96, 1e-5, 0.2, kind="half")
    code.compiled(isa, products.part_of(isa, "half"))
    monkeypatch.setattr(products, "products_module", lambda *_: pytest.fail("compiled again"))
    stack._compiled.__wrapped__(isa, shape, 1)
    assert len([*(home / "code").iterdir()]) == 2
