"""Answers to POST /generate, in SGLang's shape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import RootModel

from gateway.core.admission import ServedModel
from gateway.core.events import Delta
from gateway.core.request import Job
from gateway.openai.logprobs import finite
from gateway.openai.responses import Body, TraceBody
from gateway.openai.shapes import Collected, Shape
from outrider.protocol.tokens import FinishReason, PromptLogprobs

_EASY = 4096
"""Up to this size of an answer, in characters of JSON, every delta is an event: some 400 tokens."""
_REPEATS = 64
"""About so many times a token is sent at most, however long the answer gets."""
_REPEATS_SCORED = 16
"""The same where log-probabilities are told: they are many times the work."""
_TOKEN_SIZE = 6
"""Of a token's id."""
_VALUE_SIZE = 32
"""Of a log-probability with its token."""

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


@dataclass(slots=True)
class _Told:
    """How much of an answer there is, and was in its last event; see `GenerateShape`."""

    size: int = 0
    size_told: int = 0
    num_tokens_told: int = 0


class GenerateShape(Shape):
    """For /generate.

    Each event holds all that there is of an answer: text, ids and log-probabilities. Sent for every token, they would
    take time and bytes by the square of the answer's length. So the longer it is, the more must be new before the
    next event; each is whole, as SGLang's are when its stream interval is raised, and the last one always comes.
    """

    prefix = "gen"
    top_field = "top_logprobs_num"
    prompt_field = "logprob_start_len"

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
        super().__init__(model, jobs)
        self._name = name
        self._is_batch = is_batch
        self._logprob_start = logprob_start
        self._with_text = with_text
        self._told = [_Told(_VALUE_SIZE * self.num_described // len(self._jobs)) for _ in self._jobs]

    def whole(self) -> GenerateAnswers:
        """See the base."""
        answers = [self._body(index, answer) for index, answer in enumerate(self._answers)]
        return GenerateAnswers(answers if self._is_batch else answers[0])

    def chunks(self, delta: Delta) -> Iterator[GenerateAnswer]:
        """An event with all that there is of an answer, once enough is new; of the trace, only what is new."""
        self.collect(delta)
        index = delta.choice_index
        if self._is_due(delta):
            answer, told = self._answers[index], self._told[index]
            yield self._body(index, answer, told)
            told.size_told, told.num_tokens_told = told.size, len(answer.tokens)
            self._num_collected -= sum(len(tree.token_ids) for tree in answer.trees)
            answer.trees.clear()

    def _is_due(self, delta: Delta) -> bool:
        told = self._told[delta.choice_index]
        new = [token.logprobs for token in delta.tokens]
        num_values = sum(1 + len(one.top) for one in new if one is not None)
        told.size += len(delta.text) + _TOKEN_SIZE * len(new) + _VALUE_SIZE * num_values
        if delta.finish_reason is not None:
            return True
        scored = self._jobs[delta.choice_index].sampling.num_logprobs is not None
        enough = told.size // (_REPEATS_SCORED if scored else _REPEATS)
        return bool(delta.text or new) and (told.size <= _EASY or told.size - told.size_told >= enough)

    def _keeps_tokens(self, job: Job) -> bool:
        return True

    def _body(self, index: int, answer: Collected, told: _Told | None = None) -> GenerateAnswer:
        """An answer, as far as it goes; `told` is what earlier events have told of it."""
        more: dict[str, Any] = {"index": index} if told is not None and self._is_batch else {}
        answer.text = ["".join(answer.text)]
        return GenerateAnswer(
            text=answer.text[0],
            output_ids=[token.id for token in answer.tokens],
            meta_info=self._meta(index, answer),
            **more,
            **self._trace(index, answer.tokens[0 if told is None else told.num_tokens_told :], answer.trees),
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
