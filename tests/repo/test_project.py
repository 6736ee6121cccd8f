from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import outrider

ROOT = Path(__file__).resolve().parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TOOLS["project"]


def pins(name: str) -> dict[str, str]:
    """Normalised name of each pinned package to its version."""
    lines = [line.split(";")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = {}
    for line in lines:
        if line and not line.startswith(("#", "-r ")):
            assert re.fullmatch(r"[\w.-]+==[\w.!]+", line), f"{name}: {line!r} is no exact pin"
            package, number = line.split("==")
            found[package.lower().replace("_", "-")] = number
    return found


@pytest.mark.parametrize(
    ("file", "requirements"),
    [
        ("requirements.txt", PROJECT["dependencies"]),
        ("requirements-dev.txt", PROJECT["optional-dependencies"]["dev"]),
        ("requirements-browser.txt", PROJECT["optional-dependencies"]["browser"]),
        ("requirements-transformers.txt", PROJECT["optional-dependencies"]["transformers"]),
    ],
)
def test_every_dependency_is_pinned_within_its_range(file: str, requirements: list[str]) -> None:
    pinned = pins(file)
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_the_changelog_knows_of_what_is_to_come() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", outrider.__version__)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "import torch; torch.load('x')",
        "from torch import load; load('x', weights_only=True)",
        "eval('1')",
        "exec('1')",
        "__import__('pickle')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "AutoModel.from_pretrained('x', trust_remote_code=flag)",
        "import os; os.system('ls')",
    ],
)
def test_forbidden_calls_are_found(line: str, tmp_path: Path) -> None:
    assert forbidden(tmp_path, line)


@pytest.mark.parametrize(
    "line",
    ["'no pickle, no eval()'", "model.eval()", "f(trust_remote_code=False)", "subprocess.run(['ls'], shell=False)"],
)
def test_harmless_lines_pass(line: str, tmp_path: Path) -> None:
    assert not forbidden(tmp_path, line)


def test_the_converter_alone_may_load_weights() -> None:
    folders = [*TOOLS["tool"]["mypy"]["packages"], "scripts", "benchmarks"]
    sources = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    lines = [(path, line) for path in sources for line in path.read_text().splitlines()]
    ((path, line),) = [(path, line) for path, line in lines if re.search(r"noqa.*(TID251|\bS\d)|noqa(?!:)", line)]
    assert path == ROOT / "outrider_tools" / "convert.py" and "torch.load(" in line and "weights_only=True" in line


def forbidden(folder: Path, line: str) -> bool:
    """Whether `scripts/check` refuses a line, by ruff or by a look at the text."""
    file = folder / "sample.py"
    file.write_text(line + "\n")
    ruff = [sys.executable, "-m", "ruff", "check", f"--config={ROOT / 'pyproject.toml'}", "--no-cache", str(file)]
    output = subprocess.run(ruff, capture_output=True, text=True, check=False).stdout
    look = subprocess.run([ROOT / "scripts" / "forbidden", str(file)], capture_output=True, check=False)
    return bool(re.search(r"^(TID251|S\d+) ", output, re.MULTILINE)) or look.returncode != 0


def test_the_fast_tests_are_files_that_there_are() -> None:
    fast = re.search(r"^FAST := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert fast is not None
    words = re.sub(
        r"\$\(addprefix (\S+),(.*?)\)",
        lambda match: " ".join(match[1] + name for name in match[2].split()),
        fast[1].replace("\\\n", ""),
    )
    assert words and all((ROOT / name).exists() for name in words.split()), words
