"""The part of the gateway that both doors share: running requests as streams of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.core.answer import Answer, Delta
from gateway.core.catalogue import Catalogue, GatewayModel
from gateway.core.gate import Gate, LogprobQuota
from gateway.core.metrics import AnswerMeter, GatewayMetrics
from gateway.core.request import Job
from gateway.core.router import Router
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.protocol.generation import Usage

_QUEUED_DELTAS = 64
"""Most deltas that wait for a slow client before its calls to verify are held up."""

_Queue = asyncio.Queue[Delta | Exception | None]
"""Deltas of all answers; an error ends the request, None ends one answer."""


@dataclass(eq=False, repr=False)
class Gateway:
    """The parts of one gateway."""

    catalogue: Catalogue
    router: Router
    gate: Gate
    metrics: GatewayMetrics
    logprob_quota: LogprobQuota

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return self.router.ready and not self.gate.draining

    @property
    def model(self) -> GatewayModel:
        """The served model. Raises UnavailableError while no verify service is there to run it."""
        model = self.catalogue.model
        if not self.router.ready:
            raise UnavailableError("no verify service is ready; try again shortly", code="verify_unavailable")
        return model

    @contextmanager
    def enter(self, door: str) -> Iterator[Callable[[int], None]]:
        """Do the same as the gate's `enter`, and count how the request fails."""
        with self.counted(door), self.gate.enter() as reserve:
            yield reserve

    @contextmanager
    def counted(self, door: str) -> Iterator[None]:
        """Count how a request fails."""
        try:
            yield
        except OutriderError as error:
            self.count_error(door, error)
            raise
        except Exception:
            self.metrics.errors.labels(door, "internal_error").inc()
            raise

    def count_error(self, door: str, error: OutriderError) -> None:
        """Count a request that was refused or failed."""
        self.metrics.errors.labels(door, error.code).inc()

    async def generate(self, jobs: Sequence[Job], model: GatewayModel) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all answers of all jobs, as they come; the last delta carries the usage.

        `choice_index` of a delta counts over all jobs: first the answers of the first job, and so on. Closing the
        generator cancels every call at once. If any answer fails, the others end too, and OutriderError is raised.
        """
        pairs = [(job, choice_index) for job in jobs for choice_index in range(job.n)]
        answers = [Answer(job, index, model.tokenizer, place=place) for place, (job, index) in enumerate(pairs)]
        unfinished = len(answers)
        merged = self._one(answers[0], model) if len(answers) == 1 else self._merge(answers, model)
        async with aclosing(merged) as deltas:
            async for delta in deltas:
                unfinished -= delta.finish_reason is not None
                yield delta if unfinished else replace(delta, usage=_usage(jobs, answers))

    async def _merge(self, answers: Sequence[Answer], model: GatewayModel) -> AsyncGenerator[Delta, None]:
        queue: _Queue = asyncio.Queue(_QUEUED_DELTAS)
        tasks = [asyncio.create_task(self._pump(answer, model, queue)) for answer in answers]
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, answer: Answer, model: GatewayModel, queue: _Queue) -> None:
        try:
            async with aclosing(self._one(answer, model)) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    async def _one(self, answer: Answer, model: GatewayModel) -> AsyncGenerator[Delta, None]:
        meter = AnswerMeter(self.metrics, model.name, answer)
        outcome, last = "error", None
        try:
            async with aclosing(self.router.generate(answer.request, answer.job.loose_grammar)) as chunks:
                async for chunk in chunks:
                    delta = answer.feed(chunk)
                    meter.chunk(chunk, delta)
                    if delta.finish_reason is not None:
                        last = delta  # verify does not know of a stop string: leaving cancels its call
                        break
                    yield delta
            if last is not None:
                yield last
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "abort"
            raise
        except InvalidRequestError as error:
            raise _renamed(error, answer.job) from None
        finally:
            meter.finish(outcome)


def _renamed(error: InvalidRequestError, job: Job) -> InvalidRequestError:
    """Return the error under the client's name for the field: only verify can tell whether a grammar compiles."""
    if not job.grammar_field or not error.field.startswith("grammar"):
        return error
    return InvalidRequestError(job.grammar_field, error.problem, job.grammar_fix or error.fix, code=error.code)


def _usage(jobs: Sequence[Job], answers: Sequence[Answer]) -> Usage:
    whole = Usage.total(answer.usage for answer in answers)
    whole.prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
    # The later answers to a prompt find pages of the first: only what all found was cached before the request.
    whole.cached_prompt_tokens = sum(
        min(answer.usage.cached_prompt_tokens for answer in answers if answer.job is job) for job in jobs
    )
    return whole
