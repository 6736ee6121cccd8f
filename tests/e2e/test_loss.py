"""A part dies or stops in mid-stream: no token is lost, repeated or changed, and speculation comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import grpc
import openai
import pytest
from client import COPY_PROMPT, Answer, chat, generate, stream

from outrider.cli.cluster import Cluster

pytestmark = pytest.mark.xdist_group("cluster")

MAX_TOKENS = 28


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
    got = await disturbed(cluster, 10, cluster.draft.kill)
    assert got.token_ids == plain.token_ids and got.text == plain.text
    without = await generate(cluster, chat(COPY_PROMPT, max_tokens=MAX_TOKENS))
    assert without.token_ids == plain.token_ids
    cluster.restart("draft")
    assert await accepts_again(cluster)


async def test_a_stopped_draft_costs_no_token_and_speculation_resumes(cluster: Cluster, plain: Answer) -> None:
    try:
        got = await disturbed(cluster, 10, cluster.draft.pause)
        assert got.token_ids == plain.token_ids
        after = await generate(cluster, chat(COPY_PROMPT, max_tokens=MAX_TOKENS))
        assert after.token_ids == plain.token_ids
    finally:
        cluster.draft.resume()
    assert await accepts_again(cluster)


async def test_a_draft_killed_and_restarted_within_one_stream_costs_no_token(cluster: Cluster, plain: Answer) -> None:
    got = await disturbed(cluster, 10, lambda: cluster.restart("draft"))
    assert got.token_ids == plain.token_ids


async def test_a_killed_verify_service_is_a_clear_error_and_the_gateway_recovers(cluster: Cluster) -> None:
    plain = await generate(cluster, chat(COPY_PROMPT, max_tokens=20))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await disturbed(cluster, 10, cluster.verify.kill)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    messages = [{"role": "user", "content": COPY_PROMPT}]
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none", max_retries=0) as client:
        ask = partial(client.chat.completions.create, model="smollm2", messages=messages, temperature=0, max_tokens=20)
        with pytest.raises(openai.InternalServerError) as refused:
            ask()
        assert refused.value.status_code == 503 and "retry-after" in refused.value.response.headers
        cluster.restart("verify")
        client.max_retries = 10  # it obeys Retry-After
        assert ask().choices[0].message.content == plain.text
