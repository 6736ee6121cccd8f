"""A verify service that answers with the tokens that a test gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway.core.tokenizer import Tokenizer
from outrider.errors import OutriderError
from outrider.rpc.call import client
from outrider.rpc.server import GrpcServer
from outrider.rpc.tls import TlsSource
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc

MODEL = "tiny/test-model"
EOS = 2
CONTEXT = 256
QUEUE_SECONDS = 1e-6


class ScriptedVerify(verify_pb2_grpc.VerifyServiceServicer):
    """Commits `script` in rounds of `round_size` tokens, three of four of them draft tokens."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: the folder's, where it was loaded before."""
        self.folder = folder
        self.tokenizer = Tokenizer.load(folder) if tokenizer is None else tokenizer
        self.script: Sequence[int] = ()
        self.scripts: dict[int, Sequence[int]] = {}
        """By choice index, where the answers differ."""
        self.round_size = 2
        self.ends_silently = False
        self.fail_after: int | None = None
        self.failures: list[OutriderError] = []
        """Raised before the first token, one a call."""
        self.gate: asyncio.Event | None = None
        """When set, answers wait for it after their first round."""
        self.slow_prompt: asyncio.Event | None = None
        """When set, answers wait for it after the first part of what is said of a prompt."""
        self.requests: list[Any] = []
        self.clients: list[str] = []
        """On whose behalf each request came."""
        self.seconds: list[float | None] = []
        """How long each request had when it came."""
        self.door: dict[str, Any] = {}
        """Arguments of its server; `tls` as files."""
        self.num_open = 0
        self.num_cancelled = 0
        self.context_length = CONTEXT
        self.model = MODEL
        self.tokenizer_hash = self.tokenizer.digest
        self.vocab_size = self.tokenizer.size

    def set_answer(self, text: str, *, eos: bool = True) -> list[int]:
        """Makes a text the script; returns its tokens."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.script = [*token_ids, EOS] if eos else token_ids
        return token_ids

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return verify_pb2.VerifyServiceGetInfoResponse(
            model=self.model,
            model_path=str(self.folder),
            tokenizer_hash=self.tokenizer_hash,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            dtype="float32",
            eos_token_ids=[EOS],
            version="0",
        )

    async def GetLoad(self, request: Any, context: Any) -> Any:
        return verify_pb2.VerifyServiceGetLoadResponse(
            num_running=self.num_open,
            num_waiting=3,
            num_pages_used=25,
            num_pages=100,
            tokens_per_second=12.5,
            num_healthy_drafts=1,
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.clients.append(client.get())
        self.seconds.append(context.time_remaining())
        self.num_open += 1
        try:
            if self.failures:
                raise self.failures.pop(0)
            async for message in self._answer(request):
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1

    async def _answer(self, request: Any) -> AsyncIterator[Any]:
        script = list(self.scripts.get(request.choice_index, self.script))[: request.max_tokens]
        stops = {*request.stop_token_ids} | (set() if request.ignore_eos else {EOS})
        sent = 0
        if request.HasField("num_prompt_logprobs"):
            for part in self._prompt(list(request.prompt_token_ids), request.num_prompt_logprobs):
                yield part
                if self.slow_prompt is not None:
                    await self.slow_prompt.wait()
        while sent < len(script):
            part = script[sent : sent + self.round_size]
            end = next((i for i, token in enumerate(part) if token in stops), None)
            part = part if end is None else part[: end + 1]
            message = self._round(part, request.sampling)
            if request.trace:
                message.round_trees.append(self._tree(part, len(request.prompt_token_ids) + sent))
            message.cached_prompt_tokens = 0 if sent else 3 + request.choice_index
            message.queue_seconds = QUEUE_SECONDS
            sent += len(part)
            if self.fail_after is not None and sent > self.fail_after:
                raise RuntimeError("the engine broke")
            if end is not None:
                message.finish_reason = common_pb2.FINISH_REASON_STOP
            elif sent == len(script) and not self.ends_silently:
                message.finish_reason = common_pb2.FINISH_REASON_LENGTH
            yield message
            if end is not None:
                return
            if self.gate is not None:
                await self.gate.wait()

    def _prompt(self, prompt: Sequence[int], num_top: int) -> list[Any]:
        """Two parts. At even positions the prompt's token is the likeliest, at odd ones the second."""
        parts = []
        middle = max(2, len(prompt) // 2)
        for start, end in ((1, middle), (middle, len(prompt))):
            part = common_pb2.PromptLogprobs(start=start, num_top=num_top)
            for position in range(start, min(end, len(prompt))):
                own, other = prompt[position], (prompt[position] + 1) % self.vocab_size
                likely = [(own, -0.25), (other, -1.75)] if position % 2 == 0 else [(other, -0.25), (own, -1.75)]
                likely += [((own + 1 + i) % self.vocab_size, -2.0 - i) for i in range(1, num_top)]
                part.logprobs.append(dict(likely)[own])
                part.ranks.append(1 + position % 2)
                part.top_token_ids.extend(token for token, _ in likely[:num_top])
                part.top_logprobs.extend(value for _, value in likely[:num_top])
            if part.logprobs:
                parts.append(verify_pb2.VerifyServiceGenerateResponse(prompt_logprobs=[part]))
        return parts

    def _tree(self, token_ids: Sequence[int], position: int) -> Any:
        """The committed tokens but the last as a chain, and wrong siblings of the first, from two drafters."""
        chain = list(token_ids[:-1])
        wrong = [(token_ids[0] + 1 + i) % self.vocab_size for i in range(4 - len(chain))]
        return common_pb2.RoundTree(
            position=position,
            num_tokens=len(token_ids),
            parents=[*range(-1, len(chain) - 1), *([-1] * len(wrong))],
            token_ids=chain + wrong,
            drafters=[0] * len(chain) + [1] * len(wrong),
            scores=[-0.5] * 4,
            accepted=range(len(chain)),
            drafter_names=["ngram", "eagle3"],
        )

    def _round(self, token_ids: Sequence[int], sampling: Any) -> Any:
        message = verify_pb2.VerifyServiceGenerateResponse(
            token_ids=token_ids,
            origins=[common_pb2.TOKEN_ORIGIN_ACCEPTED] * (len(token_ids) - 1) + [common_pb2.TOKEN_ORIGIN_BONUS],
            rounds=[common_pb2.RoundReport(num_draft_tokens=4, num_accepted_tokens=len(token_ids) - 1)],
        )
        if sampling.HasField("num_logprobs"):
            for token_id in token_ids:
                top = [
                    common_pb2.TokenLogprob(token_id=(token_id + i) % self.vocab_size, logprob=-0.1 - i)
                    for i in range(sampling.num_logprobs)
                ]
                message.logprobs.append(common_pb2.TokenLogprobs(logprob=-0.1, top=top))
        return message


class VerifyHost:
    """A scripted verify service on a unix socket, to be started and stopped at will."""

    def __init__(self, service: ScriptedVerify, path: Path) -> None:
        self.service = service
        self.address = f"unix:{path}"
        self._server: GrpcServer | None = None

    async def start(self) -> None:
        door = dict(self.service.door)
        if door.get("tls") is not None:
            door["tls"] = TlsSource(door["tls"])
        self._server = GrpcServer(
            address=self.address, service_names=["outrider.v1.VerifyService"], for_peers=True, **door
        )
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self.service, self._server.grpc)
        await self._server.start()
        self._server.set_serving(True)

    async def stop(self) -> None:
        """At once, as if killed."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
