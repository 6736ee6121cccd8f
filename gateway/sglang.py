"""POST /generate: SGLang's request and its answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, RootModel, Tag, model_validator

from gateway.core.answer import Delta
from gateway.core.catalogue import GatewayModel
from gateway.core.request import Job, PromptText, SamplingFields, ServingFields, StopFields, Text, TokenIdList
from gateway.http.responses import Body
from gateway.openai.fields import (
    EBNF,
    NO_TAGS,
    FormBody,
    GenerationBody,
    ListForPrompts,
    NamedRequests,
    Only,
    list_or,
    prompt_requests,
)
from gateway.openai.generation import CollectedAnswer, ResponseBuilder
from gateway.openai.logprobs import TraceBody, finite, prompt_positions
from outrider.errors import InvalidRequestError, count_of
from outrider.protocol.generation import FinishReason, PromptLogprobs
from outrider.sampling.params import MAX_LOGPROBS

_DEFAULT_NEW_TOKENS = 128
_EVERY_DELTA_SIZE = 4096
"""Up to this size of an answer in characters of JSON, some 400 tokens, every delta is an event."""
_MAX_REPEATS = 64
"""A token is sent at most about this many times, however long the answer gets."""
_MAX_REPEATS_SCORED = 16
"""The same for answers with log-probabilities, which are many times the work."""
_TOKEN_SIZE = 6
"""Characters of JSON for a token's id."""
_VALUE_SIZE = 32
"""Characters of JSON for a log-probability with its token."""

Scored = tuple[float | None, int, str | None]
"""Log-probability, token id, and the token's text if that was asked for."""


def _ids_kind(value: Any) -> str:
    return "@lists" if isinstance(value, list) and value and isinstance(value[0], list) else "@ids"


_Texts = Annotated[
    Annotated[PromptText, Tag("@text")] | Annotated[ListForPrompts[PromptText], Tag("@list")], list_or("@text")
]
_Ids = Annotated[
    Annotated[TokenIdList, Tag("@ids")] | Annotated[ListForPrompts[TokenIdList], Tag("@lists")],
    Discriminator(_ids_kind),
]


class GenerateSampling(SamplingFields, StopFields, FormBody):
    """SGLang's sampling_params."""

    json_schema: Text | None = Field(None, description="A JSON schema that the answer must fit, as JSON in a string.")
    regex: Text | None = Field(None, description="A regular expression that the whole answer must match.")
    ebnf: Text | None = Field(None, description=EBNF)
    structural_tag: Annotated[Any, Only(why=NO_TAGS)] = None
    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description=f"Most tokens to generate. Default {_DEFAULT_NEW_TOKENS}; 0 reports only the prompt."
    )
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="The same as seed.")
    min_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(None, description="The same as min_tokens.")
    spaces_between_special_tokens: bool | None = Field(None, description="Accepted but ignored.")
    no_stop_trim: bool | None = Field(None, description="The same as include_stop_str_in_output.")
    stop_regex: Annotated[Any, Only([], "", why="answers end at texts and tokens, not at expressions")] = None


T = TypeVar("T")


_Each = Annotated[ListForPrompts[T], Tag("@list")]
_ForEach = Annotated[Annotated[T, Tag("@one")] | _Each[T], list_or("@one")]
"""A value for all prompts, or a list with one for each."""


def _of(value: T | list[T] | None, index: int) -> T | None:
    """Return the value of a `_ForEach` for the prompt with this index."""
    return value[index] if isinstance(value, list) else value


_Sampling = Annotated[Annotated[GenerateSampling, Tag("@params")] | _Each[GenerateSampling], list_or("@params")]


