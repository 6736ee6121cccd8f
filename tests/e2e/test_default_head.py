"""What a new user gets, under load: the head that ships for the default model, drafting beside n-grams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from client import COPY_PROMPT, chat, stream

from outrider.cli.cluster import Cluster
from outrider.v1 import common_pb2

pytestmark = pytest.mark.xdist_group("cluster")


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
