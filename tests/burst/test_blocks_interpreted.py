"""Trees of block heads by the GPU's Triton kernels, under the interpreter where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from growth_rig import GREEDY
from test_block_growth import test_a_tree_is_read_from_one_block_after_each_commit as grow_behind_commits
from test_round_blocks import test_trees_behind_rounds_are_read_from_one_block_of_true_features as grow_behind_rounds

from kernels.launch import triton_on_cpu

sys.path.append(str(Path(__file__).parent.parent / "kernels"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="on a GPU the tests that this runs run the kernels themselves"
    ),
]


def test_kernels_work_together_behind_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import interpreter  # noqa: F401  # loops to computed bounds

    with triton_on_cpu():
        grow_behind_commits(tmp_path, "rnn", GREEDY, "cuda", "auto", monkeypatch)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_kernels_work_together_behind_rounds(tmp_path: Path, kind: str) -> None:
    import interpreter  # noqa: F401  # loops to computed bounds

    with triton_on_cpu():
        grow_behind_rounds(tmp_path, kind, [2, 0, 3], 0.8)
