"""The gRPC door."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing

import grpc

from gateway.core.admission import admit
from gateway.core.service import Gateway
from gateway.grpc.codec import decode_request, encode_delta, encode_models
from outrider.errors import OverloadedError
from outrider.rpc.call import limit_time
from outrider.v1 import gateway_pb2
from outrider.v1.gateway_pb2_grpc import GatewayServiceServicer

_Context = grpc.aio.ServicerContext[
    gateway_pb2.GatewayServiceGenerateRequest, gateway_pb2.GatewayServiceGenerateResponse
]

_INLINE_BYTES = 1 << 16
"""Requests up to here are decoded and validated in the event loop, in some milliseconds."""

SERVICE_NAME = "outrider.v1.GatewayService"


class GatewayServicer(GatewayServiceServicer):
    """Answers calls; errors become statuses in the server's interceptor."""

    def __init__(self, gateway: Gateway, *, stall_seconds: float, max_request_seconds: float = 3600.0) -> None:
        """How long a client may leave its stream unread, and how long a request may take."""
        self._gateway = gateway
        self._max_request_seconds = max_request_seconds
        self._stall_seconds = stall_seconds

    async def Generate(self, request: gateway_pb2.GatewayServiceGenerateRequest, context: _Context) -> None:
        """Streams the answers; cancelling the call ends them at once."""
        request_id = f"gen-{uuid.uuid4().hex}"
        limit_time(context.time_remaining(), self._max_request_seconds)
        gateway = self._gateway
        with gateway.enter("grpc") as ticket:
            model = gateway.model
            if request.ByteSize() <= _INLINE_BYTES:
                decoded = decode_request(request)
            else:
                decoded = await asyncio.to_thread(decode_request, request)
            job = await admit(decoded, model, request_id)
            ticket.reserve(job.n)
            async with aclosing(gateway.generate([job], model)) as deltas:
                async for delta in deltas:
                    await self._write(context, encode_delta(request_id, delta))

    async def _write(self, context: _Context, message: gateway_pb2.GatewayServiceGenerateResponse) -> None:
        # A client that reads nothing must not keep its place here and its pages in verify for good.
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(message)
        except TimeoutError:
            raise OverloadedError(
                f"the stream was left unread for {self._stall_seconds:g} s; read it faster", code="slow_reader"
            ) from None

    async def ListModels(
        self,
        request: gateway_pb2.GatewayServiceListModelsRequest,
        context: grpc.aio.ServicerContext[
            gateway_pb2.GatewayServiceListModelsRequest, gateway_pb2.GatewayServiceListModelsResponse
        ],
    ) -> gateway_pb2.GatewayServiceListModelsResponse:
        """The served models."""
        return encode_models(self._gateway.model)
