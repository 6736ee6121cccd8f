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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
        "torch.load('x')",
        "torch.load('x', weights_only=True)",
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=flag)",
        "os.system('ls')",
    ],
)
def test_forbidden_calls_are_found(line: str, tmp_path: Path) -> None:
    assert forbidden(tmp_path, line).returncode == 1


@pytest.mark.parametrize(
    "line",
    ["'no pickle, no eval()'", "model.eval()", "f(trust_remote_code=False)", "subprocess.run(['ls'], shell=False)"],
)
def test_harmless_lines_pass(line: str, tmp_path: Path) -> None:
    assert forbidden(tmp_path, line).returncode == 0


@pytest.mark.parametrize(
    ("line", "code"), [("torch.load('x', weights_only=True)", 0), ("torch.load('x', weights_only=flag)", 1)]
)
def test_the_converter_alone_may_load_weights(line: str, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "outrider_tools"
    folder.mkdir(parents=True)
    assert forbidden(folder, line, "convert.py").returncode == code


def forbidden(folder: Path, line: str, name: str = "sample.py") -> subprocess.CompletedProcess[str]:
    file = folder / name
    file.write_text(line + "\n")
    command = [sys.executable, str(ROOT / "scripts" / "forbidden"), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_fast_tests_are_files_that_there_are() -> None:
    fast = re.search(r"^FAST := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert fast is not None
    words = re.sub(
        r"\$\(addprefix (\S+),(.*?)\)",
        lambda match: " ".join(match[1] + name for name in match[2].split()),
        fast[1].replace("\\\n", ""),
    )
    assert words and all((ROOT / name).exists() for name in words.split()), words
