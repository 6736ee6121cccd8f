"""POST /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.core.answer import Delta, Token
from gateway.core.catalogue import GatewayModel
from gateway.core.request import MAX_CHOICES, Job, PromptText, TokenIdList
from gateway.openai.fields import ListForPrompts, NamedRequests, Only, OpenAIRequest, prompt_requests
from gateway.openai.generation import (
    AnswerHead,
    ChoiceEnd,
    ChoicesBuilder,
    CollectedAnswer,
    FinishWord,
    UsageBody,
    finish_word,
)
from gateway.openai.logprobs import (
    CompletionLogprobs,
    PromptLogprobsBody,
    TraceBody,
    add_completion_logprob,
    completion_logprobs,
    prompt_positions,
)
from outrider.errors import InvalidRequestError
from outrider.sampling.params import MAX_LOGPROBS

_DEFAULT_TOKENS = 16


def prompt_kind(value: Any) -> str:
    """Return the tag for a prompt in one of its four forms."""
    if not isinstance(value, list):
        return "@text"
    first = value[0] if value else None
    return "@texts" if isinstance(first, str) else "@lists" if isinstance(first, list) else "@ids"


Prompt = Annotated[
    Annotated[PromptText, Tag("@text")]
    | Annotated[ListForPrompts[PromptText], Tag("@texts")]
    | Annotated[TokenIdList, Tag("@ids")]
    | Annotated[ListForPrompts[TokenIdList], Tag("@lists")],
    Discriminator(prompt_kind),
]


class CompletionRequest(OpenAIRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probabilities of each token and of this many most likely ones."""
    echo: bool | None = None
    """Begin the text with the prompt; with logprobs, also return those of the prompt's tokens."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description=f"Most tokens per answer. Default {_DEFAULT_TOKENS}. 0 only with echo or prompt_logprobs."
    )
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Another name of max_tokens."""
    suffix: Annotated[Any, Only("", why="insertion is not supported")] = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Number of answers to generate, of which the n with the highest mean log-probability per token are returned; not
    in a stream. Default n."""

    @model_validator(mode="after")
    def _zero_tokens_need_prompt_output(self) -> CompletionRequest:
        if self.limit == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError(
                self.limit_field,
                "is 0, and neither echo nor prompt_logprobs is set",
                "send at least 1, or set one of them",
            )
        return self

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequestError("best_of", f"is below n, which is {self.n}", "send at least n, or leave it out")
        if self.chooses and self.stream:
            raise InvalidRequestError(
                "best_of",
                "is not available in a stream: it needs complete answers",
                "set stream to false or leave it out",
            )
        return self

    @property
    def chooses(self) -> bool:
        """Whether more answers are made than are sent."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    def requests(self, max_prompts: int) -> NamedRequests:
        """Return the gateway's own requests, one for each prompt. Raises InvalidRequestError."""
        prompt_values = [self.prompt_logprobs, self.logprobs if self.echo else None]
        common = self.common(0 if self.logprobs is None and self.chooses else self.logprobs) | {
            "n": self.n if self.best_of is None else self.best_of,
            "num_prompt_logprobs": max((number for number in prompt_values if number is not None), default=None),
            # Verify always commits a token; with a limit of 0 it is dropped.
            "max_tokens": 1 if self.limit == 0 else self.limit,
            "default_max_tokens": _DEFAULT_TOKENS,
            "prompt_only": self.limit == 0,
        }
        return prompt_requests(self.prompt, "prompt", lambda _: (common, self.field_names), max_prompts)


class CompletionChoice(ChoiceEnd):
    """One of the completions, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """In a stream, only in the first event of the choice."""
    prompt_logprobs: PromptLogprobsBody | None = None
    trace: TraceBody | None = None


class Completion(AnswerHead):
    """Answer to POST /v1/completions, whole or one event of it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


def _mean_logprob(tokens: Sequence[Token]) -> float:
    values = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else 0.0


