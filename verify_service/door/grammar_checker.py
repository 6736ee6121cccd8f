"""Compiles each new grammar in a sandbox process before the engine gets it. Torch-free."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from outrider.errors import InternalError, InvalidGrammarError, OverloadedError
from outrider.grammar.compiler import LENGTH, Verdict
from outrider.grammar.spec import Grammar
from outrider.logs import get_logger

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
    """Checks whether grammars can be used. Processes start with the first grammar; the latest verdicts are cached.

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
