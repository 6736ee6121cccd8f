"""Turns a valid request into a job for the served model: token ids, and limits that depend on the model."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from pydantic import BaseModel

from gateway.core.catalogue import GatewayModel
from gateway.core.reasoning import ReasoningStart
from gateway.core.request import Chat, ClientRequest, Job, RequestMessage, RequestSampling, Tool, ToolCall
from gateway.core.tool_grammar import check_sizes, forced_grammars, form_grammar, strict_grammar
from gateway.core.tool_parser import FORMATS, ToolCalls, ToolFormat, read_json
from gateway.core.validation import FieldNames, renamed
from outrider.chat_template import ChatTemplateError
from outrider.errors import ContextLengthError, InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.protocol.generation import GenerationRequest
from outrider.rpc.call import salted_tenant
from outrider.sampling.params import SamplingParams

_INLINE_CHARACTERS = 4096
"""Texts up to this are rendered and tokenized in the event loop (well under a millisecond), longer ones in a thread."""

_INSTRUCTIONS = """You may call functions. Each is described by a JSON object:
{tools}
To call one, {answer}"""

_WIDE_SPACE = "\N{EM SPACE}"
"""White space that no template writes after a message, but that templates which strip messages remove."""


async def admit(request: ClientRequest, model: GatewayModel, request_id: str, names: FieldNames | None = None) -> Job:
    """Return the request as a job in token ids. Raises NotFoundError, ContextLengthError or InvalidRequestError."""
    names = names or {}
    try:
        return await _admit(request, model, request_id, names)
    except InvalidRequestError as error:
        raise renamed(error, names) from None


async def _admit(request: ClientRequest, model: GatewayModel, request_id: str, names: FieldNames) -> Job:
    arrived = time.monotonic()
    await asyncio.sleep(0)  # others wait for at most one of a request's thousands of prompts
    model.check_name(request.model)
    sampling = request.sampling
    check_ids(sampling.logit_bias or (), model.vocab_size, "sampling.logit_bias")
    check_ids(request.stop_token_ids or (), model.vocab_size, "stop_token_ids")
    calls = _tool_calls(request, model)
    prompt_field, prompt, text = await _prompt(request, model, calls)
    # Checked first, so that no more work is done on a prompt that is much too long.
    max_tokens = _output_limit(len(prompt), request, model, prompt_field)
    check_ids(prompt, model.vocab_size, prompt_field)
    is_forced = calls is not None and calls.forced
    splits = request.separate_reasoning and request.chat is not None and not is_forced
    reasoning = ReasoningStart.of(model.reasoning, text) if splits else None
    grammar, loose_grammar = _grammars(request, model, calls, reasoning)
    marks = {model.reasoning.begin, model.reasoning.end} if model.reasoning else set()
    shown_tokens = (calls.form.shown_tokens if calls else frozenset()) | marks
    known = _given(GenerationRequest, request) | {
        "sampling": _sampling(request, model, grammar),
        "max_tokens": max_tokens,
        "disable_speculation": request.speculation == "off",
        "tenant": salted_tenant(request.cache_salt or ""),
        "stop_token_ids": frozenset(request.stop_token_ids or ()),
        "prompt_token_ids": prompt,
        "bad_words": _bad_words(request.bad_words or (), model),
    }
    return Job(
        GenerationRequest(request_id=request_id, **known),
        n=request.n or 1,
        stop=tuple(request.stop or ()),
        arrived=arrived,
        keeps_stop=bool(request.include_stop_str_in_output),
        shown_tokens=shown_tokens,
        skips_special=request.skip_special_tokens is not False,
        **_about_grammar(request, grammar, is_forced, names),
        loose_grammar=loose_grammar,
        prompt_only=request.prompt_only,
        reasoning=reasoning,
        tool_calls=calls,
    )


def _about_grammar(
    request: ClientRequest, grammar: Grammar | None, is_forced: bool, names: FieldNames
) -> dict[str, str]:
    """Return the fields of a Job that say what the client has to change if verify refuses the grammar."""
    if grammar is request.grammar:
        return {"grammar_field": names.get("grammar", "")}
    # Made of schemas. Tools are checked before verify, too, so that a form beside them is more likely the reason.
    fix = "leave out what is not supported, or split the schema"
    if request.grammar is None or is_forced:
        return {"grammar_field": names.get("chat.tools", "chat.tools"), "grammar_fix": fix}
    is_json = request.grammar.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
    return {"grammar_field": names.get("grammar", request.grammar.field), "grammar_fix": fix if is_json else ""}


def _tool_calls(request: ClientRequest, model: GatewayModel) -> ToolCalls | None:
    """Return how tool calls are found in the answers, None if they are not. Raises InvalidRequestError."""
    chat, form = request.chat, model.tool_format
    if chat is None or not chat.offered:
        return None
    if form is None:
        if chat.is_forced:
            raise InvalidRequestError(
                "chat.tool_choice",
                "this gateway does not parse tool calls (--tool-call-parser none)",
                "send auto, and parse the calls in the text",
            )
        return None
    check_sizes([tool for tool in chat.offered if tool.strict])
    return ToolCalls(form, frozenset(tool.name for tool in chat.offered), chat.parallel_tool_calls, chat.is_forced)


def _grammars(
    request: ClientRequest, model: GatewayModel, calls: ToolCalls | None, reasoning: ReasoningStart | None
) -> tuple[Grammar | None, Grammar | None]:
    """Return the grammar of the answers, and the one to use if verify refuses it. Raises InvalidRequestError."""
    tools = request.chat.offered if calls is not None and request.chat is not None else []
    form = None if calls is None else calls.form
    marks = [] if form is None else [form.opener, form.closer, form.quote]
    marks += [model.reasoning.begin, model.reasoning.end] if model.reasoning else []
    ids = {mark: token_id for mark in marks if (token_id := model.tokenizer.added_id(mark)) is not None}
    if form is not None and calls is not None and calls.forced:
        return forced_grammars(tools, form, ids)
    if request.grammar is None:
        return None if form is None else strict_grammar(tools, form, ids), None
    if form is None and reasoning is None:
        return request.grammar, None
    return form_grammar(request.grammar, tools, form, reasoning, ids), None


def _given(struct: type[msgspec.Struct], model: BaseModel) -> dict[str, Any]:
    """Return the fields of a struct to which the request's fields of the same names give a value."""
    names = [name for name in struct.__struct_fields__ if name in type(model).model_fields]
    return {name: value for name in names if (value := getattr(model, name)) is not None}


