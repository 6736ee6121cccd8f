"""Between the messages of the gRPC door and the gateway's own types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from gateway.core.admission import ServedModel
from gateway.core.events import Delta, Usage
from gateway.core.fields import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_PROMPT_TOKENS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from gateway.core.request import GenerateRequest
from gateway.core.validation import validate
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import check_grammar
from outrider.protocol.generation import TokenLogprobs
from outrider.protocol.generation_codec import decode_grammar, encode_prompt_logprobs, encode_tree
from outrider.v1 import common_pb2, gateway_pb2

_SPECULATION = {gateway_pb2.SPECULATION_ON: "on", gateway_pb2.SPECULATION_OFF: "off"}
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "num_logprobs",
)


def decode_request(message: gateway_pb2.GatewayServiceGenerateRequest) -> GenerateRequest:
    """The request, validated like a REST one. Raises InvalidRequestError."""
    fields: dict[str, Any] = {
        "model": message.model or None,
        "stop": _bounded(message.stop, MAX_STOP_STRINGS, "stop") or None,
        "stop_token_ids": _bounded(message.stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids") or None,
        "ignore_eos": message.ignore_eos,
        "priority": message.priority,
        "cache_salt": message.cache_salt,
        "trace": message.trace,
        "sampling": _sampling(message.sampling),
    }
    for name in ("n", "max_tokens", "num_prompt_logprobs"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    if message.speculation != gateway_pb2.SPECULATION_UNSPECIFIED:
        fields["speculation"] = _SPECULATION.get(message.speculation, message.speculation)
    if message.HasField("grammar"):
        fields["grammar"] = decode_grammar(message.grammar)
        check_grammar(fields["grammar"])
    match message.WhichOneof("input"):
        case "prompt":
            fields["prompt"] = message.prompt
        case "prompt_token_ids":
            fields["prompt_token_ids"] = _bounded(message.prompt_token_ids.ids, MAX_PROMPT_TOKENS, "prompt_token_ids")
        case "chat":
            messages = _bounded(message.chat.messages, MAX_MESSAGES, "chat.messages")
            fields["chat"] = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        case _:
            raise InvalidRequestError(
                "input", "missing", "set prompt, prompt_token_ids or chat", code="missing_required_parameter"
            )
    return validate(GenerateRequest, fields)


def _sampling(message: common_pb2.SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(message, name) for name in _SAMPLING if message.HasField(name)}
    if message.logit_bias:
        _check_length(len(message.logit_bias), MAX_LOGIT_BIAS, "sampling.logit_bias")
        fields["logit_bias"] = dict(message.logit_bias)
    return fields


def _bounded(values: Sequence[Any], limit: int, field: str) -> list[Any]:
    # A message of 8 MB holds millions of empty entries: they are counted before a Python object is made of each.
    _check_length(len(values), limit, field)
    return list(values)


def _check_length(length: int, limit: int, field: str) -> None:
    if length > limit:
        raise InvalidRequestError(field, f"{length} entries, over the limit of {limit}", f"send at most {limit}")


def encode_delta(request_id: str, delta: Delta) -> gateway_pb2.GatewayServiceGenerateResponse:
    """News of one answer."""
    tokens = delta.tokens
    return gateway_pb2.GatewayServiceGenerateResponse(
        request_id=request_id,
        choice_index=delta.choice_index,
        text=delta.text,
        token_ids=[t.id for t in tokens],
        origins=cast(Any, [int(t.origin) for t in tokens]),
        logprobs=[_logprobs(t.logprobs) for t in tokens if t.logprobs is not None],
        finish_reason=cast(Any, int(delta.finish_reason or 0)),
        usage=None if delta.usage is None else _usage(delta.usage),
        text_lengths=[len(t.text.encode()) for t in tokens],
        prompt_logprobs=[encode_prompt_logprobs(part) for part in delta.prompt_logprobs],
        rounds=[encode_tree(tree) for tree in delta.trees],
    )


def _logprobs(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=entry.logprob,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(**{name: getattr(usage, name) for name in Usage.__slots__})


def encode_models(model: ServedModel) -> gateway_pb2.GatewayServiceListModelsResponse:
    """The served models."""
    return gateway_pb2.GatewayServiceListModelsResponse(
        models=[gateway_pb2.Model(id=model.name, context_length=model.context_length)]
    )
