"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.core.admission import ServedModel, check_ids, render_chat
from gateway.core.fields import MAX_MESSAGES, MAX_PROMPT_TOKENS, StrictModel, Text, TokenId
from gateway.core.service import Gateway
from gateway.core.validation import validate
from gateway.http.body import BodyReader
from gateway.http.stream import send_json
from gateway.openai.fields import Only
from gateway.openai.requests import ChatMessage
from gateway.openai.responses import Body

_INLINE = 4096
"""Characters, or tokens, up to which the event loop does the work itself, in well under a millisecond."""


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a prompt, or a conversation."""

    model: Text | None = Field(None, description="Name of the served model; may be left out.")
    prompt: Text | None = Field(None, description="Text.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description="A conversation, rendered with the model's chat template."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Put a beginning-of-sequence token where the model wants one. Default: true for a prompt, false "
        "for messages, whose template writes it.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="End the rendered messages where the answer begins. Default true."
    )
    return_token_strs: bool | None = Field(None, description="Tell each token's own text, too.")
    continue_final_message: Annotated[Any, Only(False, why="a last message is not continued")] = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "input", "exactly one of prompt and messages is needed; set one", {"field": "input"}
            )
        return self

    @property
    def num_characters(self) -> int:
        """Of the text, without what a template adds to it."""
        return len(self.prompt or "") + sum(len(message.plain()["content"]) for message in self.messages or ())


class TokenizeBody(Body):
    """Answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: Text | None = Field(None, description="Name of the served model; may be left out.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)] = Field(
        description="Token ids; special tokens are spelled out."
    )


class DetokenizeBody(Body):
    """Answer to POST /detokenize."""

    prompt: str


class TextRoute(ABC):
    """An ASGI application for one route that needs the tokenizer alone."""

    def __init__(self, gateway: Gateway, bodies: BodyReader, door: str) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Raises OutriderError."""
        with self._gateway.counted(self._door):
            self._gateway.gate.check()
            model = self._gateway.catalogue.model
            size, work = await self._bodies.read(Request(scope, receive), partial(self.prepare, model=model))
            with self._gateway.gate.enter():
                # A list of a million tokens takes a second to put into JSON, as long as to find them.
                answer = work() if size <= _INLINE else await asyncio.to_thread(work)
        await send_json(send, answer)

    @abstractmethod
    def prepare(self, body: Mapping[str, Any], model: ServedModel) -> tuple[int, Callable[[], bytes]]:
        """Characters or tokens to work on, and the work: it returns the answer's body. Both raise OutriderError."""


class TokenizeRoute(TextRoute):
    """POST /tokenize."""

    def prepare(self, body: Mapping[str, Any], model: ServedModel) -> tuple[int, Callable[[], bytes]]:
        """See the base."""
        parsed = validate(TokenizeRequest, body)
        model.check_name(parsed.model)
        return parsed.num_characters, partial(_tokenized, model, parsed)


class DetokenizeRoute(TextRoute):
    """POST /detokenize."""

    def prepare(self, body: Mapping[str, Any], model: ServedModel) -> tuple[int, Callable[[], bytes]]:
        """See the base."""
        parsed = validate(DetokenizeRequest, body)
        model.check_name(parsed.model)
        # Models pad their vocabulary: an id without a token may be generated, and has no text.
        check_ids(parsed.tokens, model.vocab_size, "tokens")
        return len(parsed.tokens), partial(_detokenized, model, parsed.tokens)


def _tokenized(model: ServedModel, asked: TokenizeRequest) -> bytes:
    tokenizer = model.tokenizer
    text, special = asked.prompt or "", asked.messages is None
    if asked.messages is not None:
        messages = [message.plain() for message in asked.messages]
        ends_open = asked.add_generation_prompt is not False
        text = render_chat(messages, model, "messages", add_generation_prompt=ends_open)
    if asked.add_special_tokens is not None:
        special = asked.add_special_tokens
    token_ids = tokenizer.encode(text, add_special_tokens=special)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": model.context_length, "tokens": token_ids}
    if asked.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in token_ids]
    return TokenizeBody(**answer).json_bytes()


def _detokenized(model: ServedModel, token_ids: Sequence[int]) -> bytes:
    return DetokenizeBody(prompt=model.tokenizer.decode(token_ids, skip_special_tokens=False)).json_bytes()
