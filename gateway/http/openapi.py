"""/openapi.json, made from the models that validate requests and build responses; and /docs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http.info import (
    DetokenizeBody,
    DetokenizeRequest,
    ModelBody,
    ModelInfo,
    ModelList,
    ServerInfo,
    ServerLoad,
    Status,
    TokenizeBody,
    TokenizeRequest,
    TokenizerInfo,
    Version,
)
from gateway.http.responses import ErrorBody
from gateway.openai.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from gateway.openai.completions import Completion, CompletionRequest
from gateway.openai.responses import ResponseBody, ResponseEvent
from gateway.openai.responses_request import ResponsesRequest
from gateway.sglang import GenerateAnswer, GenerateAnswers, GenerateBody
from outrider import __version__

_ERRORS = {
    "400": "A field is wrong; the message names the field, its limit and the fix.",
    "401": "The bearer token is missing or wrong.",
    "404": "The model is not served here.",
    "408": "The body did not arrive in time.",
    "413": "The body is over the limit.",
    "415": "The body is not application/json.",
    "429": "Too many answers in progress; see Retry-After.",
    "500": "An error of the server.",
    "503": "No verify service is ready, or the gateway is shutting down; see Retry-After.",
    "504": "The answer was not complete before its deadline.",
}
_STREAMED = "The answer; with `stream` a server-sent event for each chunk, then `data: [DONE]`."


class _Document:
    """Makes operations, and collects the models that they refer to."""

    def __init__(self) -> None:
        self.models: dict[type[BaseModel], Literal["validation", "serialization"]] = {}

    def post(
        self, summary: str, request: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel] | None = None
    ) -> dict[str, Any]:
        """Return an operation with a body; `chunk` is an event of its streamed answer."""
        body = {"required": True, "content": self._content(request, "validation")}
        success = self._answer(answer, "OK" if chunk is None else _STREAMED)
        if chunk is not None:
            success["content"]["text/event-stream"] = self._content(chunk)["application/json"]
        errors = {status: self._answer(ErrorBody, text) for status, text in _ERRORS.items()}
        return {"post": {"summary": summary, "requestBody": body, "responses": {"200": success} | errors}}

    def get(self, summary: str, answer: type[BaseModel], *statuses: str, **more: Any) -> dict[str, Any]:
        """Return an operation without a body; `statuses` are those of the errors that it may end with."""
        errors = {status: self._answer(ErrorBody, _ERRORS[status]) for status in statuses}
        return {"get": {"summary": summary, "responses": {"200": self._answer(answer, "OK")} | errors} | more}

    def _answer(self, model: type[BaseModel], description: str) -> dict[str, Any]:
        return {"description": description, "content": self._content(model)}

    def _content(
        self, model: type[BaseModel], mode: Literal["validation", "serialization"] = "serialization"
    ) -> dict[str, Any]:
        self.models[model] = mode
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}

    def ready(self) -> dict[str, Any]:
        """Return GET /ready, whose body has the same shape if it fails."""
        operation = self.get("Whether a request would be served", Status, security=[])
        down = self._answer(Status, "No verify service is ready, or the gateway is shutting down.")
        operation["get"]["responses"]["503"] = down
        return operation


def openapi(*, authenticated: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `authenticated`: whether a bearer token is needed."""
    make = _Document()
    model_name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    text = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    html = {"description": "HTML"}
    described = "Describe the served model, in SGLang's shape"
    paths = {
        "/v1/chat/completions": make.post(
            "Answer a conversation", ChatCompletionRequest, ChatCompletion, ChatCompletionChunk
        ),
        "/v1/completions": make.post("Continue a prompt", CompletionRequest, Completion, Completion),
        "/v1/responses": make.post("Answer a conversation, in items", ResponsesRequest, ResponseBody, ResponseEvent),
        "/generate": make.post("Generate, in SGLang's shape", GenerateBody, GenerateAnswers, GenerateAnswer),
        "/tokenize": make.post("Convert text to token ids", TokenizeRequest, TokenizeBody),
        "/detokenize": make.post("Convert token ids to text", DetokenizeRequest, DetokenizeBody),
        "/tokenizer_info": make.get("Show the tokenizer's configuration", TokenizerInfo, "401", "503"),
        "/v1/models": make.get("List the served models", ModelList, "401", "503"),
        "/v1/models/{model}": make.get(
            "Describe a served model", ModelBody, "401", "404", "503", parameters=[model_name]
        ),
        "/get_model_info": make.get(described, ModelInfo, "401", "503"),
        "/model_info": make.get("Newer name of /get_model_info", ModelInfo, "401", "503"),
        "/server_info": make.get("State of the server, in SGLang's shape", ServerInfo, "401", "503"),
        "/get_server_info": make.get("Older name of /server_info", ServerInfo, "401", "503"),
        "/version": make.get("The release of this gateway", Version, "401"),
        "/health_generate": make.get("Whether a token can be generated", Status, "401", "429", "503"),
        "/health": make.get("Whether the process is running", Status, security=[]),
        "/ping": make.get("The same as /health, for load balancers that expect this path", Status, security=[]),
        "/load": make.get("Number of requests being served", ServerLoad, "401"),
        "/ready": make.ready(),
        "/metrics": {"get": {"summary": "Prometheus metrics", "responses": {"200": text}}},
        "/docs": {"get": {"summary": "This document as an HTML page", "responses": {"200": html}, "security": []}},
        "/openapi.json": {"get": {"summary": "This document", "responses": {"200": {"description": "OpenAPI 3.1"}}}},
    }
    _, schemas = models_json_schema(list(make.models.items()), ref_template="#/components/schemas/{model}")
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if authenticated:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


@cache
def documents(*, authenticated: bool) -> tuple[bytes, bytes]:
    """Return /openapi.json and /docs, a page without scripts that shows people the same; UTF-8. Making them takes a
    quarter of a second, too long for the start and for the event loop."""
    document = openapi(authenticated=authenticated)
    return json.dumps(document).encode(), "\n".join(_lines(document)).encode()


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    title = f"{document['info']['title']} {document['info']['version']}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head><body>'
    yield f'<h1>{escape(title)}</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>"
            body = operation.get("requestBody", {}).get("content", {})
            answer = operation["responses"]["200"].get("content", {})
            yield f"<p>Body: {_kinds(body) or 'none'}. Answer: {_kinds(answer)}</p>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p><dl>'
        for field, value in schema.get("properties", {}).items():
            yield f"<dt><code>{escape(field)}</code> {_kind(value)}</dt><dd>{escape(value.get('description', ''))}</dd>"
        yield "</dl>"
    yield "</body></html>"


def _kinds(content: Mapping[str, Any]) -> str:
    return ", ".join(f"{escape(media)} {_kind(value['schema'])}" for media, value in content.items())


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a schema in a few words, with links to the schemas that it refers to."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(kind for one in schema[joined] if (kind := _kind(one)))
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    return escape(str(schema.get("type", "")))