def _bad_words(words: Sequence[str], model: GatewayModel) -> list[list[int]]:
    """Return the tokens of each word at the beginning of a text and after a space, as the tokenizer writes them."""
    known: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            if ids := model.tokenizer.encode(text, add_special_tokens=False):
                known[tuple(ids)] = None
    return [list(ids) for ids in known]


def _sampling(request: ClientRequest, model: GatewayModel, grammar: Grammar | None) -> SamplingParams:
    fields: dict[str, Any] = {
        name: value for name, value in model.defaults.items() if name in RequestSampling.model_fields
    }
    fields |= _given(SamplingParams, request.sampling) | {"grammar": grammar}
    seed = request.sampling.seed
    fields["seed"] = secrets.randbits(64) if seed is None else seed % 2**64
    fields["top_k"] = max(0, fields.get("top_k", 0))
    if fields.get("top_p") == 0:
        fields |= {"top_p": 1.0, "top_k": 1}
    return SamplingParams(**fields)


async def _prompt(request: ClientRequest, model: GatewayModel, calls: ToolCalls | None) -> tuple[str, list[int], str]:
    """Return the prompt's field, its token ids, and its text if it came as text."""
    if request.prompt_token_ids is not None:
        return "prompt_token_ids", request.prompt_token_ids, ""
    field, text = "prompt", request.prompt or ""
    if request.chat is not None:
        field = "chat.messages"
        render = partial(render_chat, request.chat, model, field)
        inline = request.chat.size <= _INLINE_CHARACTERS and not request.chat.tools
        text = render() if inline else await asyncio.to_thread(render)
        if calls is not None and calls.forced:
            text += calls.form.forced_opening
    # A chat template writes the beginning-of-sequence token itself.
    tokenize = partial(_tokenize, text, model, field, add_special_tokens=request.chat is None)
    inline = len(text) <= _INLINE_CHARACTERS
    token_ids = tokenize() if inline else await model.tokenizer.in_thread(len(text), tokenize)
    if not token_ids:
        raise InvalidRequestError(field, "has no tokens", "send text that the tokenizer knows")
    return field, token_ids, text