class CompletionBuilder(ChoicesBuilder):
    """Builds completions, whole or as events."""

    id_prefix = "cmpl"
    top_field = "logprobs"

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: CompletionRequest) -> None:
        super().__init__(model, jobs, body)
        self._body = body
        self._shows_prompt |= bool(body.echo)
        self._num_sent = (body.n or 1) if body.chooses else None
        self.prompt_field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        sent = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        texts = [prompt if isinstance(prompt, str) else None for prompt in sent[: len(jobs)]]
        self._texts = [text for job, text in zip(jobs, texts, strict=True) for _ in range(job.n)]
        """The prompt of each answer if it was sent as text, which its tokens may spell differently."""

    def whole(self) -> Completion:
        """See the base."""
        choices = []
        for place, index in enumerate(self._sent()):
            answer = self._answers[index]
            prompt, prompt_logprobs = self._echo(index, answer)
            logprobs = completion_logprobs(
                () if self._body.logprobs is None else answer.tokens,
                self._names,
                len(prompt),
                with_end=bool(self._body.echo),
                prompt=prompt_logprobs,
            )
            choices.append(
                CompletionChoice(
                    index=place,
                    text=prompt + "".join(answer.text),
                    logprobs=logprobs,
                    finish_reason=finish_word(answer.finish_reason),
                    **self._stopped_by(index, answer.matched_stop),
                    **self._ids(answer.tokens),
                    **self._prompt_ids(index),
                    **self._prompt_logprobs(index, self._body.prompt_logprobs),
                    **self._trace(index, answer.tokens, answer.trees),
                )
            )
        return self._chunk(choices, usage=UsageBody.of(self._usage))

    def _sent(self) -> list[int]:
        """Return the indices of the answers to send: if more were made, the likeliest ones for each prompt."""
        sent: list[int] = []
        first = 0
        while first < len(self._jobs):
            made = range(first, first + self._jobs[first].n)
            best = sorted(made, key=lambda index: -_mean_logprob(self._answers[index].tokens))
            sent += made if self._num_sent is None else best[: self._num_sent]
            first += len(made)
        return sent

    def _choices(self, delta: Delta, answer: CollectedAnswer) -> Iterator[CompletionChoice]:
        index, delta_text = delta.choice_index, delta.text
        answer.prompt_logprobs.extend(delta.chunk.prompt_logprobs if self._body.echo else ())
        ready = delta.tokens or delta.finish_reason is not None
        prompt_ids: dict[str, Any] = {}
        if ready and not answer.begun:
            answer.begun = True
            prompt_ids = self._prompt_ids(index)
            if self._body.echo:
                text, prompt_logprobs = self._echo(index, answer)
                answer.prompt_logprobs.clear()
                answer.num_characters = len(text)
                more: dict[str, Any] = self._ids(()) | prompt_ids
                yield CompletionChoice(index=index, text=text, logprobs=prompt_logprobs, finish_reason=None, **more)
                prompt_ids = {}
        logprobs = completion_logprobs(delta.tokens, self._names, answer.num_characters, with_end=bool(self._body.echo))
        answer.num_characters += sum(len(token.text) for token in delta.tokens)
        more = prompt_ids | self._about_tokens(delta)
        if delta_text or logprobs is not None or more or delta.finish_reason is not None:
            reason = None
            if delta.finish_reason is not None:
                reason = finish_word(delta.finish_reason)
                more |= self._stopped_by(index, delta.matched_stop)
            yield CompletionChoice(index=index, text=delta_text, logprobs=logprobs, finish_reason=reason, **more)

    def _echo(self, index: int, answer: CollectedAnswer) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt's text and log-probabilities, as far as they are echoed."""
        if not self._body.echo:
            return "", None
        token_ids, last = self._jobs[index].prompt_token_ids, len(self._jobs[index].prompt_token_ids) - 1
        # A character that several tokens share counts for the token that ends it.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [decoder.decode(self._tokenizer.token_bytes(token), i == last) for i, token in enumerate(token_ids)]
        text = self._texts[index]
        text = "".join(pieces) if text is None else text
        if self._body.logprobs is None:
            return text, None
        first = self._names.name(token_ids[0])
        lists = CompletionLogprobs(tokens=[first], token_logprobs=[None], top_logprobs=[None], text_offset=[0])
        offset = len(pieces[0])
        for position, value, _, top in prompt_positions(answer.prompt_logprobs, self._body.logprobs):
            add_completion_logprob(lists, token_ids[position], value, top, offset, self._names)
            offset += len(pieces[position])
        return text, lists

    def _chunk(self, choices: list[Any], **more: Any) -> Completion:
        return Completion(object="text_completion", choices=choices, **more, **self._head)
