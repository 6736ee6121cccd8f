"""The GPU's runner with its Triton kernels, under the interpreter where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from burst_host import Host
from test_runner import make_runner, prompt

from kernels.launch import triton_on_cpu
from outrider.models.drafters.base import DraftModel
from outrider.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).parent.parent / "kernels"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels on the GPU"),
]


def test_kernels_work_together(model: DraftModel) -> None:
    import interpreter  # noqa: F401  # loops to computed bounds

    host = Host(make_runner("cuda", model), model)
    with triton_on_cpu():
        request = host.open(0, prompt(9))
        host.open(2, prompt(14, 1), SamplingParams(temperature=0.8, seed=5))
        host.step(3, 6)
        deepest = max(request.nodes.values(), key=lambda node: len(node.tokens))
        host.commit(0, [*deepest.tokens[9:], 4])
        host.step(3, 6)
    assert host.num_checked == 40


def test_kernels_go_on_past_a_commit(model: DraftModel) -> None:
    import interpreter  # noqa: F401  # loops to computed bounds

    host = Host(make_runner("cuda", model), model)
    with triton_on_cpu():
        request = host.open(0, prompt(9))
        host.open(2, prompt(14, 1), SamplingParams(temperature=0.8, seed=5))
        host.step(2, 4, floor=-20.0)
        known = [node for node in request.nodes.values() if node.parent is request.root]
        chosen = max(known, key=lambda node: node.score)
        ready, first, second = host.past_commit(0, [chosen.tokens[-1]], (1, 2), 8, floor=-20.0)
    assert len(first) == 8 and {node.tokens for node in second[:8]} == {node.tokens for node in ready[:8]}
