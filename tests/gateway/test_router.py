from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from names_shown import Names

from gateway.core.router import Replica, ReplicaState, Router
from outrider.errors import UnavailableError
from outrider.protocol.generation import FinishReason, GenerationRequest, GenerationUpdate
from outrider.protocol.generation_codec import UPDATE
from outrider.rpc.peers import PeerAddresses
from outrider.sampling.params import SamplingParams


def connect(address: str) -> Replica:
    replica = Replica(address, auth_token="", probe_seconds=1, max_message_bytes=1 << 20)
    replica.state = ReplicaState.READY
    return replica


async def accept(*_: Any) -> None:
    return None


async def make(num_replicas: int) -> Router:
    addresses = PeerAddresses([f"127.0.0.1:{50100 + i}" for i in range(num_replicas)], "--verify", seconds=1)
    return Router(addresses, connect, affinity_tokens=8, accept=accept)


async def test_a_call_that_fails_while_the_replica_is_probed_has_it_probed_again(tmp_path: Path) -> None:
    probed, may_answer, again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def get_info(request: bytes, context: Any) -> bytes:
        (again if probed.is_set() else probed).set()
        await may_answer.wait()
        return b""

    async def generate(request: bytes, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is restarting")
        yield b""

    server = grpc.aio.server()
    handlers = {
        "GetInfo": grpc.unary_unary_rpc_method_handler(get_info),
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.VerifyService", handlers),))
    address = f"unix:{tmp_path}/verify"
    server.add_insecure_port(address)
    await server.start()
    replica = Replica(address, auth_token="", probe_seconds=3600, max_message_bytes=1 << 20)
    following = asyncio.create_task(replica.follow(accept))
    try:
        async with asyncio.timeout(20):
            await probed.wait()
            with pytest.raises(UnavailableError):
                await anext(replica.generate(GenerationRequest("request", [1], SamplingParams(), max_tokens=1)))
            may_answer.set()
            await again.wait()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await replica.close()
        await server.stop(0)


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
    favourite.calls = set(range(4))
    assert router.choose([1, 2, 3]) is favourite
    favourite.calls = set(range(5))
    assert router.choose([1, 2, 3]) is other
    assert router.choose([1, 2, 3], avoid=(other,)) is favourite
    for replica in router.replicas:
        replica.state = ReplicaState.CONNECTING
    with pytest.raises(UnavailableError):
        router.choose([1, 2, 3])
    await router.close()


async def test_a_client_is_not_told_where_a_replica_is_that_cannot_be_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = connect(f"unix:{tmp_path}/verify.sock")
    caplog.set_level("INFO", "gateway.core.router")
    with pytest.raises(UnavailableError) as caught:
        async for _ in replica.generate(GenerationRequest("r", [1], SamplingParams(), 1)):
            pass
    assert caught.value.message == "the verify service cannot be reached"
    assert f"{tmp_path}/verify.sock error: No such file" in caplog.text
    await replica.close()


async def test_replicas_follow_a_name_and_one_that_leaves_it_finishes_its_answers(tmp_path: Path) -> None:
    ends = asyncio.Event()

    async def generate(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await ends.wait()
        return UPDATE.encode(GenerationUpdate(token_ids=[7], finish_reason=FinishReason.LENGTH)).SerializeToString()

    server = grpc.aio.server()
    handlers: Any = {"Generate": grpc.unary_unary_rpc_method_handler(generate)}
    service = grpc.method_handlers_generic_handler("outrider.v1.VerifyService", handlers)
    server.add_generic_rpc_handlers((service,))
    here = f"unix:{tmp_path}/v"
    server.add_insecure_port(here)
    await server.start()
    names = Names([here, "127.0.0.1:2"], ["127.0.0.1:2", "127.0.0.1:3"])
    addresses = names.of(["dns:///verify:1"], "--verify")
    router = Router(addresses, connect, affinity_tokens=8, accept=accept)
    assert not router.ready
    router.start()
    await names.next()
    stays, leaves = sorted(router.replicas, key=lambda replica: replica.address)
    answer = asyncio.ensure_future(anext(leaves.generate(GenerationRequest("r", [1], SamplingParams(), 1))))
    await asyncio.sleep(0)
    await names.next()
    assert [replica.address for replica in router.replicas] == ["127.0.0.1:2", "127.0.0.1:3"]
    assert router.replicas[0] is stays, "what has not changed is left alone"
    ends.set()
    assert (await answer).token_ids == [7]
    await router.close()
    await server.stop(0)
