"""Steps of a lone request behind a short context are a shape of their own; the GPU's with the kernels' references."""

from __future__ import annotations

from dataclasses import replace

import pytest
from burst_host import Host
from test_runner import make_runner, prompt

from outrider.drafting.model.burst import SHORT_WIDTH, StepBucket, StepBuckets
from outrider.models.drafters.base import DraftModel

SHORT = 12


def test_who_gets_such_steps(model: DraftModel) -> None:
    shape = replace(make_runner("cuda", model).shape, num_rows=4, max_width=128, branching=2, lone_branching=5)
    buckets = StepBuckets(shape, SHORT)
    assert buckets.fit(8, 1, SHORT) == StepBucket(8, 1, 5, True) > buckets.fit(8, 1, SHORT + 1) == StepBucket(8, 1, 5)
    assert not buckets.fit(8, 1).short and not buckets.fit(8, 2, 1).short
    assert buckets.fit(SHORT_WIDTH, 1, 1).short and not buckets.fit(SHORT_WIDTH + 1, 1, 1).short
    assert (
        {bucket for bucket in buckets.all() if not bucket.short}
        == set(StepBuckets(shape).all())
        == set(buckets.sizes())
    )
    assert [bucket.width for bucket in buckets.all() if bucket.short] == [64, 32, 16, 8]
    assert not any(bucket.short for bucket in [*StepBuckets(shape).all(), StepBuckets(shape).fit(8, 1, 0)])


def test_they_find_what_the_model_finds(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a request outgrows them, or a second one joins."""
    monkeypatch.setattr("outrider.drafting.model.runner.short_context", lambda model: SHORT)
    host = Host(make_runner("cuda", model, branching=2), model)
    host.open(0, prompt(SHORT))
    seen = []
    for turn in range(6):
        if turn == 4:
            host.open(1, prompt(3))
        burst, seeds = host.burst(3, 8, floor=-20.0)
        pending = host.runner.launch(burst)
        host.merge(burst, seeds, pending.wait())
        seen.append(pending.bucket.short)
        request = host.requests[0]
        known = [node for node in request.nodes.values() if node.parent is request.root]
        host.commit(0, list(max(known, key=lambda node: node.score).tokens[len(request.tokens) :]))
    assert seen[0] and not seen[3] and not any(seen[4:]), seen
    assert host.num_checked > 30
