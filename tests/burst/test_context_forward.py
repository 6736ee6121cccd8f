"""Forwards of context tokens on a GPU, whose shapes are padded to those that were captured."""

from __future__ import annotations

import pytest
import torch
from burst_host import Host
from test_runner import make_runner, prompt

from outrider.attention.paged import PromptShape
from outrider.drafting.model import cuda_forward
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.models.drafters.base import DraftModel


@pytest.fixture
def padded(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Host, list[PromptShape]]:
    """A runner whose forwards are as captured ones, run kernel by kernel; and their shapes."""
    monkeypatch.setattr(cuda_forward, "_CONTEXT_TOKENS", (2, 5, 32))
    monkeypatch.setattr(cuda_forward, "_CONTEXT_ROWS", (1, 3))
    runner = make_runner("cuda", model)
    assert isinstance(runner, CudaRunner)
    forwards = runner._contexts
    forwards._captured = True
    shapes: list[PromptShape] = []
    run = forwards._graphs.run

    def noted(shape: PromptShape) -> None:
        shapes.append(shape)
        run(shape)

    monkeypatch.setattr(forwards._graphs, "run", noted)
    return Host(runner, model), shapes


def test_padding_changes_nothing(padded: tuple[Host, list[PromptShape]]) -> None:
    """Lengths on both sides of each size, one row and several, the second part behind what is cached of the first."""
    host, shapes = padded
    for row, length in enumerate((5, 12, 9)):
        host.open(row, prompt(length, row))
        assert row in {node.row for node in host.step(2, 8)}
    for row in range(3):
        host.close(row)
    host.open_all({0: prompt(11, 7), 2: prompt(4, 8), 3: prompt(6, 9)})
    host.step(3, 8)
    assert host.num_checked > 30
    assert {shape.tokens for shape in shapes} == {2, 5, 7} and {shape.rows for shape in shapes} == {1, 3}


def test_what_is_too_large_is_run_as_it_is(padded: tuple[Host, list[PromptShape]]) -> None:
    host, shapes = padded
    host.open_all({row: prompt(5, row) for row in range(4)})
    assert all(shape.rows == 1 for shape in shapes)
    host.step(2, 8)
    assert host.num_checked == 12


def test_captures_find_nothing_of_each_other(
    padded: tuple[Host, list[PromptShape]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes lay the same memory out in different ways: what is a slot to one is a token to another."""
    host, shapes = padded
    forwards = host.runner._contexts  # type: ignore[attr-defined]
    monkeypatch.setattr(
        forwards._graphs, "capture", lambda graphs, together: [forwards._graphs.run(one) for one in graphs]
    )
    host.open(0, prompt(9))
    kv = host.runner.memory.kv.k.clone()  # type: ignore[attr-defined]
    forwards.capture()
    assert len(set(shapes)) == 6 and torch.equal(host.runner.memory.kv.k, kv)  # type: ignore[attr-defined]
    host.step(2, 8)
    assert host.num_checked >= 4
