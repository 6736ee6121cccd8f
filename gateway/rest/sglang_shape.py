"""Answers to POST /generate, in SGLang's shape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import RootModel

from gateway.admission import ServedModel
from gateway.events import Delta
from gateway.request import Job
from gateway.rest.logprobs import finite
from gateway.rest.responses import Body, TraceBody
from gateway.rest.shapes import Collected, Shape
from outrider.tokens import FinishReason, PromptLogprobs

Scored = tuple[float | None, int, str | None]
"""Log-probability, token id, and the token's text if that was asked for."""


class GenerateFinish(Body):
    """Why an answer ended."""

    type: Literal["stop", "length"]
    matched: int | str | None = None
    """The token or the string that ended it."""
    length: int | None = None
    """Its tokens, where a limit ended it."""


class GenerateMeta(Body):
    """What is known of an answer beside its text."""

    id: str
    finish_reason: GenerateFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    """Seconds since the request came in."""
    spec_accept_length: float | None = None
    """Tokens committed in a round, on average."""
    spec_verify_ct: int | None = None
    """Verify rounds."""
    input_token_logprobs: list[Scored] | None = None
    input_top_logprobs: list[list[Scored] | None] | None = None
    output_token_logprobs: list[Scored] | None = None
    output_top_logprobs: list[list[Scored]] | None = None


class GenerateAnswer(Body):
    """One answer, or what there is of it so far."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | None = None
    """Which of several answers an event tells of."""
    trace: TraceBody | None = None


class GenerateAnswers(RootModel[GenerateAnswer | list[GenerateAnswer]]):
    """One answer to one prompt, else a list."""

    def json_bytes(self) -> bytes:
        """The body as JSON, without unset fields."""
        return self.model_dump_json(exclude_unset=True).encode()


class GenerateShape(Shape):
    """For /generate."""

    prefix = "gen"

    def __init__(
        self,
        model: ServedModel,
        jobs: Sequence[Job],
        *,
        name: str | None,
        is_batch: bool,
        logprob_start: int | None,
        with_text: bool,
    ) -> None:
        """`name`: the id that the client chose; `logprob_start`: first position of the prompt that is told of."""
        super().__init__(model, jobs, None)
        self._name = name
        self._is_batch = is_batch
        self._logprob_start = logprob_start
        self._with_text = with_text

    def whole(self) -> GenerateAnswers:
        """See the base."""
        answers = [self._body(index, answer) for index, answer in enumerate(self._answers)]
        return GenerateAnswers(answers if self._is_batch else answers[0])

    def chunks(self, delta: Delta) -> Iterator[GenerateAnswer]:
        """One event with all that there is of an answer, but for the trace: that is of what is new."""
        self.collect(delta)
        if delta.text or delta.tokens or delta.finish_reason is not None:
            yield self._body(delta.choice_index, self._answers[delta.choice_index], delta)

    def _choices(self, delta: Delta, answer: Collected) -> Iterator[Body]:
        raise NotImplementedError  # events are answers here

    def _chunk(self, choices: list[Any], **more: Any) -> Body:
        raise NotImplementedError

    def _body(self, index: int, answer: Collected, news: Delta | None = None) -> GenerateAnswer:
        """An answer, as far as it goes; `news` is what an event tells of it."""
        more: dict[str, Any] = {"index": index} if news is not None and self._is_batch else {}
        part = answer if news is None else news
        return GenerateAnswer(
            text="".join(answer.text),
            output_ids=[token.id for token in answer.tokens],
            meta_info=self._meta(index, answer),
            **more,
            **self._trace(index, part.tokens, part.trees),
        )

    def _meta(self, index: int, answer: Collected) -> GenerateMeta:
        job = self._jobs[index]
        more: dict[str, Any] = {}
        if rounds := answer.num_rounds:
            more = {
                "spec_accept_length": round((answer.num_accepted + rounds) / rounds, 3),
                "spec_verify_ct": rounds,
            }
        return GenerateMeta(
            id=self._name or job.request_id,
            finish_reason=self._finish(job, answer),
            prompt_tokens=len(job.prompt_token_ids),
            completion_tokens=len(answer.tokens),
            cached_tokens=answer.cached_tokens,
            weight_version=self._head["system_fingerprint"],
            e2e_latency=round(time.monotonic() - job.arrived, 6),
            **more,
            **self._logprobs(job, answer),
        )

    def _finish(self, job: Job, answer: Collected) -> GenerateFinish | None:
        if answer.finish_reason is None:
            return None
        if answer.finish_reason is FinishReason.LENGTH:
            return GenerateFinish(type="length", length=len(answer.tokens))
        if answer.tokens and answer.tokens[-1].ends_answer:
            return GenerateFinish(type="stop", matched=answer.tokens[-1].id)
        text = "".join(token.text for token in answer.tokens)
        found = [(at + len(stop), -len(stop), stop) for stop in job.stop if (at := text.find(stop)) >= 0]
        return GenerateFinish(type="stop", matched=min(found)[2] if found else None)

    def _logprobs(self, job: Job, answer: Collected) -> dict[str, Any]:
        num_top = job.sampling.num_logprobs
        if num_top is None:
            return {}
        known = [token for token in answer.tokens if token.logprobs is not None]
        fields: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [self._scored(t.logprobs.logprob, t.id) for t in known if t.logprobs],
        }
        if num_top:
            fields["input_top_logprobs"] = []
            fields["output_top_logprobs"] = [
                [self._scored(value, token) for token, value in t.logprobs.top] for t in known if t.logprobs
            ]
        if self._logprob_start is not None:
            own, top = self._prompt(job, answer.prompt_logprobs)
            fields["input_token_logprobs"] = own[self._logprob_start :]
            if num_top:
                fields["input_top_logprobs"] = top[self._logprob_start :]
        return fields

    def _prompt(self, job: Job, parts: Sequence[PromptLogprobs]) -> tuple[list[Scored], list[list[Scored] | None]]:
        own: list[Scored] = [self._scored(None, job.prompt_token_ids[0])]
        top: list[list[Scored] | None] = [None]
        for part in parts:
            rows = zip(part.logprobs.tolist(), part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
            for index, (value, ids, values) in enumerate(rows):
                own.append(self._scored(value, job.prompt_token_ids[part.start + index]))
                top.append([self._scored(likely, token) for token, likely in zip(ids, values, strict=True)])
        return own, top

    def _scored(self, logprob: float | None, token_id: int) -> Scored:
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") if self._with_text else None
        return None if logprob is None else finite(logprob), token_id, text
