from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.core.replica import Replica, ReplicaState
from gateway.core.router import Router
from outrider.errors import UnavailableError


async def make(num_replicas: int) -> Router:
    replicas = [
        Replica(f"127.0.0.1:{50100 + i}", auth_token="", probe_seconds=1, max_message_bytes=1 << 20)
        for i in range(num_replicas)
    ]
    for replica in replicas:
        replica.state = ReplicaState.READY

    async def accept(*_: Any) -> None:
        return None

    return Router(replicas, affinity_tokens=8, accept=accept)


async def test_equal_beginnings_meet_the_same_replica_and_different_ones_spread() -> None:
    router = await make(4)
    generator = random.Random(0)
    chosen = set()
    for _ in range(50):
        beginning = [generator.randrange(1000) for _ in range(8)]
        picks = {router.choose([*beginning, i]) for i in range(5)}
        assert len(picks) == 1
        chosen |= picks
    assert chosen == set(router.replicas)
    await router.close()


async def test_when_a_replica_goes_only_its_prompts_move() -> None:
    router = await make(4)
    prompts = [[i] * 8 for i in range(100)]
    before = {i: router.choose(prompt) for i, prompt in enumerate(prompts)}
    lost = router.replicas[0]
    lost.state = ReplicaState.CONNECTING
    for i, prompt in enumerate(prompts):
        after = router.choose(prompt)
        assert after is before[i] or before[i] is lost
    await router.close()


async def test_a_busy_favourite_gives_way_to_the_idlest() -> None:
    router = await make(2)
    favourite = router.choose([1, 2, 3])
    other = next(r for r in router.replicas if r is not favourite)
    favourite.num_answers = 4
    assert router.choose([1, 2, 3]) is favourite
    favourite.num_answers = 5
    assert router.choose([1, 2, 3]) is other
    assert router.choose([1, 2, 3], avoid=(other,)) is favourite
    for replica in router.replicas:
        replica.state = ReplicaState.CONNECTING
    with pytest.raises(UnavailableError):
        router.choose([1, 2, 3])
    await router.close()
