"""A runner whose burst is given committed tokens that nobody guessed as it goes on."""

from __future__ import annotations

import pytest
from burst_host import Host, Request
from test_runner import make_runner, prompt

from outrider.models.drafters.base import DraftModel
from outrider.sampling.params import SamplingParams


@pytest.mark.parametrize("count", [1, 2])
def test_a_burst_that_goes_on_past_a_miss_runs_what_was_committed(model: DraftModel, count: int) -> None:
    """Nothing of the old tree, the committed tokens first, and below the last of them; other requests go on."""
    host = Host(make_runner("cuda", model, max_steps=8, max_seeds=96), model)
    for row in range(2):
        host.open(row, prompt(7 + row, row), SamplingParams(temperature=0.4 * row, seed=row))
    host.step(2, 8, floor=-20.0)
    for again in range(2):
        request = host.requests[0]
        missed = [next(one for one in range(97) if one not in known_tokens(request)), 5 + again][:count]
        second = host.past_miss(0, missed, (1, 3), 8)
        own = [node for node in second if node.row == 0]
        path = tuple(request.tokens)
        assert [node.tokens for node in own[:count]] == [path[: len(path) - count + 1 + n] for n in range(count)]
        assert len(own) > count and all(node.tokens[: len(path)] == path for node in own[count:])
        assert any(node.row == 1 for node in second)
    checked = host.num_checked
    host.step(2, 8)
    assert host.num_checked > checked


def known_tokens(request: Request) -> set[int]:
    nodes = (*request.nodes.values(), *request.waiting)
    return {node.tokens[-1] for node in nodes if node.parent is request.root}
