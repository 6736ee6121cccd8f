"""Kernels compile for a GPU. All in one process, which imports the compiler once, where Triton is no interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.compiling import LAYER_KERNELS

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
KERNELS = {
    "compile_blocks": {
        "_find_roots",
        "_keep_blocks",
        "_lay_out_blocks",
        "_read_inputs",
        "_read_logits",
        "_recur",
        "_rope_write",
    },
    "compile_exchange": {"_join_columns", "_sum_rows"},
    "compile_experts": {"_align", "_choose", "_combine", "_expert_linear", "_gate_mul"},
    "compile_fp8_linear": {"_join", "_split"},
    "compile_frontier": {"_add", "_append", "_begin", "_choose", "_place", "_reroot"},
    # By these names the division of L1 is asked for.
    "compile_layers": set(LAYER_KERNELS),
    "compile_ring_gemm": {"_ring_gemm"},
    "compile_round_trees": {"_export_nodes", "_lay_out_committed", "_merge_trees", "_plant_roots", "_reopen_pool"},
}
"""Modules that launch kernels, and which."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[str]]:
    """The kernels that each module's launches have compiled; the compiler's message for a module that it refuses."""
    words = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # What the assembler refuses it refuses whatever it would make of the rest.
    words["DISABLE_PTXAS_OPT"] = "1"
    words["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER)])
    command = [sys.executable, FOLDER / "compile_only.py", *KERNELS]
    done = subprocess.run(command, env=words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(330)
@pytest.mark.parametrize("module", KERNELS)
def test_every_kernel_compiles(module: str, compiled: dict[str, list[str]]) -> None:
    assert compiled[module] == sorted(KERNELS[module])
