"""A gRPC client of the gateway, as short as a test wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from outrider.cli.cluster import Cluster
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

COPY_PROMPT = "Repeat this list three times:\n- red apples\n- brown eggs\n- rye bread\n- fresh milk\n- honey\n- salt"


@dataclass
class Answer:
    """What one stream gave."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    usage: common_pb2.Usage | None = None

    def take(self, response: gateway_pb2.GatewayServiceGenerateResponse) -> None:
        self.token_ids += response.token_ids
        self.origins += response.origins
        self.text += response.text
        self.finish_reason = response.finish_reason or self.finish_reason
        if response.HasField("usage"):
            self.usage = response.usage


def chat(
    text: str, *, speculate: bool = True, max_tokens: int = 40, **sampling: float
) -> gateway_pb2.GatewayServiceGenerateRequest:
    """One user turn; greedy unless told."""
    return gateway_pb2.GatewayServiceGenerateRequest(
        chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content=text)]),
        sampling=common_pb2.SamplingParams(**({"temperature": 0.0} | sampling)),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        ignore_eos=True,
        speculation=gateway_pb2.SPECULATION_ON if speculate else gateway_pb2.SPECULATION_OFF,
    )


async def stream(
    cluster: Cluster, request: gateway_pb2.GatewayServiceGenerateRequest
) -> AsyncIterator[gateway_pb2.GatewayServiceGenerateResponse]:
    """The messages of one call."""
    channel = open_channel(cluster.gateway_address)
    try:
        async for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
            yield response
    finally:
        await channel.close()


async def generate(cluster: Cluster, request: gateway_pb2.GatewayServiceGenerateRequest) -> Answer:
    """The whole answer of one call."""
    answer = Answer()
    async for response in stream(cluster, request):
        answer.take(response)
    return answer
