"""The verify service's gRPC door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from outrider.errors import OverloadedError, UnavailableError
from outrider.protocol.token_codec import encode_prompt_logprobs, encode_tree
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.door.admission import Admission
from verify_service.door.grammar_check import GrammarChecker
from verify_service.door.outbox import Outbox
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.frames.submission import Update

Context = grpc.aio.ServicerContext[Any, Any]


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Answers gateways; the engine does the work."""

    def __init__(
        self,
        engine: RemoteVerifyEngine,
        admission: Admission,
        info: verify_pb2.VerifyServiceGetInfoResponse,
        load: Callable[[], verify_pb2.VerifyServiceGetLoadResponse],
        *,
        stall_seconds: float = 120.0,
        grammars: GrammarChecker | None = None,
    ) -> None:
        """`stall_seconds`: how long a gateway may leave an answer unread. `grammars`: tries them before the engine."""
        self._grammars = grammars
        self._engine = engine
        self._admission = admission
        self._info = info
        self._load = load
        self._stall_seconds = stall_seconds
        self.draining = False
        """While set, new requests are refused."""

    async def Generate(self, request: verify_pb2.VerifyServiceGenerateRequest, context: Context) -> None:
        """Stream committed tokens. However the call ends, the request leaves the engine with it."""
        if self.draining:
            raise UnavailableError("the verify service is draining; send the request to another replica")
        outbox = Outbox(self._stall_seconds)
        submission = self._admission.admit(request)
        if self._grammars is not None and submission.sampling.grammar is not None:
            await self._grammars.check(submission.sampling.grammar)
        number = self._engine.submit(submission, outbox.put)
        try:
            # Apart: a status cannot follow a first message that is given up on its way, if it bears the metadata.
            await context.send_initial_metadata(())
            last = False
            while not last:
                gathered = await outbox.take()
                last = gathered[-1].last
                error = gathered[-1].error
                if error is None or len(gathered) > 1:
                    message = encode_updates([update for update in gathered if update.error is None])
                    await outbox.write(partial(context.write, message))
                if error is not None:
                    raise error
        except OverloadedError as error:
            self._engine.backlog.slow_readers += error.code == "slow_reader"
            raise
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
        if update.prompt_logprobs is not None:
            response.prompt_logprobs.append(encode_prompt_logprobs(update.prompt_logprobs))
        if update.tree is not None:
            response.round_trees.append(encode_tree(update.tree))
        if update.token_ids:
            response.rounds.add(
                num_draft_tokens=update.num_draft_tokens, num_accepted_tokens=update.num_accepted_tokens
            )
        if update.finish is not None:
            response.finish_reason = update.finish.value  # type: ignore[assignment]
    return response