def render_chat(chat: Chat, model: GatewayModel, field: str) -> str:
    """Return a conversation as the model's template writes it. Raises InvalidRequestError about `field`."""
    template = model.tokenizer.tool_template if chat.offered else model.tokenizer.chat_template
    if template is None:
        raise InvalidRequestError(field, f"{model.name} has no chat template", "send a plain prompt instead")
    if template.knows_tools:
        messages = [_known(message) for message in chat.messages]
        tools = [{"type": "function", "function": _description(tool)} for tool in chat.offered]
    else:
        messages, tools = _written_out(chat, model.tool_format or FORMATS["json"]), []
    mark = ""
    if chat.continue_final_message:
        mark = secrets.token_hex(16) + _WIDE_SPACE
        messages[-1]["content"] += mark
    is_open = not mark and chat.add_generation_prompt is not False
    try:
        text = template.render(messages, chat.template_values, add_generation_prompt=is_open, tools=tools)
    except ChatTemplateError as error:
        raise InvalidRequestError(
            field, f"the model's chat template refuses them: {error}", "check the roles and their order"
        ) from None
    if not mark:
        return text
    before, found, after = text.rpartition(mark.strip())
    if not found or not chat.messages[-1].content.strip():
        raise InvalidRequestError(
            f"{field}[{len(chat.messages) - 1}].content",
            "cannot be continued: it is empty, or the model's chat template changes it",
            "send text, or leave out continue_final_message",
        )
    return before if after.startswith(_WIDE_SPACE) else before.rstrip()


def _tokenize(text: str, model: GatewayModel, field: str, *, add_special_tokens: bool) -> list[int]:
    context_length, tokenizer = model.context_length, model.tokenizer
    # Spares the tokenizer a text that cannot fit however well it compresses, and the memory of far too many tokens.
    if len(text) > context_length * tokenizer.longest_token or tokenizer.is_longer(text, 2 * context_length):
        raise ContextLengthError(
            field,
            f"{_limit_text(context_length)}, and {len(text)} characters cannot fit it",
            "send a shorter prompt",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_ids(token_ids: Sequence[int] | Mapping[int, float], vocab_size: int, field: str) -> None:
    """Raise InvalidRequestError for an id outside the vocabulary; `field` is the name of the list or mapping."""
    if not token_ids or max(token_ids) < vocab_size:
        return
    at, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
    place = f"{field}[{token_id if isinstance(token_ids, Mapping) else at}]"
    raise InvalidRequestError(
        place, f"token id {token_id} is outside the vocabulary of {vocab_size}", f"send ids from 0 to {vocab_size - 1}"
    )


def _limit_text(context_length: int) -> str:
    """Return OpenAI's old wording, by which clients recognize an overflow, or find the limit."""
    return f"this model's maximum context length is {context_length} tokens"


def _output_limit(num_prompt: int, request: ClientRequest, model: GatewayModel, prompt_field: str) -> int:
    """Return the most tokens of an answer. Raises ContextLengthError."""
    max_tokens, context_length = request.max_tokens, model.context_length
    room = context_length - num_prompt
    if room < 1:
        raise ContextLengthError(
            prompt_field,
            f"{_limit_text(context_length)}, and {num_prompt} leave no room for an answer",
            f"send at most {context_length - 1} tokens",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthError(
            "max_tokens",
            f"{_limit_text(context_length)}, and {num_prompt} of the prompt and {max_tokens} to generate exceed it",
            f"send at most {room} here, or a shorter prompt",
        )
    limits = (room, max_tokens or request.default_max_tokens, model.defaults.get("max_tokens"))
    return int(min(limit for limit in limits if limit is not None))


def _written_out(chat: Chat, form: ToolFormat) -> list[dict[str, Any]]:
    """Return the messages for a template that knows no tools: tools, calls (in `form`) and results become text."""
    names = {call.id: call.name for message in chat.messages for call in message.tool_calls or ()}
    messages = [_as_text(message, names, form) for message in chat.messages]
    if not chat.offered:
        return messages
    tools = "\n".join(json.dumps(_description(tool), ensure_ascii=False) for tool in chat.offered)
    text = _INSTRUCTIONS.format(tools=tools, answer=form.describe())
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


def _as_text(message: RequestMessage, names: dict[str, str], form: ToolFormat) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True, exclude={"tool_calls", "tool_call_id"})
    if message.role == "tool":
        name = names.get(message.tool_call_id or "") or message.name or "the function"
        return fields | {"role": "user", "content": f"Result of {name}: {message.content}"}
    calls = [form.write(call.name, _arguments(call)) for call in message.tool_calls or ()]
    return fields | {"content": "\n".join(part for part in (message.content, *calls) if part)}


def _arguments(call: ToolCall) -> Any:
    """Return the arguments as the object that templates want, or as text if the model wrote no object."""
    try:
        value = read_json(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments
