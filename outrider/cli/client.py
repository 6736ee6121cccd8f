"""The command line's client of the gateway's gRPC door: takes and returns dataclasses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from outrider.config.service import TlsFiles
from outrider.errors import OutriderError, UnavailableError
from outrider.protocol.generation import TokenOrigin, Usage
from outrider.protocol.generation_codec import ORIGINS, USAGE
from outrider.rpc.channel import open_channel
from outrider.rpc.status import details_of, error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

Message = tuple[str, str]
"""One message of a conversation: its role (system, user or assistant) and its content."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and how many; None means the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    speculation: bool = True


@dataclass(frozen=True)
class Chunk:
    """One message of the stream: some final text, and the tokens committed since the message before.

    `tokens` holds each token's origin and its length in bytes within the answer. The text may lag behind the tokens.
    """

    text: str
    tokens: Sequence[tuple[TokenOrigin, int]]
    usage: Usage | None = None


def open_gateway(address: str, api_key: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    """Open a channel to a gateway's gRPC door; needs a running event loop. `tls` comes from --connect-tls-*."""
    source = TlsSource(tls) if tls is not None else None
    return open_channel(address, auth_token=api_key, tls=source, option="--connect")


async def generate(channel: grpc.aio.Channel, messages: Sequence[Message], sampling: Sampling) -> AsyncIterator[Chunk]:
    """Stream one answer to a conversation. Closing the iterator cancels the call. Raises OutriderError."""
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    call = stub.Generate(encode(sampling, messages))
    try:
        async for response in call:
            yield _decode(response)
    except grpc.aio.AioRpcError as error:
        raise _to_error(error) from error
    finally:
        call.cancel()


async def list_models(channel: grpc.aio.Channel) -> list[tuple[str, int]]:
    """Return name and context length in tokens of each model that the gateway serves. Raises OutriderError."""
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    try:
        response = await stub.ListModels(gateway_pb2.GatewayServiceListModelsRequest())
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
            raise UnavailableError(
                "no gateway answers at this address; give the gRPC door's (`outrider up` prints it, 127.0.0.1:50051 by "
                f"default): {details_of(error)}"
            ) from error
        raise _to_error(error) from error
    return [(model.id, model.context_length) for model in response.models]


def _to_error(error: grpc.aio.AioRpcError) -> OutriderError:
    failure = error_from_rpc(error, "the gateway")
    if failure.code == "peer_refused_credentials":
        return OutriderError(f"{failure.message}; set OUTRIDER_API_KEY", code=failure.code)
    return failure


def valid_text(text: str) -> str:
    """Replace each byte of the input or the command line that was not UTF-8 with a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def encode(sampling: Sampling, messages: Sequence[Message]) -> gateway_pb2.GatewayServiceGenerateRequest:
    """Return a request for an answer to a conversation; without messages the caller must still set the prompt."""
    chat = [gateway_pb2.ChatMessage(role=role, content=valid_text(content)) for role, content in messages]
    return gateway_pb2.GatewayServiceGenerateRequest(
        chat=gateway_pb2.ChatMessages(messages=chat) if chat else None,
        sampling=common_pb2.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed
        ),
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        speculation=gateway_pb2.SPECULATION_UNSPECIFIED if sampling.speculation else gateway_pb2.SPECULATION_OFF,
    )


def _decode(response: gateway_pb2.GatewayServiceGenerateResponse) -> Chunk:
    return Chunk(
        text=response.text,
        tokens=[
            (ORIGINS.get(origin, TokenOrigin.UNSPECIFIED), num_bytes)
            for origin, num_bytes in zip(response.origins, response.text_lengths, strict=False)
        ],
        usage=USAGE.decode(response.usage) if response.HasField("usage") else None,
    )
