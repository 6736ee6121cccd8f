"""The gRPC door."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from gateway.admission import admit
from gateway.codec import decode_request, encode_delta, encode_models
from gateway.service import Gateway
from outrider.v1 import gateway_pb2
from outrider.v1.gateway_pb2_grpc import GatewayServiceServicer

SERVICE_NAME = "outrider.v1.GatewayService"


class GatewayServicer(GatewayServiceServicer):
    """Answers calls; errors become statuses in the server's interceptor."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self,
        request: gateway_pb2.GatewayServiceGenerateRequest,
        context: grpc.aio.ServicerContext[
            gateway_pb2.GatewayServiceGenerateRequest, gateway_pb2.GatewayServiceGenerateResponse
        ],
    ) -> AsyncIterator[gateway_pb2.GatewayServiceGenerateResponse]:
        """Streams the answers; cancelling the call ends them at once."""
        request_id = f"gen-{uuid.uuid4().hex}"
        gateway = self._gateway
        with gateway.enter("grpc") as ticket:
            model = gateway.model
            job = await admit(decode_request(request), model, request_id)
            ticket.reserve(job.n)
            async with aclosing(gateway.engine.generate([job], model)) as deltas:
                async for delta in deltas:
                    yield encode_delta(request_id, delta)

    async def ListModels(
        self,
        request: gateway_pb2.GatewayServiceListModelsRequest,
        context: grpc.aio.ServicerContext[
            gateway_pb2.GatewayServiceListModelsRequest, gateway_pb2.GatewayServiceListModelsResponse
        ],
    ) -> gateway_pb2.GatewayServiceListModelsResponse:
        """The served models."""
        return encode_models(self._gateway.model)
