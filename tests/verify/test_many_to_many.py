"""Several drafts, several verify replicas, and drafts that come and go while streams run: real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import grpc
import openai
import pytest
from service_process import wait_until
from tiny_service import Reply, generate_all, metric, tiny_folder, tiny_options

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions

PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [30, 31], [50, 4, 50, 4]]
MAX_TOKENS = 120


@dataclass
class Replicas:
    """Two verify replicas with gateways of their own, which dial the same addresses of drafts."""

    clusters: list[Cluster]
    drafts: list[str]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    drafts = [f"unix:{folder}/draft{number}.sock" for number in range(2)]
    options = tiny_options(folder, draft=tuple(drafts))
    with ExitStack() as opened:
        clusters = [Cluster(verify=options, services=("verify", "gateway")) for _ in range(2)]
        yield Replicas([opened.enter_context(cluster) for cluster in clusters], drafts)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def start_draft(stack: ExitStack, address: str, **options: object) -> Cluster:
    # Alone it is told of no target, and AUTO would take the head of the default one.
    given = DraftOptions(**{"speculative_algorithm": ("NGRAM",), "address": address} | options)  # type: ignore[arg-type]
    return stack.enter_context(Cluster(draft=given, services=("draft",)))


def ask(cluster: Cluster, speculate: bool = True) -> list[Reply]:
    return asyncio.run(generate_all(cluster, PROMPTS, MAX_TOKENS, speculate))


def connected(cluster: Cluster) -> float:
    return metric(cluster.metrics_url("verify"), "outrider_verify_drafts_connected")


def check(replies: list[Reply], truth: list[Reply]) -> None:
    for reply, expected in zip(replies, truth, strict=True):
        assert reply.code is grpc.StatusCode.OK, reply.details
        assert reply.token_ids == expected.token_ids


def test_a_verify_survives_the_loss_of_one_of_its_drafts(stack: ExitStack, replicas: Replicas) -> None:
    drafts = [start_draft(stack, address) for address in replicas.drafts]
    verify = replicas.clusters[1]
    wait_until(lambda: all(metric(draft.metrics_url("draft"), "outrider_draft_sessions") == 2 for draft in drafts))
    truth = ask(verify, speculate=False)
    check(ask(verify), truth)
    for draft in drafts:
        assert metric(draft.metrics_url("draft"), "outrider_draft_commits_total") > 0, "both have a share"
    killed: list[int] = []

    def kill(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(count)
            drafts[0].draft.kill()

    replies = asyncio.run(generate_all(verify, PROMPTS, MAX_TOKENS, on_token=kill))
    assert killed
    check(replies, truth)
    before = metric(drafts[1].metrics_url("draft"), "outrider_draft_commits_total")
    replies = ask(verify)
    check(replies, truth)
    assert sum(reply.num_accepted for reply in replies) > 0
    # A draft's figures reach its page a little later.
    wait_until(lambda: metric(drafts[1].metrics_url("draft"), "outrider_draft_commits_total") > before)


@pytest.mark.parametrize("drain_seconds", [pytest.param(0.0, marks=pytest.mark.slow), 20.0])
def test_a_draft_is_replaced_by_one_with_another_drafter_while_streams_run(
    stack: ExitStack, replicas: Replicas, drain_seconds: float
) -> None:
    old = start_draft(stack, replicas.drafts[0], drain_seconds=drain_seconds)
    address, verify = replicas.drafts[1], replicas.clusters[1]
    wait_until(lambda: metric(old.metrics_url("draft"), "outrider_draft_sessions") == 2)
    truth = ask(verify, speculate=False)
    new: list[Cluster] = []

    async def streams() -> list[Reply]:
        """Streams over the whole change, each prompt again and again until the new draft has had its share."""
        replies: list[Reply] = []
        for turn in range(200):
            replies += await generate_all(verify, PROMPTS, MAX_TOKENS)
            if turn == 0:
                new.append(
                    await asyncio.to_thread(start_draft, stack, address, match_type="BFS", max_match_window_size=6)
                )
                await asyncio.to_thread(
                    wait_until, lambda: metric(new[0].metrics_url("draft"), "outrider_draft_sessions") == 2
                )
                old.draft.terminate()
            if turn > 1 and not old.draft.running and replies[-1].num_accepted:
                break
        return replies

    replies = asyncio.run(streams())
    for start in range(0, len(replies), len(PROMPTS)):
        check(replies[start : start + len(PROMPTS)], truth)
    assert not old.draft.running and old.draft.poll() == 0
    assert metric(new[0].metrics_url("draft"), "outrider_draft_commits_total") > 0


def test_one_draft_serves_two_verify_replicas_and_a_killed_one_is_a_clear_error_until_it_is_back(
    stack: ExitStack, replicas: Replicas
) -> None:
    draft = start_draft(stack, replicas.drafts[0])
    wait_until(lambda: metric(draft.metrics_url("draft"), "outrider_draft_sessions") == 2)
    truth = ask(replicas.clusters[0], speculate=False)

    async def both() -> list[list[Reply]]:
        return list(
            await asyncio.gather(*(generate_all(replica, PROMPTS, MAX_TOKENS) for replica in replicas.clusters))
        )

    for replies in asyncio.run(both()):
        check(replies, truth)
        assert sum(reply.num_accepted for reply in replies) > 0
    wait_until(lambda: metric(draft.metrics_url("draft"), "outrider_draft_open_requests") == 0)
    killed, other = replicas.clusters
    # Four run at a time: on a busy machine some may be whole before the kill takes effect, never all of them.
    calls = generate_all(killed, 8 * PROMPTS, 240, False, lambda count: killed.verify.kill())
    replies = asyncio.run(calls)
    cut = [reply for reply in replies if reply.code is not grpc.StatusCode.OK]
    assert any(reply.token_ids for reply in cut), "the kill came while streams ran"
    for reply in cut:
        assert reply.code is grpc.StatusCode.UNAVAILABLE and len(reply.token_ids) < 240, reply
    assert all(len(reply.token_ids) == 240 for reply in replies if reply.code is grpc.StatusCode.OK)
    with openai.OpenAI(base_url=f"{killed.rest_url}/v1", api_key="none", max_retries=0) as client:
        complete = partial(client.completions.create, model="tiny", prompt=PROMPTS[0], max_tokens=20, temperature=0)
        with pytest.raises(openai.InternalServerError) as refused:
            complete()
        assert refused.value.status_code == 503 and "retry-after" in refused.value.response.headers
        replies = ask(other)
        check(replies, truth)
        assert sum(reply.num_accepted for reply in replies) > 0, "one replica's end is nothing to the other"
        killed.restart("verify")
        client.max_retries = 10  # it obeys Retry-After
        again = complete(extra_body={"ignore_eos": True})
    assert again.choices[0].text == " ".join(f"word{token}" for token in truth[0].token_ids[:20])
