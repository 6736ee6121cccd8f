"""Turns a request on the wire into one that the engine can trust. Torch-free."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from outrider.errors import ContextLengthError, InvalidRequestError
from outrider.grammar.spec import Grammar, check_grammar
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
    """Checks requests against the model's limits. The gateway has checked them already; this door trusts no caller."""

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
