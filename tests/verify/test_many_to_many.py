"""Several drafts, several verify replicas, and drafts that come and go while streams run: real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from service_process import wait_until
from tiny_service import Reply, generate_all, metric, tiny_folder, tiny_options

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions

PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [30, 31], [50, 4, 50, 4]]
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def start_draft(stack: ExitStack, **options: object) -> Cluster:
    # Alone it is told of no target, and AUTO would take the head of the default one.
    given = DraftOptions(**{"speculative_algorithm": ("NGRAM",)} | options)  # type: ignore[arg-type]
    return stack.enter_context(Cluster(draft=given, services=("draft",)))


def start_verify(stack: ExitStack, folder: Path, *drafts: str) -> Cluster:
    return stack.enter_context(Cluster(verify=tiny_options(folder, draft=drafts), services=("verify", "gateway")))


def ask(cluster: Cluster, speculate: bool = True) -> list[Reply]:
    return asyncio.run(generate_all(cluster, PROMPTS, MAX_TOKENS, speculate))


def connected(cluster: Cluster) -> float:
    return metric(cluster.metrics_url("verify"), "outrider_verify_drafts_connected")


def check(replies: list[Reply], truth: list[Reply]) -> None:
    for reply, expected in zip(replies, truth, strict=True):
        assert reply.code is grpc.StatusCode.OK, reply.details
        assert reply.token_ids == expected.token_ids


def test_one_draft_serves_two_verify_replicas(stack: ExitStack, folder: Path) -> None:
    draft = start_draft(stack)
    replicas = [start_verify(stack, folder, draft.draft_address) for _ in range(2)]
    wait_until(lambda: metric(draft.metrics_url("draft"), "outrider_draft_sessions") == 2)
    truth = ask(replicas[0], speculate=False)

    async def both() -> list[list[Reply]]:
        return list(await asyncio.gather(*(generate_all(replica, PROMPTS, MAX_TOKENS) for replica in replicas)))

    for replies in asyncio.run(both()):
        check(replies, truth)
        assert sum(reply.num_accepted for reply in replies) > 0
    wait_until(lambda: metric(draft.metrics_url("draft"), "outrider_draft_open_requests") == 0)
    replicas[0].verify.kill()
    replies = ask(replicas[1])
    check(replies, truth)
    assert sum(reply.num_accepted for reply in replies) > 0, "one replica's end is nothing to the other"


def test_a_verify_survives_the_loss_of_one_of_its_drafts(stack: ExitStack, folder: Path) -> None:
    drafts = [start_draft(stack) for _ in range(2)]
    verify = start_verify(stack, folder, *(draft.draft_address for draft in drafts))
    wait_until(lambda: all(metric(draft.metrics_url("draft"), "outrider_draft_sessions") == 1 for draft in drafts))
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
    stack: ExitStack, folder: Path, tmp_path: Path, drain_seconds: float
) -> None:
    old = start_draft(stack, drain_seconds=drain_seconds)
    address = f"unix:{tmp_path}/new.sock"
    verify = start_verify(stack, folder, old.draft_address, address)
    wait_until(lambda: metric(old.metrics_url("draft"), "outrider_draft_sessions") == 1)
    truth = ask(verify, speculate=False)
    new: list[Cluster] = []

    async def streams() -> list[Reply]:
        """Streams over the whole change, each prompt again and again until the new draft has had its share."""
        replies: list[Reply] = []
        for turn in range(200):
            replies += await generate_all(verify, PROMPTS, MAX_TOKENS)
            if turn == 0:
                new.append(
                    await asyncio.to_thread(
                        start_draft, stack, address=address, match_type="BFS", max_match_window_size=6
                    )
                )
                await asyncio.to_thread(
                    wait_until, lambda: metric(new[0].metrics_url("draft"), "outrider_draft_sessions") == 1
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
