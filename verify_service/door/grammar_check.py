"""Tries grammars before the engine gets them, in processes that a hostile one may break. Torch-free."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from outrider.errors import InternalError, InvalidRequestError, OverloadedError
from outrider.grammar.sandbox import LENGTH, Verdict
from outrider.grammar.spec import Grammar

CHECK_SECONDS = 5.0
"""How long a grammar may take to be compiled and tried."""
START_SECONDS = 60.0
_NUM_PROCESSES = 2
"""So that one client's slow grammar does not hold up all others'."""
_MAX_WAITING = 64
_MAX_VERDICTS = 1024
_AGAIN = "send a smaller one, or try again later"
_MODULE = "outrider.grammar.sandbox"


class GrammarChecker:
    """Says which grammars can be used. Processes start with the first one; verdicts are kept, as many as fit.

    The event loop uses it.
    """

    def __init__(
        self,
        folder: str,
        vocab_size: int,
        end_ids: Sequence[int],
        seconds: float = CHECK_SECONDS,
        module: str = _MODULE,
    ) -> None:
        """`folder`: of the model, which holds the tokenizer."""
        command = [sys.executable, "-m", module, folder, str(vocab_size), *map(str, end_ids)]
        self._sandboxes = [Sandbox(command, seconds) for _ in range(_NUM_PROCESSES)]
        self._idle: asyncio.Queue[Sandbox] = asyncio.Queue()
        for sandbox in self._sandboxes:
            self._idle.put_nowait(sandbox)
        self._checks: OrderedDict[str, asyncio.Task[Verdict]] = OrderedDict()
        """By the grammar's digest: those under way, and those whose verdict lasts; the oldest first."""

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError for a grammar that cannot be used, OverloadedError if too many wait for this.

        One check serves all who ask for it; it goes on when one of them goes away.
        """
        check = self._checks.get(grammar.digest)
        if check is None:
            if sum(not one.done() for one in self._checks.values()) >= _MAX_WAITING:
                raise OverloadedError(f"{_MAX_WAITING} grammars wait to be compiled, the most allowed; try again later")
            check = self._checks[grammar.digest] = asyncio.create_task(self._run(grammar))
            check.add_done_callback(partial(self._ended, grammar.digest))
        self._checks.move_to_end(grammar.digest)
        verdict = await asyncio.shield(check)
        if verdict.problem:
            raise InvalidRequestError(grammar.field, verdict.problem, verdict.fix, code="invalid_grammar")

    async def close(self) -> None:
        """End the processes."""
        for check in list(self._checks.values()):
            check.cancel()
        for sandbox in self._sandboxes:
            await sandbox.close()

    def _ended(self, digest: str, check: asyncio.Task[Verdict]) -> None:
        """Keep a verdict that lasts, and no more than fit."""
        if check.cancelled() or check.exception() is not None or not check.result().lasting:
            self._checks.pop(digest, None)
        while len(self._checks) > _MAX_VERDICTS:
            self._checks.popitem(last=False)

    async def _run(self, grammar: Grammar) -> Verdict:
        sandbox = await self._idle.get()
        try:
            return await sandbox.judge(grammar)
        finally:
            self._idle.put_nowait(sandbox)


class Sandbox:
    """One process that judges a grammar at a time; started when needed, and anew after one that broke it."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._process: Process | None = None

    async def judge(self, grammar: Grammar) -> Verdict:
        """What the process says, or that the grammar was too much for it. Raises InternalError if none starts."""
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
            # Its answer would be taken for the next one's.
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
        self._process = process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _read(process)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self.close()
            raise InternalError("the process that compiles grammars does not start") from None
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