class GenerateBody(ServingFields, GenerationBody):
    """Body of POST /generate: one prompt or several, as text or token ids."""

    text: _Texts | None = Field(None, description="A text, or a list of texts.")
    input_ids: _Ids | None = Field(None, description="Token ids, or a list of lists of them.")
    sampling_params: _Sampling | None = None
    """How tokens are chosen: one object for all prompts, or a list with one for each."""
    stream: bool | None = None
    """Send events, each with the whole text so far. A long answer has fewer of them than tokens."""
    rid: _ForEach[Annotated[Text, Field(max_length=256)]] | None = None
    """The id that the answer will have. Where several answers have the same, "_0", "_1" and so on follow it."""
    return_logprob: _ForEach[bool] | None = Field(None, description="Return the log-probability of each token.")
    logprob_start_len: _ForEach[Annotated[int, Field(ge=-1, lt=2**31)]] | None = None
    """First position of the prompt to report. Default -1: only the answer's tokens."""
    top_logprobs_num: _ForEach[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]] | None = None
    """Also return this many most likely tokens at each position."""
    return_text_in_logprobs: bool | None = Field(None, description="Return the tokens' text beside their ids.")
    speculation: Annotated[Any, Only("on", "off", why="speculation is on or off")] = None
    log_metrics: bool | None = Field(None, description="Accepted but ignored.")
    return_hidden_states: Annotated[Any, Only(False, why="hidden states are not returned")] = None
    return_routed_experts: Annotated[Any, Only(False, why="experts are not returned")] = None
    image_data: Annotated[Any, Only(why="only text is supported")] = None
    lora_path: Annotated[Any, Only(why="adapters are not supported")] = None

    @model_validator(mode="after")
    def _one_input(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("text", "exactly one of text and input_ids is needed", "set one")
        prompts = self.text if self.input_ids is None else self.input_ids
        is_list = isinstance(prompts, list) and not isinstance(prompts[0], int)
        num_prompts = len(prompts or ()) if is_list else 1
        for name in ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(each := getattr(self, name), list) and len(each) != num_prompts:
                problem = f"{count_of(len(each), 'entry', 'entries')} for {count_of(num_prompts, 'prompt')}"
                raise InvalidRequestError(name, problem, "send one for each prompt, or one for all")
        return self

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list: to a list of prompts, or to a prompt with several answers."""
        prompts = self.text if self.input_ids is None else self.input_ids[0]
        each = self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params]
        return isinstance(prompts, list) or any(params and params.n and params.n > 1 for params in each)

    def logprob_start(self, index: int) -> int | None:
        """Return the first position of a prompt whose log-probability is sent; None if none is."""
        start = _of(self.logprob_start_len, index)
        return start if _of(self.return_logprob, index) and start is not None and start >= 0 else None

    def requests(self, max_prompts: int) -> NamedRequests:
        """See the base."""
        if self.text is not None:
            return prompt_requests(self.text, "text", self._fields, max_prompts)
        return prompt_requests(self.input_ids or [], "input_ids", self._fields, max_prompts)

    def _fields(self, index: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the fields of a ClientRequest, without the prompt, for the prompt with this index, and the body's
        names for them."""
        place = f"sampling_params[{index}]." if isinstance(self.sampling_params, list) else "sampling_params."
        params = _of(self.sampling_params, index) or GenerateSampling()
        sampling = {name: getattr(params, name) for name in SamplingFields.model_fields}
        if params.sampling_seed is not None:
            sampling["seed"] = params.sampling_seed
        num_top = _of(self.top_logprobs_num, index) or 0
        sampling["num_logprobs"] = num_top if _of(self.return_logprob, index) else None
        limit = _DEFAULT_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
        common: dict[str, Any] = {name: getattr(params, name) for name in StopFields.model_fields}
        common |= {name: getattr(self, name) for name in ServingFields.model_fields}
        if params.no_stop_trim is not None:
            common["include_stop_str_in_output"] = params.no_stop_trim
        if params.min_new_tokens is not None:
            common["min_tokens"] = params.min_new_tokens
        common |= {
            "model": self.model,
            "sampling": sampling,
            "max_tokens": max(limit, 1),
            "prompt_only": limit == 0,
            "num_prompt_logprobs": None if self.logprob_start(index) is None else num_top,
            "grammar": params.grammar,
        }
        names = {
            "max_tokens": "max_new_tokens",
            "min_tokens": "min_tokens" if params.min_new_tokens is None else "min_new_tokens",
            "sampling.logit_bias": "logit_bias",
            "grammar": params.grammar_field,
        } | {name: name for name in ("ignore_eos", "bad_words", "stop_token_ids")}
        return common, {ours: place + theirs for ours, theirs in names.items()}


class GenerateFinish(Body):
    """Why an answer ended."""

    type: Literal["stop", "length"]
    matched: int | str | None = None
    """The token or the string that ended it."""
    length: int | None = None
    """Its number of tokens, if a limit ended it."""


class GenerateMeta(Body):
    """Counts, times and log-probabilities of an answer."""

    id: str
    finish_reason: GenerateFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    """Seconds since the request arrived."""
    spec_accept_length: float | None = None
    """Tokens committed in a round, on average."""
    spec_verify_ct: int | None = None
    """Verify rounds."""
    input_token_logprobs: list[Scored] | None = None
    input_top_logprobs: list[list[Scored] | None] | None = None
    output_token_logprobs: list[Scored] | None = None
    output_top_logprobs: list[list[Scored]] | None = None


class GenerateAnswer(Body):
    """One answer, or its beginning."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | None = None
    """The answer, of several, that an event belongs to."""
    trace: TraceBody | None = None


class GenerateAnswers(RootModel[GenerateAnswer | list[GenerateAnswer]]):
    """One answer to one prompt, else a list."""


@dataclass(slots=True)
class _EventProgress:
    """Size of an answer now and at its last event, in characters of JSON; see `GenerateBuilder`."""

    size: int = 0
    size_sent: int = 0
    num_tokens_sent: int = 0


def _distinct(ids: Sequence[str]) -> list[str]:
    """Return the ids with a number behind each that several answers have, since clients of SGLang sort events by id."""
    several, seen = Counter(ids), Counter[str]()
    named = []
    for one in ids:
        named.append(f"{one}_{seen[one]}" if several[one] > 1 else one)
        seen[one] += 1
    return named


class GenerateBuilder(ResponseBuilder):
    """Builds answers to POST /generate.

    An event holds the whole answer so far: text, ids and log-probabilities. With an event for every token, time and
    bytes would grow with the square of the answer's length. So the longer the answer, the more must be new before the
    next event, as with SGLang's stream interval; the last event always comes.
    """

    id_prefix = "gen"
    top_field = "top_logprobs_num"
    prompt_field = "logprob_start_len"

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: GenerateBody) -> None:
        super().__init__(model, jobs, body)
        prompts = [index for index, job in enumerate(jobs) for _ in range(job.n)]
        self._ids = _distinct([_of(body.rid, prompt) or jobs[prompt].request.request_id for prompt in prompts])
        self._is_batch = body.is_batch
        self._logprob_starts = [body.logprob_start(prompt) for prompt in prompts]
        self._with_text = bool(body.return_text_in_logprobs)
        self._progress = [_EventProgress(_VALUE_SIZE * self.num_prompt_values // len(self._jobs)) for _ in self._jobs]

    def whole(self) -> GenerateAnswers:
        """See the base."""
        answers = [self._body(index, answer) for index, answer in enumerate(self._answers)]
        return GenerateAnswers(answers if self._is_batch else answers[0])

    def chunks(self, delta: Delta) -> Iterator[GenerateAnswer]:
        """Yield an event with the whole answer so far, once enough is new; of the trace, only what is new."""
        self.collect(delta)
        index = delta.choice_index
        if self._is_due(delta):
            answer, progress = self._answers[index], self._progress[index]
            yield self._body(index, answer, progress)
            progress.size_sent, progress.num_tokens_sent = progress.size, len(answer.tokens)
            self._num_collected -= sum(len(tree.token_ids) for tree in answer.trees)
            answer.trees.clear()

    def _is_due(self, delta: Delta) -> bool:
        progress = self._progress[delta.choice_index]
        new = [token.logprobs for token in delta.tokens]
        num_values = sum(1 + len(one.top) for one in new if one is not None)
        progress.size += len(delta.text) + _TOKEN_SIZE * len(new) + _VALUE_SIZE * num_values
        if delta.finish_reason is not None:
            return True
        scored = self._jobs[delta.choice_index].request.sampling.num_logprobs is not None
        enough = progress.size // (_MAX_REPEATS_SCORED if scored else _MAX_REPEATS)
        return bool(delta.text or new) and (
            progress.size <= _EVERY_DELTA_SIZE or progress.size - progress.size_sent >= enough
        )

    def _keeps_tokens(self, job: Job) -> bool:
        return True

    def _body(self, index: int, answer: CollectedAnswer, progress: _EventProgress | None = None) -> GenerateAnswer:
        """Return an answer so far; `progress` is what earlier events have sent."""
        more: dict[str, Any] = {"index": index} if progress is not None and self._is_batch else {}
        answer.text = ["".join(answer.text)]
        return GenerateAnswer(
            text=answer.text[0],
            output_ids=[token.id for token in answer.tokens],
            meta_info=self._meta(index, answer),
            **more,
            **self._trace(index, answer.tokens[0 if progress is None else progress.num_tokens_sent :], answer.trees),
        )

    def _meta(self, index: int, answer: CollectedAnswer) -> GenerateMeta:
        job = self._jobs[index]
        more: dict[str, Any] = {}
        if rounds := answer.usage.num_rounds:
            more = {"spec_accept_length": round(answer.usage.accept_length, 3), "spec_verify_ct": rounds}
        return GenerateMeta(
            id=self._ids[index],
            finish_reason=_finish(answer),
            prompt_tokens=len(job.prompt_token_ids),
            completion_tokens=len(answer.tokens),
            cached_tokens=answer.usage.cached_prompt_tokens,
            weight_version=self._head["system_fingerprint"],
            e2e_latency=round(time.monotonic() - job.arrived, 6),
            **more,
            **self._logprobs(index, answer),
        )

    def _logprobs(self, index: int, answer: CollectedAnswer) -> dict[str, Any]:
        job, start = self._jobs[index], self._logprob_starts[index]
        num_top = job.request.sampling.num_logprobs
        if num_top is None:
            return {}
        own, top = ([], []) if start is None else self._prompt(job, answer.prompt_logprobs)
        with_logprobs = [(token.id, token.logprobs) for token in answer.tokens if token.logprobs is not None]
        fields: dict[str, Any] = {
            "input_token_logprobs": own[start:],
            "output_token_logprobs": [self._scored(logprobs.logprob, token_id) for token_id, logprobs in with_logprobs],
        }
        if num_top:
            fields["input_top_logprobs"] = top[start:]
            fields["output_top_logprobs"] = [
                [self._scored(value, token_id) for token_id, value in logprobs.top] for _, logprobs in with_logprobs
            ]
        return fields

    def _prompt(self, job: Job, parts: Sequence[PromptLogprobs]) -> tuple[list[Scored], list[list[Scored] | None]]:
        own: list[Scored] = [self._scored(None, job.prompt_token_ids[0])]
        top: list[list[Scored] | None] = [None]
        for position, value, _, likely in prompt_positions(parts):
            own.append(self._scored(value, job.prompt_token_ids[position]))
            top.append([self._scored(likely_value, token) for token, likely_value in likely])
        return own, top

    def _scored(self, logprob: float | None, token_id: int) -> Scored:
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") if self._with_text else None
        return None if logprob is None else finite(logprob), token_id, text


def _finish(answer: CollectedAnswer) -> GenerateFinish | None:
    if answer.finish_reason is None:
        return None
    if answer.finish_reason is FinishReason.LENGTH:
        return GenerateFinish(type="length", length=len(answer.tokens))
    return GenerateFinish(type="stop", matched=answer.matched_stop)
