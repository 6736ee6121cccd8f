"""Tools, calls and their results as a chat template takes them, or as text where a template knows none."""

from __future__ import annotations

import json
from typing import Any

from gateway.core.request import Chat, RequestMessage, Tool, ToolCall
from outrider.chat_template import ChatTemplate

_INSTRUCTIONS = """You may call functions. Each is described by a JSON object:
{tools}
To call one, answer with a JSON object and nothing else: {{"name": its name, "arguments": an object of arguments}}"""


def chat_messages(chat: Chat, template: ChatTemplate) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and the tools that a chat template is given."""
    if not template.knows_tools:
        return _written_out(chat), []
    tools = [{"type": "function", "function": _description(tool)} for tool in chat.offered]
    return [_known(message) for message in chat.messages], tools


def _written_out(chat: Chat) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: these, their calls and results are text."""
    names = {call.id: call.name for message in chat.messages for call in message.tool_calls or ()}
    messages = [_as_text(message, names) for message in chat.messages]
    if not chat.offered:
        return messages
    tools = "\n".join(json.dumps(_description(tool), ensure_ascii=False) for tool in chat.offered)
    text = _INSTRUCTIONS.format(tools=tools)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def _description(tool: Tool) -> dict[str, Any]:
    about = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name} | about | {"parameters": tool.arguments_schema}


def _known(message: RequestMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True, exclude={"tool_calls"})
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    return fields


def _as_text(message: RequestMessage, names: dict[str, str]) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True, exclude={"tool_calls", "tool_call_id"})
    if message.role == "tool":
        name = names.get(message.tool_call_id or "") or message.name or "the function"
        return fields | {"role": "user", "content": f"Result of {name}: {message.content}"}
    calls = [
        json.dumps({"name": call.name, "arguments": _arguments(call)}, ensure_ascii=False)
        for call in message.tool_calls or ()
    ]
    return fields | {"content": "\n".join(part for part in (message.content, *calls) if part)}


def _arguments(call: ToolCall) -> Any:
    """The arguments as templates want them, an object; what a model wrote that is none stays text."""
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments
