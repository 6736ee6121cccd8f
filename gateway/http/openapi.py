"""/openapi.json, made from the models that requests are validated with and responses are built from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http.info import ModelInfo, TokenizerInfo, Version
from gateway.http.text import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest
from gateway.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    ModelBody,
    ModelList,
    Status,
)
from gateway.sglang.routes import GenerateBody
from gateway.sglang.shape import GenerateAnswer, GenerateAnswers
from outrider import __version__

_REQUESTS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    TokenizeRequest,
    DetokenizeRequest,
)
_RESPONSES: tuple[type[BaseModel], ...] = (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    ModelBody,
    ModelList,
    Status,
    GenerateAnswer,
    GenerateAnswers,
    TokenizeBody,
    DetokenizeBody,
    ModelInfo,
    TokenizerInfo,
    Version,
)

_ERRORS = {
    "400": "A field is wrong; the message names it, its limit and the fix.",
    "401": "The bearer token is missing or wrong.",
    "404": "The model is not served here.",
    "408": "The body did not arrive in time.",
    "413": "The body is over the limit.",
    "415": "The body is not application/json.",
    "429": "Too many answers in the making; see Retry-After.",
    "500": "A fault of the server.",
    "503": "No verify service is ready, or the gateway is shutting down; see Retry-After.",
    "504": "The answer was not complete in the time that it had.",
}


def openapi(*, authenticated: bool) -> dict[str, Any]:
    """The document, OpenAPI 3.1. `authenticated`: whether a bearer token is asked for."""
    pairs: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
        *((model, "validation") for model in _REQUESTS),
        *((model, "serialization") for model in _RESPONSES),
    ]
    _, schemas = models_json_schema(pairs, ref_template="#/components/schemas/{model}")
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": {
            "/v1/chat/completions": {"post": _generation("Answer a conversation", *_chat())},
            "/v1/completions": {"post": _generation("Continue a prompt", *_completion())},
            "/generate": {"post": _generation("Generate, in SGLang's shape", *_generate())},
            "/tokenize": {"post": _call("Text to token ids", TokenizeRequest, TokenizeBody)},
            "/detokenize": {"post": _call("Token ids to text", DetokenizeRequest, DetokenizeBody)},
            "/tokenizer_info": {"get": _read("What the tokenizer's configuration says", TokenizerInfo, "401", "503")},
            "/v1/models": {"get": _read("List the served models", ModelList, "401", "503")},
            "/v1/models/{model}": {"get": _model()},
            "/get_model_info": {"get": _read("Describe the served model, in SGLang's shape", ModelInfo, "401", "503")},
            "/model_info": {"get": _read("The newer name of /get_model_info", ModelInfo, "401", "503")},
            "/version": {"get": _read("The release of this gateway", Version, "401")},
            "/health_generate": {"get": _read("Whether a token can be generated", Status, "401", "429", "503")},
            "/health": {"get": _open(_read("Whether the process serves", Status))},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _text("Prometheus metrics")},
            "/openapi.json": {
                "get": {"summary": "This document", "responses": {"200": {"description": "OpenAPI 3.1"}}}
            },
        },
        "components": components,
    }
    if authenticated:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _json(model: type[BaseModel], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(model)}}}


def _chat() -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    return ChatCompletionRequest, ChatCompletion, ChatCompletionChunk


def _completion() -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    return CompletionRequest, Completion, Completion


def _generate() -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    return GenerateBody, GenerateAnswers, GenerateAnswer


def _call(summary: str, request: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": _json(answer, "OK")}
        | {status: _json(ErrorBody, text) for status, text in _ERRORS.items()},
    }


def _generation(
    summary: str, request: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel]
) -> dict[str, Any]:
    answer = _json(whole, "The answer; with `stream` a server-sent event for each chunk, then `data: [DONE]`.")
    answer["content"]["text/event-stream"] = {"schema": _ref(chunk)}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": answer} | {status: _json(ErrorBody, text) for status, text in _ERRORS.items()},
    }


def _read(summary: str, model: type[BaseModel], *statuses: str) -> dict[str, Any]:
    errors = {status: _json(ErrorBody, _ERRORS[status]) for status in statuses}
    return {"summary": summary, "responses": {"200": _json(model, "OK")} | errors}


def _model() -> dict[str, Any]:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return _read("Describe a served model", ModelBody, "401", "404", "503") | {"parameters": [name]}


def _ready() -> dict[str, Any]:
    operation = _read("Whether a request would be served", Status)
    operation["responses"]["503"] = _json(Status, "No verify service is ready, or the gateway is shutting down.")
    return _open(operation)


def _open(operation: dict[str, Any]) -> dict[str, Any]:
    return operation | {"security": []}


def _text(summary: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}}}
