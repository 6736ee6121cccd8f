"""One answer while it grows: tokens go in, deltas with final text come out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.core.reasoning import ReasoningSplitter
from gateway.core.request import Job
from gateway.core.tokenizer import StopMatcher, Tokenizer
from gateway.core.tool_parser import TextDelta, ToolCallDelta, ToolCallParser
from outrider.protocol.generation import FinishReason, GenerationUpdate, TokenLogprobs, TokenOrigin, Usage


class Token(msgspec.Struct, frozen=True):
    """One committed token as clients see it."""

    id: int
    origin: TokenOrigin
    text: str
    """Text that became final with the token, before any stop string cuts the answer's text."""
    logprobs: TokenLogprobs | None = None
    ends_answer: bool = False
    """Whether the token is the stop or end-of-sequence token that ended the answer; then it is not part of the text."""


class Delta(msgspec.Struct, frozen=True):
    """What is new of one answer: final text and calls, committed tokens, and at its end the reason."""

    choice_index: int
    parts: Sequence[TextDelta | ToolCallDelta]
    """Final text, and calls of tools, in order."""
    tokens: tuple[Token, ...]
    chunk: GenerationUpdate
    """What verify sent: rounds and their trees and, before the first token, log-probabilities of the prompt."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    """The token or the stop string that ended the answer; None if a limit did."""
    usage: Usage | None = None
    """Usage of the whole request, in the last delta of its last answer."""
    reasoning: str = ""
    """The model's reasoning, if it is separated from the answer: final text, like `text`."""
    parts_start: int = 0
    """Characters of the answer's tokens so far that came before all of its `parts`."""
    text_from: int = 0
    """Where text behind the last call begins, among the characters of text and calls."""

    @property
    def text(self) -> str:
        """The text outside of calls."""
        return "".join([part.text for part in self.parts if isinstance(part, TextDelta)])

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """What is new of the calls."""
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]


class Answer:
    """Detokenizes an answer, watches for stop strings and counts tokens. Does not call verify."""

    def __init__(self, job: Job, choice_index: int, tokenizer: Tokenizer, *, place: int) -> None:
        """`choice_index` counts the answers to the job, `place` all answers to the request; deltas carry `place`."""
        self.job = job
        self.request = job.answer(choice_index)
        """The request to verify."""
        self._place = place
        calls = job.tool_calls
        self._calls = None if calls is None else ToolCallParser(calls)
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=job.skips_special, shown=job.shown_tokens)
        self._stop = StopMatcher(job.stop, keep=job.keeps_stop)
        self._parts = ReasoningSplitter(job.reasoning)
        self._num_characters = 0
        """Characters of the text behind the reasoning."""
        self._num_before_stop = job.request.min_tokens
        """Tokens that must still come before stop strings count."""
        self.usage = Usage(prompt_tokens=len(job.prompt_token_ids))
        self.finish_reason: FinishReason | None = None

    def feed(self, chunk: GenerationUpdate) -> Delta:
        """Return what a chunk adds. A stop string finishes the answer, and tokens after it are dropped."""
        count_rounds(self.usage, chunk)
        if self.job.prompt_only:  # the one committed token is dropped
            reason = None if chunk.finish_reason is None else FinishReason.LENGTH
            chunk = GenerationUpdate(prompt_logprobs=chunk.prompt_logprobs, finish_reason=reason)
        tokens: list[Token] = []
        for index in range(len(chunk.token_ids)):
            token, final = self._take(chunk, index)
            tokens.append(token)
            self._parts.push(final)
            if self._stop.matched is not None:
                break
        if self._stop.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self._parts.push(self._finish(tokens), num_tokens=0)
        reasoning, text = self._parts.take(final=self.finish_reason is not None)
        self.usage.num_reasoning_tokens = self._parts.num_tokens
        self.usage.completion_tokens += len(tokens)
        matched: int | str | None = self._stop.matched
        if matched is None and tokens and tokens[-1].ends_answer:
            matched = tokens[-1].id
        return Delta(
            self._place,
            self._split(text),
            tuple(tokens),
            chunk,
            self.finish_reason,
            matched_stop=matched,
            reasoning=reasoning,
            parts_start=self._parts.text_start,
            text_from=0 if self._calls is None else self._calls.text_from,
        )

    def _split(self, text: str) -> Sequence[TextDelta | ToolCallDelta]:
        """Return what final text adds to the text outside of calls, and to the calls."""
        if self._calls is not None:
            news = self._calls.push(text)
            return news if self.finish_reason is None else news + self._calls.finish()
        start = self._num_characters
        self._num_characters += len(text)
        return (TextDelta(text, start, self._num_characters),) if text else ()

    def _take(self, chunk: GenerationUpdate, index: int) -> tuple[Token, str]:
        """Return one token of a chunk, and the text that is final with it."""
        token_id = chunk.token_ids[index]
        ends = chunk.finish_reason is FinishReason.STOP and index == len(chunk.token_ids) - 1
        piece = "" if ends else self._detokenizer.push(token_id)
        logprobs = chunk.logprobs[index] if chunk.logprobs else None
        token = Token(token_id, chunk.origins[index], piece, logprobs, ends)
        if self._num_before_stop:
            self._num_before_stop -= 1
            return token, piece
        return token, self._stop.push(piece)

    def _finish(self, tokens: list[Token]) -> str:
        """Return the text that was held back. The rest of an incomplete character is added to the last token's text."""
        rest = self._detokenizer.finish()
        if rest and tokens:
            tokens[-1] = msgspec.structs.replace(tokens[-1], text=tokens[-1].text + rest)
        text = self._stop.push(rest)
        if self._stop.matched is not None:
            self.finish_reason = FinishReason.STOP
            return text
        return text + self._stop.finish()


def count_rounds(usage: Usage, chunk: GenerationUpdate) -> None:
    """Add a chunk's rounds and what they committed, and note how many prompt tokens were in the cache."""
    usage.cached_prompt_tokens = max(usage.cached_prompt_tokens, chunk.cached_prompt_tokens)
    usage.num_rounds += len(chunk.rounds)
    usage.num_committed_tokens += len(chunk.token_ids)
    usage.num_draft_tokens += chunk.num_draft_tokens
    usage.num_accepted_tokens += chunk.num_accepted_tokens
