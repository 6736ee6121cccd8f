"""POST /generate: SGLang's request, and how it becomes the gateway's own."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.admission import ServedModel, admit
from gateway.core.fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingFields,
    StopStrings,
    StrictModel,
    Text,
    TokenId,
    TokenIdList,
)
from gateway.core.request import GenerateRequest, Job
from gateway.core.validation import validate
from gateway.openai.fields import Only
from gateway.openai.formats import SglangFormatFields
from gateway.openai.generation import GenerationRoute, Named, check_prompts
from gateway.sglang.shape import GenerateShape

_MAX_PROMPTS = 4096
_DEFAULT_NEW_TOKENS = 128


def _kind(value: Any) -> str:
    return "@texts" if isinstance(value, list) else "@text"


def _ids_kind(value: Any) -> str:
    return "@lists" if isinstance(value, list) and value and isinstance(value[0], list) else "@ids"


_PromptText = Annotated[Text, Field(min_length=1)]
_Texts = Annotated[
    Annotated[_PromptText, Tag("@text")]
    | Annotated[list[_PromptText], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True), Tag("@texts")],
    Discriminator(_kind),
]
_Ids = Annotated[
    Annotated[TokenIdList, Tag("@ids")]
    | Annotated[list[TokenIdList], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True), Tag("@lists")],
    Discriminator(_ids_kind),
]


class GenerateSampling(SamplingFields, SglangFormatFields):
    """SGLang's sampling_params."""

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description=f"Most tokens to generate. Default {_DEFAULT_NEW_TOKENS}; 0 tells of the prompt alone."
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Answers per prompt. Default 1.")
    stop: StopStrings | None = Field(None, description="An answer ends before any of these strings.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = Field(
        None, description="Tokens that end an answer; they are not part of its text."
    )
    ignore_eos: bool | None = Field(None, description="Go on past the end-of-sequence token.")
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="The same as seed.")
    min_new_tokens: Annotated[Any, Only(0, why="a least number of tokens is not supported")] = None
    skip_special_tokens: Annotated[Any, Only(True, why="special tokens are never part of the text")] = None
    spaces_between_special_tokens: bool | None = Field(None, description="Taken and not used.")
    no_stop_trim: Annotated[Any, Only(False, why="a stop string is never part of the text")] = None


class GenerateBody(StrictModel):
    """Body of POST /generate: one prompt or several, as text or token ids."""

    model: Text | None = Field(None, description="Name of the served model; may be left out.")
    text: _Texts | None = Field(None, description="A text, or a list of texts.")
    input_ids: _Ids | None = Field(None, description="Token ids, or a list of lists of them.")
    sampling_params: GenerateSampling | None = Field(None, description="How tokens are chosen, for all prompts.")
    stream: bool | None = Field(
        None, description="Send events; each has the whole text so far. A long answer gets fewer of them."
    )
    rid: Annotated[Text, Field(max_length=256)] | None = Field(None, description="The id that the answer is to have.")
    return_logprob: bool | None = Field(None, description="Tell the log-probability of each token.")
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="First position of the prompt to tell of. Default -1: the answer's tokens alone."
    )
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Tell this many of the most likely tokens at each position, too."
    )
    return_text_in_logprobs: bool | None = Field(None, description="Tell the tokens' text beside their ids.")
    speculation: Annotated[Any, Only("on", "off", why="speculation is on or off")] = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Requests with a lower number are served earlier. Default 0."
    )
    cache_salt: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="Shares cached prefixes and n-grams with requests of the same key and the same salt alone."
    )
    trace: bool | None = Field(
        None, description="Tell, round by round, the tree that was verified and where each token came from."
    )
    log_metrics: bool | None = Field(None, description="Taken and not used.")
    return_hidden_states: Annotated[Any, Only(False, why="hidden states are not told")] = None
    image_data: Annotated[Any, Only(why="only text is supported")] = None
    lora_path: Annotated[Any, Only(why="adapters are not supported")] = None

    @model_validator(mode="after")
    def _one_input(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError(
                "input", "exactly one of text and input_ids is needed; set one", {"field": "input"}
            )
        return self

    @property
    def is_batch(self) -> bool:
        """Whether a list is answered with a list, as is a prompt with several answers."""
        several = (self.sampling_params or GenerateSampling()).n
        prompts = self.text if self.input_ids is None else self.input_ids[0]
        return isinstance(prompts, list) or bool(several and several > 1)

    @property
    def logprob_start(self) -> int | None:
        """First position of the prompt whose log-probability is told; None for none of it."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    def requests(self) -> list[tuple[GenerateRequest, dict[str, str]]]:
        """The gateway's own requests, one a prompt, each with what this body calls its fields."""
        sampling = self.sampling_params or GenerateSampling()
        fields: dict[str, Any] = {name: getattr(sampling, name) for name in SamplingFields.model_fields}
        if sampling.sampling_seed is not None:
            fields["seed"] = sampling.sampling_seed
        num_top = self.top_logprobs_num or 0
        fields["num_logprobs"] = num_top if self.return_logprob else None
        limit = _DEFAULT_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
        common = {
            "model": self.model,
            "sampling": fields,
            "n": sampling.n,
            "max_tokens": max(limit, 1),
            "prompt_only": limit == 0,
            "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "speculation": self.speculation,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "trace": self.trace,
            "num_prompt_logprobs": None if self.logprob_start is None else num_top,
            "grammar": sampling.grammar,
        }
        names = {
            "max_tokens": "sampling_params.max_new_tokens",
            "logit_bias": "sampling_params.logit_bias",
            "grammar": sampling.grammar_field,
            "prompt": "text",
            "prompt_token_ids": "input_ids",
        }
        inner, outer = ("prompt", self.text) if self.input_ids is None else ("prompt_token_ids", self.input_ids)
        if isinstance(outer, str) or (outer is not None and isinstance(outer[0], int)):
            return [(validate(GenerateRequest, common | {inner: outer}), names)]
        return [
            (validate(GenerateRequest, common | {inner: prompt}), names | {inner: f"{names[inner]}[{index}]"})
            for index, prompt in enumerate(outer or [])
        ]


class GenerateRoute(GenerationRoute[tuple[GenerateBody, Named]]):
    """POST /generate."""

    def _parse(self, body: Mapping[str, Any]) -> tuple[GenerateBody, Named]:
        parsed = validate(GenerateBody, body)
        field, prompts = ("text", parsed.text) if parsed.input_ids is None else ("input_ids", parsed.input_ids)
        if isinstance(prompts, list) and not isinstance(prompts[0], int):
            check_prompts(len(prompts), self._options.max_prompts, field)
        return parsed, parsed.requests()

    async def _prepare(
        self, both: tuple[GenerateBody, Named], model: ServedModel
    ) -> tuple[Sequence[Job], GenerateShape, bool]:
        parsed, requests = both
        request_id = f"{GenerateShape.prefix}-{uuid.uuid4().hex}"
        jobs = [
            await admit(request, model, request_id if index == 0 else f"{request_id}-{index}", names)
            for index, (request, names) in enumerate(requests)
        ]
        shape = GenerateShape(
            model,
            jobs,
            name=parsed.rid,
            is_batch=parsed.is_batch,
            logprob_start=parsed.logprob_start,
            with_text=bool(parsed.return_text_in_logprobs),
        )
        return jobs, shape, bool(parsed.stream)
