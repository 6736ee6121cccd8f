"""What a script compiles for a GPU, in a process of its own, where Triton is no interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent


def compiled_by(script: str) -> list[str]:
    """Names of the kernels, sorted. Fails with the last of what the compiler says if it does not take one."""
    words = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words["PYTHONPATH"] = os.pathsep.join([str(_FOLDER.parents[1]), str(_FOLDER)])
    told = subprocess.run([sys.executable, _FOLDER / script], env=words, capture_output=True, text=True, timeout=200)
    assert told.returncode == 0, told.stderr[-3000:]
    return told.stdout.split()
