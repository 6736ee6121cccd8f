"""Routes about the gateway, its model and its tokenizer: models, health, metrics, tokenize and detokenize."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.core.admission import admit, check_ids, render_chat
from gateway.core.catalogue import GatewayModel
from gateway.core.metrics import CONTENT_TYPE
from gateway.core.request import (
    MAX_PROMPT_TOKENS,
    MAX_TOOLS,
    Chat,
    ClientRequest,
    PromptEnd,
    StrictModel,
    Text,
    TokenId,
)
from gateway.core.service import Gateway
from gateway.core.validation import validate
from gateway.http.body import BodyReader
from gateway.http.responses import DOOR, PART_BYTES, Body, json_bytes, run_while_connected, send_json
from gateway.openai.chat import Messages, ToolBody
from gateway.openai.fields import TemplateFields, template_values
from outrider import __version__
from outrider.chat_template import special_tokens
from outrider.config.gateway import GatewayOptions
from outrider.errors import InvalidRequestError, OverloadedError, UnavailableError

_PROBE_SECONDS = 20.0
"""How long a token may take before /health_generate reports the service as unhealthy."""
_INLINE_SIZE = 4096
"""Characters or tokens up to which the event loop does the work itself, in well under a millisecond."""
_MAX_UNSENT_BYTES = 1 << 28
"""Limit of a route's unsent answers together; those up to PART_BYTES do not count. A single answer may be larger."""


class ModelBody(Body):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["outrider"]
    root: str
    parent: None
    max_model_len: int
    """Most tokens of prompt and output together."""
    default_sampling_params: dict[str, float | int]
    """Values of sampling fields that a request leaves out, as far as generation_config.json has them; `max_tokens` is
    the limit for every answer."""


class ModelList(Body):
    """Answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class ModelInfo(Body):
    """Answer to GET /get_model_info, in SGLang's shape."""

    model_path: str
    """The served name; folders are not shown to clients."""
    tokenizer_path: str
    is_generation: Literal[True]
    preferred_sampling_params: dict[str, float | int] | None
    """Like default_sampling_params of /v1/models; null if there are none."""
    weight_version: str
    max_model_len: int
    vocab_size: int
    dtype: str
    """Number format that the model computes in: "float32", "bfloat16" or "float16"; empty if verify does not say."""


class InternalState(Body):
    """What the services have done since the gateway started."""

    avg_spec_accept_length: float
    """Mean number of tokens committed in a round; 0 before the first round."""


class ServerInfo(Body):
    """Answer to GET /server_info, in SGLang's shape; SGLang's benchmark reads the accept length from it."""

    model_path: str
    """The served name; folders are not shown to clients."""
    version: str
    """Release of the gateway."""
    internal_states: list[InternalState]
    """A list of one."""


class TokenizerInfo(Body):
    """Answer to GET /tokenizer_info, in vLLM's shape: tokenizer_config.json with special tokens as plain text."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None = None


class Version(Body):
    """Answer to GET /version."""

    version: str


class Status(Body):
    """Answer to GET /health and GET /ready."""

    status: Literal["ok", "ready", "not ready"]


class ServerLoad(Body):
    """Answer to GET /load, in vLLM's shape."""

    server_load: int
    """Requests being served."""


