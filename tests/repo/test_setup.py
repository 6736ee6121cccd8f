from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what set-up reads, and no environment."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/setup", *arguments]
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_a_fitting_python_the_message_says_what_to_do(checkout: Path) -> None:
    result = setup(checkout, PYTHON="/nowhere/python3.9")
    assert result.returncode == 1
    assert "no Python 3.11 to 3.14 found (looked for: /nowhere/python3.9)" in result.stderr
    assert "make demo PYTHON=" in result.stderr
    assert not (checkout / ".venv").exists()


def test_another_interpreter_than_that_of_the_environment_is_refused(checkout: Path) -> None:
    fake_venv(checkout, pip_exit=0)
    assert setup(checkout).returncode == 0
    assert setup(checkout, PYTHON=sys.executable).stdout == "", "it is the same"
    result = setup(checkout, PYTHON="/nope")
    assert result.returncode == 1 and "no Python 3.11 to 3.14 found (looked for: /nope)" in result.stderr
    other = checkout / "python"
    other.write_text('#!/bin/sh\ncase "$2" in *base_prefix*) echo "Python 3.12.1 in /opt";; esac\n')
    other.chmod(0o755)
    result = setup(checkout, PYTHON=str(other))
    assert result.returncode == 1 and result.stdout == ""
    assert f"PYTHON={other} is Python 3.12.1 in /opt, and .venv was made with Python 3." in result.stderr
    assert "make clean" in result.stderr


def test_an_unknown_profile_is_refused(checkout: Path) -> None:
    result = setup(checkout, "everything")
    assert result.returncode == 1 and "unknown profile 'everything'" in result.stderr


def test_pip_failing_leaves_no_stamp_so_that_the_next_run_tries_again(checkout: Path) -> None:
    fake_venv(checkout, pip_exit=1)
    assert setup(checkout).returncode != 0
    fake_venv(checkout, pip_exit=0)
    result = setup(checkout)
    assert result.returncode == 0 and "== ready" in result.stdout


def test_a_second_run_does_nothing_until_a_pin_changes(checkout: Path) -> None:
    fake_venv(checkout, pip_exit=0)
    assert "== ready" in setup(checkout, "dev").stdout
    assert setup(checkout, "dev").stdout == ""
    # What tests need holds all that running needs.
    assert setup(checkout).stdout == ""
    with (checkout / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    assert "== ready" in setup(checkout).stdout
    assert "== ready" in setup(checkout, "dev").stdout


def fake_venv(checkout: Path, pip_exit: int) -> None:
    """An environment whose pip only exits, and whose torch is the pinned one."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    pin = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n'
        f'  "-m pip --version") exit 0 ;;\n'
        f'  "-m pip "*) exit {pip_exit} ;;\n'
        f'  *version*torch*) echo "{pin.removeprefix("torch==")}+cpu" ;;\n'
        f'  *) exec {sys.executable} "$@" ;;\n'
        f"esac\n"
    )
    python.chmod(0o755)
