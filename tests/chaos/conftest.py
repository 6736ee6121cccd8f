"""The worlds of benchmarks/chaos on a tiny model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "verify"))

from tiny_service import tiny_folder, tiny_options  # noqa: E402

from benchmarks.chaos.load import KnownAnswer, Request, answered_plainly  # noqa: E402
from benchmarks.chaos.worlds import Setup, World, open_world  # noqa: E402
from outrider.config.draft import DraftOptions  # noqa: E402
from outrider.config.gateway import GatewayOptions  # noqa: E402
from outrider.v1 import common_pb2, gateway_pb2  # noqa: E402

VOCAB = 61
MAX_TOKENS = 60


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    verify = tiny_options(folder, disable_radix_cache=True, max_running_requests=8)
    return Setup(verify, DraftOptions(), GatewayOptions(), VOCAB)


@pytest.fixture(scope="session")
def known() -> list[KnownAnswer]:
    """Questions with their answers, once a world has been asked."""
    return []


class Worlds:
    """One world at a time: it stays open until another kind is asked for."""

    def __init__(self, setup: Setup, known: list[KnownAnswer]) -> None:
        self._setup = setup
        self._known = known
        self._kind = ""
        self._stack = AsyncExitStack()

    async def open(self, kind: str) -> World:
        if kind != self._kind:
            await self.close()
            self._kind = kind
            self._world = await self._stack.enter_async_context(open_world(kind, self._setup))
            if not self._known:
                self._known += await answered_plainly(self._world.cluster.gateway_address, asked())
        return self._world

    async def close(self) -> None:
        if self._kind:
            self._kind = ""
            await self._stack.aclose()
            endings = self._world.cluster.close()
            assert set(endings.values()) == {"ended"}, "a service did not end by itself"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worlds(setup: Setup, known: list[KnownAnswer]) -> AsyncIterator[Worlds]:
    opened = Worlds(setup, known)
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return await worlds.open(request.param)


def asked() -> list[KnownAnswer]:
    """Greedy and sampled requests; answers of this model soon repeat themselves, so that drafts find something."""
    made = []
    for number in range(8):
        sampling = common_pb2.SamplingParams(temperature=0.0)
        if number % 2:
            sampling = common_pb2.SamplingParams(temperature=0.4, seed=number)
        prompt = gateway_pb2.TokenIds(ids=[number + 1, 2 * number + 3, 40 - number])
        request = Request(prompt_token_ids=prompt, sampling=sampling, max_tokens=MAX_TOKENS, ignore_eos=True)
        made.append(KnownAnswer(request))
    return made
