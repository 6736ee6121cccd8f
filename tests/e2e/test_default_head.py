"""What a new user gets: the head that ships for the default model, drafting beside n-grams."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from client import COPY_PROMPT, chat, generate, stream

from outrider.cli.cluster import Cluster
from outrider.models.shipped import shipped_head
from outrider.v1 import common_pb2

pytestmark = pytest.mark.xdist_group("cluster")

QUESTION = "Explain in a few sentences why the sky is blue."


def grown(cluster: Cluster) -> dict[str, float]:
    """Nodes that the draft service has appended, by drafter."""
    page = urllib.request.urlopen(cluster.metrics_url("draft"), timeout=10).read().decode()
    name = 'outrider_draft_nodes_grown_total{source="'
    lines = [line.removeprefix(name).split('"} ') for line in page.splitlines() if line.startswith(name)]
    return {source: float(value) for source, value in lines}


async def test_head_and_n_grams_grow_one_tree_and_change_no_token(cluster: Cluster, model_path: Path) -> None:
    assert shipped_head(str(model_path)) is not None, "the default model's head is not in models/"
    plain = await generate(cluster, chat(QUESTION, speculate=False, max_tokens=24))
    drafted = await generate(cluster, chat(QUESTION, max_tokens=24))
    assert drafted.token_ids == plain.token_ids
    nodes = grown(cluster)
    assert {"eagle3", "ngram"} <= set(nodes) and nodes["eagle3"] > 0


class Load:
    """Clients that ask one question after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._changed = asyncio.Condition()
        self._num_accepted = self._num_answers = 0

    async def ask(self, client: int) -> None:
        number = 0
        while True:
            number += 1
            async for response in stream(self._cluster, chat(f"{client}.{number} {COPY_PROMPT}", max_tokens=30)):
                async with self._changed:
                    self._num_accepted += list(response.origins).count(common_pb2.TOKEN_ORIGIN_ACCEPTED)
                    self._num_answers += response.HasField("usage")
                    self._changed.notify_all()

    async def accepts(self) -> None:
        """Wait for a draft token that is accepted from now on."""
        before = self._num_accepted
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_accepted > before)

    async def answers(self, count: int) -> None:
        """Wait for so many answers from now on."""
        before = self._num_answers
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_answers >= before + count)


@asynccontextmanager
async def loaded(cluster: Cluster) -> AsyncIterator[Load]:
    load = Load(cluster)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(load.ask(client)) for client in range(4)]
        yield load
        for client in clients:
            client.cancel()


@pytest.mark.slow
async def test_a_draft_that_is_well_again_is_in_use_within_five_seconds_however_often_it_failed(
    cluster: Cluster,
) -> None:
    async with loaded(cluster) as load:
        await load.accepts()
        for _ in range(8):
            await asyncio.to_thread(cluster.draft.kill)
            await asyncio.to_thread(cluster.restart, "draft")
            async with asyncio.timeout(5):
                await load.accepts()
        for count in (2, 8):  # shorter and longer than the session lasts
            cluster.draft.pause()
            await load.answers(count)
            cluster.draft.resume()
            async with asyncio.timeout(5):
                await load.accepts()
