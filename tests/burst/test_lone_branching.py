"""Bursts of one request, which have candidates of their own number; the GPU's with the kernels' references here."""

from __future__ import annotations

import pytest
from burst_host import Host
from test_runner import make_runner, prompt

from outrider.models.drafters.base import DraftModel


@pytest.mark.parametrize("kind", ["torch", "cuda"])
def test_a_lone_request_has_more_candidates(kind: str, model: DraftModel) -> None:
    host = Host(make_runner(kind, model, branching=2, lone_branching=5), model)
    host.open(2, prompt(11))

    def candidates(rows: list[int]) -> set[int]:
        burst, seeds = host.burst(3, 8, rows=rows)
        result = host.runner.launch(burst).wait()
        host.merge(burst, seeds, result)
        assert (result.tokens[result.picked >= 0] >= 0).all()
        return {len(node) for step in result.tokens for node in step}

    assert candidates([2]) == {5}
    host.open(0, prompt(9, 1))
    assert candidates([0, 2]) == {2}
    host.commit(2, [node.tokens[-1] for node in host.requests[2].nodes.values() if len(node.tokens) == 12][:1])
    # Others' candidates lie where this burst's are to lie.
    assert candidates([2]) == {5}
    assert candidates([0, 2]) == {2}
    assert host.num_checked > 30


def test_a_lone_burst_finds_what_it_would_if_all_had_as_many_candidates(plain_model: DraftModel) -> None:
    found = []
    for branching, lone_branching in ((6, 0), (1, 6)):
        changes = {"max_steps": 8, "branching": branching, "lone_branching": lone_branching}
        host = Host(make_runner("cuda", plain_model, **changes), plain_model)
        host.open(0, prompt(7))
        host.step(4, 8, floor=-20.0)
        request = host.requests[0]
        known = [node for node in request.nodes.values() if node.parent is request.root]
        chosen = max(known, key=lambda node: node.score)
        parts = host.past_commit(0, list(chosen.tokens[7:]), (3, 5), 8, floor=-20.0)
        found.append([[(node.tokens, node.slot) for node in part] for part in parts])
    assert found[0] == found[1] and all(map(len, found[0]))
