"""A part dies or stops in mid-stream: no token is lost, repeated or changed, and speculation comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from client import COPY_PROMPT, Answer, chat, generate, stream

from outrider.cli.cluster import Cluster

pytestmark = pytest.mark.xdist_group("cluster")

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Answer:
    """What decoding without drafts gives."""
    return asyncio.run(generate(cluster, chat(COPY_PROMPT, speculate=False, max_tokens=MAX_TOKENS)))


async def disturbed(cluster: Cluster, after: int, disturb: Callable[[], None]) -> Answer:
    """An answer with something happening once `after` tokens have come."""
    answer, done = Answer(), False
    async for response in stream(cluster, chat(COPY_PROMPT, max_tokens=MAX_TOKENS)):
        answer.take(response)
        if not done and len(answer.token_ids) >= after:
            disturb()
            done = True
    assert done
    return answer


async def accepts_again(cluster: Cluster) -> bool:
    for attempt in range(40):
        answer = await generate(cluster, chat(f"{attempt}. {COPY_PROMPT}", max_tokens=30))
        if answer.usage is not None and answer.usage.num_accepted_tokens:
            return True
    return False


async def test_a_killed_draft_costs_no_token_and_speculation_resumes(cluster: Cluster, plain: Answer) -> None:
    got = await disturbed(cluster, 6, cluster.draft.kill)
    assert got.token_ids == plain.token_ids and got.text == plain.text
    without = await generate(cluster, chat(COPY_PROMPT, max_tokens=MAX_TOKENS))
    assert without.token_ids == plain.token_ids
    back = await disturbed(cluster, 6, partial(cluster.restart, "draft"))
    assert back.token_ids == plain.token_ids
    assert await accepts_again(cluster)


async def test_a_stopped_draft_costs_no_token_and_speculation_resumes(cluster: Cluster, plain: Answer) -> None:
    try:
        got = await disturbed(cluster, 6, cluster.draft.pause)
        assert got.token_ids == plain.token_ids
        after = await generate(cluster, chat(COPY_PROMPT, max_tokens=MAX_TOKENS))
        assert after.token_ids == plain.token_ids
    finally:
        cluster.draft.resume()
    assert await accepts_again(cluster)