class InfoRoutes:
    """Handlers of routes without a body."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/get_model_info", self._model_info),
            Route("/model_info", self._model_info),
            Route("/get_server_info", self._server_info),
            Route("/server_info", self._server_info),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/version", self._version),
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/load", self._load),
            Route("/health_generate", self._health_generate),
            Route("/ready", self._ready),
            Route("/metrics", self.metrics),
        ]

    async def _models(self, request: Request) -> Response:
        return _json(ModelList(object="list", data=[_model_body(self._gateway.model)]))

    async def _model(self, request: Request) -> Response:
        model = self._gateway.model
        model.check_name(request.path_params["model"])
        return _json(_model_body(model))

    async def _model_info(self, request: Request) -> Response:
        model = self._gateway.model
        body = ModelInfo(
            model_path=model.name,
            tokenizer_path=model.name,
            is_generation=True,
            preferred_sampling_params=model.defaults or None,
            weight_version=model.fingerprint,
            max_model_len=model.context_length,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
        )
        return _json(body)

    async def _server_info(self, request: Request) -> Response:
        name = self._gateway.model.name
        state = InternalState(avg_spec_accept_length=self._gateway.metrics.mean_accept_lengths().get(name, 0.0))
        return _json(ServerInfo(model_path=name, version=__version__, internal_states=[state]))

    async def _tokenizer_info(self, request: Request) -> Response:
        tokenizer = self._gateway.catalogue.model.tokenizer
        template = tokenizer.chat_template
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config, **special_tokens(tokenizer.config)}
        return _json(TokenizerInfo(**fields | {"chat_template": None if template is None else template.source}))

    async def _version(self, request: Request) -> Response:
        return _json(Version(version=__version__))

    async def _health(self, request: Request) -> Response:
        return _json(Status(status="ok"))

    async def _load(self, request: Request) -> Response:
        return _json(ServerLoad(server_load=self._gateway.gate.num_requests))

    async def _health_generate(self, request: Request) -> Response:
        """Generate a token, to see whether the service can."""
        with self._gateway.enter(DOOR):
            model = self._gateway.model
            job = await admit(ClientRequest(prompt_token_ids=[0], max_tokens=1), model, f"health-{uuid.uuid4().hex}")
            try:
                async with asyncio.timeout(_PROBE_SECONDS), aclosing(self._gateway.generate([job], model)) as deltas:
                    async for _ in deltas:
                        pass
            except TimeoutError:
                raise UnavailableError(f"no token came within {_PROBE_SECONDS:g} s", code="unhealthy") from None
        return _json(Status(status="ok"))

    async def _ready(self, request: Request) -> Response:
        ready = self._gateway.ready
        return _json(Status(status="ready" if ready else "not ready"), 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the Prometheus page."""
        gateway = self._gateway
        try:
            name = gateway.catalogue.model.name
        except UnavailableError:
            name = ""
        page = await gateway.metrics.render(name, gateway.router, gateway.gate)
        return Response(page, headers={"content-type": CONTENT_TYPE})


def _json(body: Body, status: int = 200) -> Response:
    return Response(json_bytes(body), status, media_type="application/json")


def _model_body(model: GatewayModel) -> ModelBody:
    return ModelBody(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="outrider",
        root=model.name,
        parent=None,
        max_model_len=model.context_length,
        default_sampling_params=model.defaults,
    )


