"""A file that cannot be read or written is named once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.chat_template import read_config
from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.models.fields import read_json
from outrider_tools.bench.requests import read_prompts
from outrider_tools.files import check_writable, whole_output


def _write(path: Path) -> None:
    with whole_output(path / "out", f"--out {path / 'out'}"):
        pass


@pytest.mark.parametrize(
    "touch",
    [read_config, read_json, lambda path: read_prompts(path, 9), _write],
    ids=["tokenizer", "config", "prompts", "output"],
)
def test_a_path_that_is_at_fault_is_told_once(touch: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "folder.json"
    path.mkdir()
    if touch is _write:
        path.rmdir()
        path.write_text("a file")
    with pytest.raises(ConfigError) as caught:
        touch(path)
    assert caught.value.message.count(str(path)) == 1, caught.value.message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --out=out --model=nosuch", "--model: there is no model 'nosuch'"),
        ("train --out=", "--out: '.' names no folder of the drafter's own"),
        ("inflate --shape=llama-8b --out=out --model=nosuch", "--model: there is no model 'nosuch'"),
        ("quantize --format=int4 --out=out --model=nosuch", "--model: there is no model 'nosuch'"),
    ],
)
def test_what_a_tool_cannot_find_is_told_with_its_option(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert f"outrider: error: {message}" in capsys.readouterr().err


def test_a_look_at_an_output_leaves_a_link_to_a_file_to_come(tmp_path: Path) -> None:
    link = tmp_path / "out.json"
    link.symlink_to("report.json")
    check_writable("--out", link)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"] and link.is_symlink()


def test_a_hub_cache_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "outrider.cli", "models", "list"]
    # With OUTRIDER_HOME empty the cache is the hub library's own.
    env = {**os.environ, "OUTRIDER_HOME": "", "HF_HUB_CACHE": str(tmp_path / "file")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "error: HF_HUB_CACHE: the hub's cache cannot be read" in line


@pytest.mark.parametrize("command", ["up --ephemeral", "plan", "models list", "models pull", "doctor --skip-models"])
@pytest.mark.parametrize(
    ("home", "problem"),
    [
        ("", "this user has no home"),
        ("~nobody-of-this-name/m", "~nobody-of-this-name/m names a home that does not exist"),
    ],
)
def test_a_user_without_a_home_is_told_the_way_out(
    command: str, home: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", home)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as of a number that a container was told to run as
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"OUTRIDER_HOME: {problem}; set it to the whole path of a folder")


@pytest.mark.parametrize("command", ["up --ephemeral", "plan"])
def test_a_home_that_this_user_may_not_look_into_is_one_line(command: str, tmp_path: Path) -> None:
    # `su` and `sudo` leave the HOME of whoever calls them. Root may look everywhere, and other users perhaps not into
    # the folders of its code: that is imported before.
    program = """
import encodings.idna, os, sys, outrider.cli.up, outrider_tools.cli.plan
from outrider.cli.main import main
if os.geteuid() == 0:
    os.seteuid(65534)
sys.exit(main(sys.argv[1:]))
"""
    home = tmp_path / "home"
    home.mkdir(mode=0)
    env = {**os.environ, "HOME": str(home), "OUTRIDER_HOME": ""}
    run = [sys.executable, "-c", program, *command.split()]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and str(home) in line and "Permission denied" in line
