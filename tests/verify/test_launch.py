"""How an engine process begins: what it imports is never looked at by the collector, what it makes later is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULE = """
import gc, sys

collecting_at_import = gc.isenabled()

def main(argv):
    made = gc.get_freeze_count() > 0 and not any(one is sys.modules[__name__].__dict__ for one in gc.get_objects())
    print(collecting_at_import, gc.isenabled(), made, argv)
    return 3
"""


def launch(folder: Path, body: str, *arguments: str, parent: int | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "engine_of_a_test.py").write_text(body)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "outrider.host.launch", str(parent or os.getpid()), "engine_of_a_test", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


def test_what_an_engine_imports_is_frozen_and_collection_goes_on(tmp_path: Path) -> None:
    ended = launch(tmp_path, MODULE, "5", "6")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("False True True ['5', '6']\n", "", 3)


def test_an_engine_that_cannot_be_imported_ends_with_1_and_says_why(tmp_path: Path) -> None:
    ended = launch(tmp_path, "import no_such_module")
    assert ended.returncode == 1 and "no_such_module" in ended.stderr.splitlines()[-1]


def test_an_engine_whose_parent_is_gone_is_never_imported(tmp_path: Path) -> None:
    ended = launch(tmp_path, "print('imported')", parent=os.getppid())
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 1)
