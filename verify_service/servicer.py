"""The verify service's gRPC door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from outrider.errors import UnavailableError
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.admission import Admission
from verify_service.remote import RemoteEngine
from verify_service.submission import Update

Context = grpc.aio.ServicerContext[Any, Any]


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Answers gateways; the engine does the work."""

    def __init__(
        self,
        engine: RemoteEngine,
        admission: Admission,
        info: verify_pb2.VerifyServiceGetInfoResponse,
        load: Callable[[], verify_pb2.VerifyServiceGetLoadResponse],
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._info = info
        self._load = load
        self.draining = False
        """While set, new requests are refused."""

    async def Generate(
        self, request: verify_pb2.VerifyServiceGenerateRequest, context: Context
    ) -> AsyncIterator[verify_pb2.VerifyServiceGenerateResponse]:
        """Stream committed tokens. However the call ends, the request leaves the engine with it."""
        if self.draining:
            raise UnavailableError("the verify service is draining; send the request to another replica")
        updates: asyncio.Queue[Update] = asyncio.Queue()
        number = self._engine.submit(self._admission.admit(request), updates.put_nowait)
        try:
            last = False
            while not last:
                gathered = [await updates.get()]
                while not updates.empty():
                    gathered.append(updates.get_nowait())
                last = gathered[-1].last
                error = gathered[-1].error
                if error is None or len(gathered) > 1:
                    yield encode_updates([update for update in gathered if update.error is None])
                if error is not None:
                    raise error
        finally:
            self._engine.cancel(number)

    async def GetInfo(
        self, request: verify_pb2.VerifyServiceGetInfoRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetInfoResponse:
        """The model and its limits."""
        return self._info

    async def GetLoad(
        self, request: verify_pb2.VerifyServiceGetLoadRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetLoadResponse:
        """The present load."""
        return self._load()


def encode_updates(updates: Sequence[Update]) -> verify_pb2.VerifyServiceGenerateResponse:
    """Updates that a slow reader let gather, as one message."""
    response = verify_pb2.VerifyServiceGenerateResponse(
        cached_prompt_tokens=max(update.num_cached_prompt_tokens for update in updates)
    )
    for update in updates:
        response.token_ids.extend(update.token_ids)
        response.origins.extend(origin.value for origin in update.origins)  # type: ignore[misc]
        for entry in update.logprobs:
            top = [common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in entry.top]
            response.logprobs.append(common_pb2.TokenLogprobs(logprob=entry.logprob, top=top))
        if update.token_ids:
            response.rounds.add(
                num_draft_tokens=update.num_draft_tokens, num_accepted_tokens=update.num_accepted_tokens
            )
        if update.finish is not None:
            response.finish_reason = update.finish.value  # type: ignore[assignment]
    return response
