"""Turns a request on the wire into one that the engine can trust; separate processes try its grammar. Torch-free."""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from outrider.errors import ContextLengthError, InternalError, InvalidGrammarError, InvalidRequestError, OverloadedError
from outrider.grammar.compiler import LENGTH, Verdict
from outrider.grammar.spec import Grammar, check_grammar
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationRequest
from outrider.protocol.generation_codec import REQUEST
from outrider.rpc.call import client
from outrider.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams
from outrider.v1 import verify_pb2

MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_ID_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 64

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),
}
_POSITIVE = ("top_p",)


@dataclass(frozen=True, slots=True)
class Admission:
    """Checks requests against the model's limits. The gateway has checked them already; this door trusts nobody."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    speculation: bool

    def admit(self, message: verify_pb2.VerifyServiceGenerateRequest) -> GenerationRequest:
        """Return a request ready for the engine.

        Raises InvalidRequestError naming field, limit and fix; ContextLengthError for a prompt without room.
        """
        # Sizes first: a message of some megabytes holds millions of entries.
        self._check_prompt(message.prompt_token_ids)
        _check_sizes(message)
        if message.max_tokens < 1:
            raise InvalidRequestError("max_tokens", "is 0", "ask for at least 1 token")
        request = REQUEST.decode(message)
        sampling = request.sampling
        if not message.sampling.HasField("seed"):
            sampling = replace(sampling, seed=secrets.randbits(64))
        check_sampling(sampling, self.vocab_size)
        if sampling.grammar is not None:
            self._check_grammar(sampling.grammar, request)
        self._check_bad_words(request.bad_words)
        if request.min_tokens > request.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"is {request.min_tokens}, more than max_tokens", f"send at most {request.max_tokens}"
            )
        _check_logprobs("num_prompt_logprobs", request.num_prompt_logprobs)
        max_tokens = min(request.max_tokens, self.context_length - len(request.prompt_token_ids))
        return replace(
            request,
            sampling=sampling,
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens, max_tokens),
            stop_token_ids=request.stop_token_ids.union(() if request.ignore_eos else self.eos_token_ids),
            disable_speculation=request.disable_speculation or not self.speculation,
            client=client.get(),
        )

    def _check_grammar(self, grammar: Grammar, request: GenerationRequest) -> None:
        """Check all that can be checked without compiling; GrammarChecker does that later."""
        check_grammar(grammar)
        for field in ("ignore_eos", "min_tokens"):
            if getattr(request, field):
                raise InvalidRequestError(
                    field, "cannot go with a grammar, whose answers end where they are complete", "leave it out"
                )
        if not self.eos_token_ids:
            problem = "cannot be used: the model has no end-of-sequence token"
            raise InvalidRequestError("grammar", problem, "leave it out")
        if request.bad_words:
            raise InvalidRequestError("bad_words", "cannot go with a grammar, which may need them", "leave them out")

    def _check_bad_words(self, bad_words: Sequence[Sequence[int]]) -> None:
        for index, word in enumerate(bad_words):
            if not 0 < len(word) <= MAX_BAD_WORD_TOKENS or max(word) >= self.vocab_size:
                raise InvalidRequestError(
                    f"bad_words[{index}]",
                    f"holds {len(word)} ids",
                    f"send 1 to {MAX_BAD_WORD_TOKENS}, all below {self.vocab_size}",
                )

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidRequestError("prompt_token_ids", "is empty", "send at least one token")
        if len(prompt) >= self.context_length:
            raise ContextLengthError(
                "prompt_token_ids",
                f"has {len(prompt)} tokens, but the context holds {self.context_length} of prompt and output",
                f"shorten the prompt to at most {self.context_length - 1} tokens",
            )
        top = max(prompt)
        if top >= self.vocab_size:
            raise InvalidRequestError(
                "prompt_token_ids", f"holds id {top}, but the vocabulary ends at {self.vocab_size - 1}"
            )


def _check_sizes(message: verify_pb2.VerifyServiceGenerateRequest) -> None:
    for field, length, most in (
        ("request_id", len(message.request_id), MAX_ID_CHARACTERS),
        ("tenant", len(message.tenant), MAX_TENANT_CHARACTERS),
        ("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("sampling.logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIAS),
        ("bad_words", len(message.bad_words), MAX_BAD_WORDS),
    ):
        if length > most:
            raise InvalidRequestError(field, f"holds {length} entries, at most {most}", "send fewer")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError for a sampling field outside its range."""
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if not math.isfinite(value) or not low <= value <= high or (name in _POSITIVE and value == 0):
            opening = "above" if name in _POSITIVE else "from"
            raise InvalidRequestError(f"sampling.{name}", f"is {value}", f"use a number {opening} {low} to {high}")
    _check_logprobs("sampling.num_logprobs", params.num_logprobs)
    for token, bias in params.logit_bias.items():
        if token >= vocab_size or not abs(bias) <= 100:
            raise InvalidRequestError(
                "sampling.logit_bias",
                f"maps {token} to {bias}",
                f"use ids below {vocab_size} and biases from -100 to 100",
            )


def _check_logprobs(field: str, count: int | None) -> None:
    if (count or 0) > MAX_LOGPROBS:
        raise InvalidRequestError(field, f"is {count}", f"ask for at most {MAX_LOGPROBS}")


CHECK_SECONDS = 5.0
"""How long a grammar may take to be compiled and tried."""
START_SECONDS = 60.0
_NUM_PROCESSES = 2
"""More than one, so that one client's slow grammar does not hold up all others."""
_MAX_WAITING = 64
_MAX_VERDICTS = 1024
_AGAIN = "send a smaller one, or try again later"
_MODULE = "outrider.grammar.compiler"
_NOT_STARTED = (OSError, asyncio.IncompleteReadError)
"""A time-out is an OSError."""

