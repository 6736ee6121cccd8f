"""The gRPC door, and the conversion between its messages and the gateway's own types."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from pydantic import BaseModel

from gateway.core.admission import admit
from gateway.core.answer import Delta
from gateway.core.request import (
    MAX_BAD_WORDS,
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_VALUES_BYTES,
    MAX_TOOLS,
    Chat,
    ClientRequest,
    RequestMessage,
    RequestSampling,
    Tool,
    ToolCall,
)
from gateway.core.service import Gateway
from gateway.core.tool_grammar import check_tools
from gateway.core.tool_parser import read_json
from gateway.core.validation import validate
from outrider.config.gateway import GatewayOptions
from outrider.errors import InvalidRequestError, OverloadedError
from outrider.grammar.spec import MAX_SOURCE_BYTES, check_grammar
from outrider.protocol.generation_codec import TREE, USAGE, decode_grammar, encode_logprobs, encode_prompt_logprobs
from outrider.rpc.call import limit_time
from outrider.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from outrider.v1 import gateway_pb2
from outrider.v1.gateway_pb2_grpc import GatewayServiceServicer

_SPECULATION = {gateway_pb2.SPECULATION_ON: "on", gateway_pb2.SPECULATION_OFF: "off"}
_BOUNDS = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
}
"""Most entries of each repeated field."""


def decode_request(message: gateway_pb2.GatewayServiceGenerateRequest) -> ClientRequest:
    """Return the request, validated like a REST one. Raises InvalidRequestError."""
    apart = {"prompt", "prompt_token_ids", "chat", "sampling", "speculation", "grammar"}
    fields = _given(message, ClientRequest, leave_out=apart)
    fields["sampling"] = _given(message.sampling, RequestSampling, prefix="sampling.")
    if message.speculation != gateway_pb2.SPECULATION_UNSPECIFIED:
        if message.speculation not in _SPECULATION:
            problem = f"{message.speculation} is no value of Speculation"
            raise InvalidRequestError("speculation", problem, "send SPECULATION_ON or SPECULATION_OFF")
        fields["speculation"] = _SPECULATION[message.speculation]
    if message.HasField("grammar"):
        fields["grammar"] = decode_grammar(message.grammar)
        check_grammar(fields["grammar"])
    match message.WhichOneof("input"):
        case "prompt":
            fields["prompt"] = message.prompt
        case "prompt_token_ids":
            fields["prompt_token_ids"] = _bounded(message.prompt_token_ids.ids, MAX_PROMPT_TOKENS, "prompt_token_ids")
        case "chat":
            fields["chat"] = _chat(message.chat)
        case _:
            raise InvalidRequestError(
                "prompt", "missing", "set prompt, prompt_token_ids or chat", code="missing_required_parameter"
            )
    request = validate(ClientRequest, fields)
    if request.chat is not None:
        check_tools(request.chat.tools, request.chat.tool_choice, request.chat.tool_name)
    return request


def _chat(message: gateway_pb2.ChatMessages) -> dict[str, Any]:
    """Return the fields of a Chat."""
    fields = _given(message, Chat, leave_out={"messages", "template_values", "tools"})
    messages = _bounded(message.messages, MAX_MESSAGES, "chat.messages")
    fields["messages"] = [_message(one, f"chat.messages[{index}]") for index, one in enumerate(messages)]
    if message.template_values:
        place, example = "chat.template_values", '{"enable_thinking": false}'
        fields["template_values"] = _json(message.template_values, place, MAX_TEMPLATE_VALUES_BYTES, example)
    if message.tools:
        tools = _bounded(message.tools, MAX_TOOLS, "chat.tools")
        fields["tools"] = [_tool(tool, f"chat.tools[{index}]") for index, tool in enumerate(tools)]
    return fields


def _message(message: gateway_pb2.ChatMessage, place: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    fields |= _given(message, RequestMessage, leave_out={"tool_calls"})
    if message.tool_calls:
        calls = _bounded(message.tool_calls, MAX_TOOLS, f"{place}.tool_calls")
        fields["tool_calls"] = [{"name": call.name} | _given(call, ToolCall) for call in calls]
    return fields


def _tool(tool: gateway_pb2.Tool, place: str) -> dict[str, Any]:
    fields = {"name": tool.name} | _given(tool, Tool, leave_out={"parameters"})
    if tool.parameters:
        place, example = f"{place}.parameters", '{"type": "object", "properties": {}}'
        fields["parameters"] = _json(tool.parameters, place, MAX_SOURCE_BYTES, example)
    return fields


def _given(
    message: Message, model: type[BaseModel], *, leave_out: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of a message that are set and have the name of a field of `model`."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name not in model.model_fields or name in leave_out:
            continue
        value = getattr(message, name)
        if field.is_repeated:
            # A message of 8 MB can hold millions of empty entries: count them before Python makes objects of them.
            _check_length(len(value), _BOUNDS[name], prefix + name)
            value = dict(value) if field.message_type is not None else list(value)
        if message.HasField(name) if field.has_presence else value:
            fields[name] = value
    return fields


def _json(text: str, field: str, limit: int, example: str) -> Any:
    if len(text) > limit:
        raise InvalidRequestError(field, f"{len(text)} characters, over the limit of {limit}", "send less")
    try:
        return read_json(text)
    except UnicodeEncodeError:
        raise InvalidRequestError(field, "holds a lone surrogate, which is not Unicode text", "send UTF-8") from None
    except (ValueError, RecursionError):
        raise InvalidRequestError(field, "is no JSON", f"send an object, like {example}") from None


def _bounded(values: Sequence[Any], limit: int, field: str) -> list[Any]:
    _check_length(len(values), limit, field)
    return list(values)


def _check_length(length: int, limit: int, field: str) -> None:
    if length > limit:
        raise InvalidRequestError(field, f"{length} entries, over the limit of {limit}", f"send at most {limit}")


def encode_delta(request_id: str, delta: Delta) -> gateway_pb2.GatewayServiceGenerateResponse:
    """Return the message for one delta of an answer."""
    tokens = delta.tokens
    return gateway_pb2.GatewayServiceGenerateResponse(
        request_id=request_id,
        choice_index=delta.choice_index,
        text=delta.text,
        token_ids=[t.id for t in tokens],
        origins=cast(Any, [int(t.origin) for t in tokens]),
        logprobs=[encode_logprobs(t.logprobs) for t in tokens if t.logprobs is not None],
        finish_reason=cast(Any, int(delta.finish_reason or 0)),
        usage=None if delta.usage is None else USAGE.encode(delta.usage),
        text_lengths=[len(t.text.encode()) for t in tokens],
        prompt_logprobs=[encode_prompt_logprobs(part) for part in delta.chunk.prompt_logprobs],
        rounds=[TREE.encode(tree) for tree in delta.chunk.round_trees],
        reasoning=delta.reasoning,
        matched_stop_str=delta.matched_stop if isinstance(delta.matched_stop, str) else None,
        matched_token_id=delta.matched_stop if isinstance(delta.matched_stop, int) else None,
        tool_calls=[
            gateway_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in delta.tool_calls
        ],
    )


_Context = grpc.aio.ServicerContext[Any, Any]

_INLINE_BYTES = 1 << 16
"""Requests up to this size are decoded and validated in the event loop, in some milliseconds."""

SERVICE_NAME = "outrider.v1.GatewayService"
DOOR = "grpc"
"""Name of the gRPC door in metrics."""


class GatewayServicer(GatewayServiceServicer):
    """Answers calls; errors become statuses in the server's interceptor."""

    def __init__(self, gateway: Gateway, options: GatewayOptions) -> None:
        self._gateway = gateway
        self._options = options

    async def Generate(self, request: gateway_pb2.GatewayServiceGenerateRequest, context: _Context) -> None:
        """Stream the answers; cancelling the call ends them at once."""
        request_id = f"gen-{uuid.uuid4().hex}"
        limit_time(context.time_remaining(), self._options.max_request_seconds)
        gateway = self._gateway
        with gateway.enter(DOOR) as reserve:
            model = gateway.model
            if request.ByteSize() <= _INLINE_BYTES:
                decoded = decode_request(request)
            else:
                decoded = await asyncio.to_thread(decode_request, request)
            job = await admit(decoded, model, request_id)
            reserve(job.n)
            async with aclosing(gateway.generate([job], model)) as deltas:
                async for delta in deltas:
                    await self._write(context, encode_delta(request_id, delta))

    async def _write(self, context: _Context, message: gateway_pb2.GatewayServiceGenerateResponse) -> None:
        # A client that reads nothing must not hold its place here and its pages in verify forever.
        stall_seconds = self._options.stall_seconds
        try:
            async with asyncio.timeout(stall_seconds):
                await context.write(message)
        except grpc.aio.InternalError as lost:  # the client has gone, but the call is not cancelled yet
            raise asyncio.CancelledError from lost
        except TimeoutError:
            raise OverloadedError(
                f"the stream was not read for {stall_seconds:g} s; read it faster", code="slow_reader"
            ) from None

    async def ListModels(
        self, request: gateway_pb2.GatewayServiceListModelsRequest, context: _Context
    ) -> gateway_pb2.GatewayServiceListModelsResponse:
        """Return the served models."""
        model = self._gateway.model
        return gateway_pb2.GatewayServiceListModelsResponse(
            models=[gateway_pb2.Model(id=model.name, context_length=model.context_length)]
        )