class TokenizeRequest(TemplateFields, PromptEnd):
    """Body of POST /tokenize: a prompt, or a conversation."""

    model: Text | None = Field(None, description="Name of the served model; optional.")
    prompt: Text | None = Field(None, description="Text of at most about 1048576 tokens.")
    messages: Messages | None = Field(None, description="A conversation, rendered with the model's chat template.")
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the answer to the conversation may call."""
    add_special_tokens: bool | None = None
    """Add a beginning-of-sequence token if the model uses one. Default: true for a prompt, false for messages, whose
    template adds it."""
    return_token_strs: bool | None = Field(None, description="Also return the text of each token.")

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "exactly one of prompt and messages is needed", "set one")
        if self.tools and self.messages is None:
            raise InvalidRequestError("tools", "go with messages", "leave them out, or send messages")
        return self


class TokenizeBody(Body):
    """Answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: Text | None = Field(None, description="Name of the served model; optional.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
    """Token ids; special tokens appear in the text."""


class DetokenizeBody(Body):
    """Answer to POST /detokenize."""

    prompt: str


Prepared = tuple[int, Callable[[], bytes]]
"""Number of characters or tokens to work on, and the work, which returns the answer's body or raises OutriderError."""
Prepare = Callable[[Mapping[str, Any], GatewayModel, bool], Prepared]
"""Takes a body, the model, and whether to ignore unknown fields."""


class TokenizerRoute:
    """An ASGI application for one route that needs only the tokenizer."""

    def __init__(self, gateway: Gateway, options: GatewayOptions, bodies: BodyReader, prepare: Prepare) -> None:
        self._gateway = gateway
        self._ignores = options.ignore_unknown_fields
        self._bodies = bodies
        self._prepare = prepare
        self._num_unsent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises OutriderError."""
        with self._gateway.counted(DOOR):
            self._gateway.gate.check()
            answer = await self._answer(scope, receive)
            if answer is not None:
                await self._send(answer, send)

    async def _answer(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the answer's body; None if the client has gone."""
        model = self._gateway.catalogue.model
        reading = self._bodies.open(Request(scope, receive), lambda body: self._prepare(body, model, self._ignores))
        async with reading as (size, work):
            with self._gateway.gate.enter():
                if size <= _INLINE_SIZE:
                    return work()
                # Putting a million tokens into JSON takes a second, as long as finding them.
                return await run_while_connected(receive, model.tokenizer.in_thread(size, work))

    async def _send(self, answer: bytes, send: Send) -> None:
        # The answer may be ten times as long as the request, and the client may read it as slowly as it likes.
        length = len(answer) if len(answer) > PART_BYTES else 0
        if length and self._num_unsent and self._num_unsent + length > _MAX_UNSENT_BYTES:
            raise OverloadedError(
                f"answers that clients have not read yet hold {self._num_unsent} bytes, the limit is "
                f"{_MAX_UNSENT_BYTES}; try again later, or send fewer at once"
            )
        self._num_unsent += length
        try:
            await send_json(send, answer)
        finally:
            self._num_unsent -= length


def prepare_tokenize(body: Mapping[str, Any], model: GatewayModel, ignore_unknown: bool) -> Prepared:
    """Check a POST /tokenize and prepare its work. Raises OutriderError."""
    request = validate(TokenizeRequest, body, ignore_unknown=ignore_unknown)
    model.check_name(request.model)
    messages = [message.plain() for message in request.messages or ()]
    ends = {name: getattr(request, name) for name in PromptEnd.model_fields}
    tools = [tool.function for tool in request.tools or ()]
    values = template_values(request.reasoning_effort, request.chat_template_kwargs)
    fields = {"messages": messages, "template_values": values, "tools": tools} | ends
    chat = validate(Chat, fields) if messages else None
    # A template may write much for each tool.
    size_of_tools = sum(_INLINE_SIZE + len(tool.model_dump_json()) for tool in tools)
    size = len(request.prompt or "") + (chat.size if chat else 0) + size_of_tools
    return size, partial(_tokenize, model, request, chat)


def _tokenize(model: GatewayModel, request: TokenizeRequest, chat: Chat | None) -> bytes:
    text, special = request.prompt or "", chat is None
    if chat is not None:
        text = render_chat(chat, model, "messages")
    if request.add_special_tokens is not None:
        special = request.add_special_tokens
    if model.tokenizer.is_longer(text, MAX_PROMPT_TOKENS):
        field = "prompt" if chat is None else "messages"
        problem = f"{len(text)} characters have more tokens than the limit of {MAX_PROMPT_TOKENS}"
        raise InvalidRequestError(field, problem, "send the text in parts")
    token_ids = model.tokenizer.encode(text, add_special_tokens=special)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": model.context_length, "tokens": token_ids}
    if request.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in token_ids]
    return json_bytes(TokenizeBody(**answer))


def prepare_detokenize(body: Mapping[str, Any], model: GatewayModel, ignore_unknown: bool) -> Prepared:
    """Check a POST /detokenize and prepare its work. Raises OutriderError."""
    request = validate(DetokenizeRequest, body, ignore_unknown=ignore_unknown)
    model.check_name(request.model)
    # Models pad their vocabulary: an id without a token may be generated, but has no text.
    check_ids(request.tokens, model.vocab_size, "tokens")
    decode = partial(model.tokenizer.decode, request.tokens, skip_special_tokens=False)
    return len(request.tokens), lambda: json_bytes(DetokenizeBody(prompt=decode()))