log = get_logger(__name__)


class GrammarChecker:
    """Tells whether grammars can be used. Processes start with the first grammar; the latest verdicts are cached.

    Use it from the event loop.
    """

    def __init__(self, folder: str, vocab_size: int, end_ids: Sequence[int], seconds: float = CHECK_SECONDS) -> None:
        """`folder`: the model's folder, which holds the tokenizer."""
        command = [sys.executable, "-m", _MODULE, folder, str(vocab_size), *map(str, end_ids)]
        self._sandboxes = [Sandbox(command, seconds) for _ in range(_NUM_PROCESSES)]
        self._idle = list(self._sandboxes)
        self._turns: dict[str, dict[str, None]] = {}
        """Digests of grammars that wait for a process, by API key; the first key has the next turn."""
        self._places: dict[str, asyncio.Future[Sandbox]] = {}
        """The process that each of these grammars will get, by digest."""
        self._checks: OrderedDict[str, asyncio.Task[Verdict]] = OrderedDict()
        """Running checks, and those with a lasting verdict, by grammar digest; the least recently used first."""

    async def check(self, grammar: Grammar, client: str = "") -> None:
        """Raise InvalidGrammarError for a grammar that cannot be used, OverloadedError if too many wait for a check.

        All callers with the same grammar share one check, which goes on when one of them leaves. API keys take turns,
        and none can take all places; `client` begins with the key.
        """
        key, digest = client.partition("/")[0], grammar.digest
        check = self._checks.get(digest)
        if check is None:
            self._check_places(key)
            place = self._places[digest] = asyncio.get_running_loop().create_future()
            check = self._checks[digest] = asyncio.create_task(self._run(grammar, place))
            check.add_done_callback(partial(self._ended, digest))
        if digest in self._places:  # even if another key has asked already: its turn may come later
            self._turns.setdefault(key, {})[digest] = None
            self._hand_out()
        self._checks.move_to_end(digest)
        verdict = await asyncio.shield(check)
        if verdict.problem:
            raise InvalidGrammarError(grammar.field, verdict.problem, verdict.fix)

    async def close(self) -> None:
        """End the processes."""
        for check in list(self._checks.values()):
            check.cancel()
        for sandbox in self._sandboxes:
            await sandbox.close()

    def _ended(self, digest: str, check: asyncio.Task[Verdict]) -> None:
        """Forget a check without a lasting verdict, and the least recently used ones above the limit."""
        if check.cancelled() or check.exception() is not None or not check.result().lasting:
            self._checks.pop(digest, None)
        while len(self._checks) > _MAX_VERDICTS:
            self._checks.popitem(last=False)

    def _check_places(self, key: str) -> None:
        """Raise OverloadedError if there is no place left for another grammar, or none in this key's share."""
        num_waiting = sum(not one.done() for one in self._checks.values())
        if num_waiting >= _MAX_WAITING:
            raise OverloadedError(f"{_MAX_WAITING} grammars wait to be compiled, which is the limit; try again later")
        # At least two shares, so that a lone key leaves places for the next one.
        share = _MAX_WAITING // max(2, len({*self._turns, key}))
        if num_waiting >= _MAX_WAITING - _MAX_WAITING // 4 and len(self._turns.get(key, ())) >= share:
            raise OverloadedError(
                "this client already has its share of the grammars that wait to be compiled; try again later",
                code="share_used_up",
            )

    def _hand_out(self) -> None:
        """Give idle processes to waiting grammars, one API key after the other."""
        while self._idle and self._turns:
            key = next(iter(self._turns))
            digests = self._turns.pop(key)
            digest = next(iter(digests))
            del digests[digest]
            if digests:
                self._turns[key] = digests
            place = self._places.pop(digest, None)
            if place is not None and not place.done():
                place.set_result(self._idle.pop())

    async def _run(self, grammar: Grammar, place: asyncio.Future[Sandbox]) -> Verdict:
        sandbox = await place
        try:
            return await sandbox.judge(grammar)
        finally:
            self._idle.append(sandbox)
            self._hand_out()


class Sandbox:
    """A process that judges one grammar at a time. It starts on demand, and again after a grammar that broke it."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._process: Process | None = None

    async def judge(self, grammar: Grammar) -> Verdict:
        """Return a verdict, also if the grammar takes too much time or memory. InternalError if no process starts."""
        process = await self._started()
        try:
            async with asyncio.timeout(self._seconds):
                body = await _ask(process, msgspec.msgpack.encode(grammar))
        except TimeoutError:
            await self.close()
            return Verdict(f"takes more than {self._seconds:g} s to compile", _AGAIN, lasting=False)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return Verdict("takes too much memory to compile", _AGAIN, lasting=False)
        except asyncio.CancelledError:
            # This grammar's answer would be taken for the next one's.
            await self.close()
            raise
        return msgspec.msgpack.decode(body, type=Verdict)

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _started(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        with suppress(*_NOT_STARTED):
            return await self._start()
        try:
            return await self._start()
        except _NOT_STARTED as error:
            log.error("the process that compiles grammars does not start: %r", error)
            raise InternalError("the process that compiles grammars does not start") from None

    async def _start(self) -> Process:
        """Start the process and wait until it is ready. Raises one of _NOT_STARTED."""
        self._process = process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _read(process)
        except _NOT_STARTED:
            await self.close()
            raise
        return process


async def _ask(process: Process, body: bytes) -> bytes:
    if process.stdin is None:
        raise ConnectionError
    process.stdin.write(LENGTH.pack(len(body)) + body)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> bytes:
    if process.stdout is None:
        raise ConnectionError
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(length)
