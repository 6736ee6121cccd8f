"""GET routes that tell of the gateway and its model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.admission import ServedModel, admit
from gateway.core.chat_template import special_tokens
from gateway.core.metrics import CONTENT_TYPE
from gateway.core.request import GenerateRequest
from gateway.core.service import Gateway
from gateway.openai.responses import Body, ModelBody, ModelList, Status
from outrider import __version__
from outrider.errors import NotFoundError, UnavailableError

_PROBE_SECONDS = 20.0
"""How long a token may take before /health_generate calls the service ill."""


class ModelInfo(Body):
    """Answer to GET /get_model_info, in SGLang's shape."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_path: str
    """The served name: folders of the server are nobody's business."""
    tokenizer_path: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    weight_version: str
    max_model_len: int
    vocab_size: int
    dtype: str
    """What the model computes in: "float32", "bfloat16" or "float16"; empty where verify does not say."""


class TokenizerInfo(Body):
    """Answer to GET /tokenizer_info, in vLLM's shape: tokenizer_config.json with special tokens as plain text."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None = None


class Version(Body):
    """Answer to GET /version."""

    version: str


class InfoRoutes:
    """Handlers of routes without a body."""

    def __init__(self, gateway: Gateway, door: str) -> None:
        self._gateway = gateway
        self._door = door

    def routes(self) -> list[Route]:
        """Paths, and what serves them."""
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/get_model_info", self._model_info),
            Route("/model_info", self._model_info),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/version", self._version),
            Route("/health", self._health),
            Route("/health_generate", self._health_generate),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
        ]

    async def _models(self, request: Request) -> Response:
        return _json(ModelList(object="list", data=[_model_body(self._gateway.model)]))

    async def _model(self, request: Request) -> Response:
        model = self._gateway.model
        name = request.path_params["model"]
        if name != model.name:
            raise NotFoundError("model", f"model: {name[:80]!r} is not served here; use {model.name!r}")
        return _json(_model_body(model))

    async def _model_info(self, request: Request) -> Response:
        model = self._gateway.model
        body = ModelInfo(
            model_path=model.name,
            tokenizer_path=model.name,
            is_generation=True,
            preferred_sampling_params=None,
            weight_version=model.fingerprint,
            max_model_len=model.context_length,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
        )
        return _json(body)

    async def _tokenizer_info(self, request: Request) -> Response:
        tokenizer = self._gateway.catalogue.model.tokenizer
        fields: Mapping[str, Any] = tokenizer.config | special_tokens(tokenizer.config)
        template = tokenizer.chat_template
        more = {"chat_template": None if template is None else template.source}
        return _json(TokenizerInfo(**{"tokenizer_class": "PreTrainedTokenizerFast"} | dict(fields) | more))

    async def _version(self, request: Request) -> Response:
        return _json(Version(version=__version__))

    async def _health(self, request: Request) -> Response:
        return _json(Status(status="ok"))

    async def _health_generate(self, request: Request) -> Response:
        """Whether a token can be had: one is generated."""
        with self._gateway.enter(self._door):
            model = self._gateway.model
            job = await admit(GenerateRequest(prompt_token_ids=[0], max_tokens=1), model, f"health-{uuid.uuid4().hex}")
            try:
                async with (
                    asyncio.timeout(_PROBE_SECONDS),
                    aclosing(self._gateway.engine.generate([job], model)) as deltas,
                ):
                    async for _ in deltas:
                        pass
            except TimeoutError:
                raise UnavailableError(f"no token came within {_PROBE_SECONDS:g} s", code="unhealthy") from None
        return _json(Status(status="ok"))

    async def _ready(self, request: Request) -> Response:
        ready = self._gateway.ready
        return _json(Status(status="ready" if ready else "not ready"), 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._gateway.render_metrics(), headers={"content-type": CONTENT_TYPE})


def _json(body: Body, status: int = 200) -> Response:
    return Response(body.json_bytes(), status, media_type="application/json")


def _model_body(model: ServedModel) -> ModelBody:
    return ModelBody(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="outrider",
        root=model.name,
        parent=None,
        max_model_len=model.context_length,
    )
