"""Check a running gateway with other projects' clients. Runs in an environment with those clients, and prints JSON.

python -m benchmarks.serving.client_checks CHECK --rest http://127.0.0.1:8000 --grpc 127.0.0.1:50051

Imports nothing of this project, and only needs requirements-clients.txt or a file of client_requirements. A client
that does not get what it expects raises.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

TASKS = Path(__file__).parent / "client_tasks"
HEALTH_NAMES = ("", "outrider.v1.GatewayService")
WEATHER = "What is the weather in Rome, in celsius?"
CHAT = "Repeat this list:\n- red apples\n- brown eggs\n- rye bread"


def lm_eval(rest: str, _grpc: str) -> dict[str, Any]:
    """Run lm-eval's local-completions on local tasks: choices, last words, whole texts, and generated answers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        for source in TASKS.iterdir():
            shutil.copy(source, folder)
            if source.suffix == ".yaml":
                (folder / source.name).write_text(source.read_text().replace("FOLDER", str(folder)))
        tasks = sorted(path.stem for path in TASKS.glob("*.yaml"))
        arguments = {
            "model": model_name(rest),
            "base_url": f"{rest}/v1/completions",
            "tokenizer_backend": "remote",
            "max_length": 1024,
            "num_concurrent": 1,
            "max_retries": 1,
        }
        found = simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=tasks,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    scores = {task: {k: v for k, v in found["results"][task].items() if isinstance(v, float)} for task in tasks}
    samples = {task: [sample["resps"] for sample in found["samples"][task]] for task in tasks}
    return {"scores": scores, "samples": samples}


def langchain(rest: str, _grpc: str) -> dict[str, Any]:
    """Ask LangChain's OpenAI model: whole, streamed, in a batch, with log-probabilities, with too long a prompt."""
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{rest}/v1", api_key="none", model=model_name(rest), temperature=0, max_tokens=24, max_retries=0
    )
    messages = [SystemMessage("You are brief."), HumanMessage(CHAT)]
    whole = model.invoke(messages)
    require(whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0, "no usage")
    pieces = list(model.stream(messages, stream_usage=True))
    streamed = "".join(str(piece.content) for piece in pieces)
    require(streamed == whole.content, f"the stream says {streamed!r}, the whole {whole.content!r}")
    require(any(piece.usage_metadata for piece in pieces), "no usage in the stream")
    batch = model.batch([messages, messages])
    require([answer.content for answer in batch] == [whole.content] * 2, "a batch differs")
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(messages)
    require(len(scored.response_metadata["logprobs"]["content"]) > 0, "no logprobs")
    plain = model.bind(extra_body={"speculation": "off"}).invoke(messages)
    require(plain.content == whole.content, "speculation changes the answer")
    try:
        model.invoke([HumanMessage("word " * 20_000)])
    except ContextOverflowError:
        pass
    else:
        raise RuntimeError("too long a prompt is no overflow to LangChain")
    return {"text": whole.content, "output_tokens": whole.usage_metadata["output_tokens"], "events": len(pieces)}


def openai(rest: str, _grpc: str) -> dict[str, Any]:
    """Use OpenAI's own client: chat and completions, whole and streamed, and errors."""
    import openai as library

    client = library.OpenAI(base_url=f"{rest}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    asked: dict[str, Any] = {"model": model.id, "temperature": 0, "max_completion_tokens": 24}
    messages: list[Any] = [{"role": "user", "content": CHAT}]
    whole = client.chat.completions.create(messages=messages, **asked)
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, extra_body={"trace": True}, **asked
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    require(text == whole.choices[0].message.content, "the stream differs")
    require(chunks[0].choices[0].delta.role == "assistant", "no role comes first")
    require(chunks[-1].choices == [] and chunks[-1].usage is not None, "no usage")
    tokens = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in (choice.model_extra or {}).get("trace", {}).get("tokens", [])
    ]
    require(len(tokens) == whole.usage.completion_tokens, "the trace lacks tokens")
    echoed = client.completions.create(model=model.id, prompt="One, two, three", max_tokens=0, echo=True, logprobs=1)
    require(echoed.choices[0].logprobs.token_logprobs[0] is None, "the first token has a logprob")
    try:
        client.completions.create(model=model.id, prompt=[1] * 100_000)
    except library.BadRequestError as error:
        require(error.code == "context_length_exceeded", f"code {error.code}")
    else:
        raise RuntimeError("too long a prompt is taken")
    return {"text": text, "accepted": sum(token["origin"] == "accepted" for token in tokens), "tokens": len(tokens)}


def openai_tools(rest: str, _grpc: str) -> dict[str, Any]:
    """Use OpenAI's client with tools: a forced call, streamed, parsed into a model, its result sent back; a choice."""
    import openai as library

    report = weather_report()
    client = library.OpenAI(base_url=f"{rest}/v1", api_key="none", max_retries=0)
    tool: Any = library.pydantic_function_tool(report)
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    named: Any = {"type": "function", "function": {"name": "WeatherReport"}}
    asked: dict[str, Any] = {"model": model_name(rest), "tools": [tool], "max_completion_tokens": 96, "temperature": 0}
    parsed = client.chat.completions.parse(messages=messages, tool_choice=named, **asked).choices[0]
    (call,) = parsed.message.tool_calls or []
    require(isinstance(call.function.parsed_arguments, report), "the arguments are not parsed")
    require(parsed.finish_reason == "tool_calls", f"it ended with {parsed.finish_reason}")
    with client.chat.completions.stream(messages=messages, tool_choice="required", **asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    require("tool_calls.function.arguments.delta" in events, "no pieces of arguments")
    (streamed,) = final.message.tool_calls or []
    require(streamed.function.arguments == call.function.arguments, "the stream differs")
    history = [
        *messages,
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]},
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    asked["max_completion_tokens"] = 24
    answer = client.chat.completions.create(messages=history, tool_choice="none", **asked).choices[0]
    require(bool(answer.message.content) and not answer.message.tool_calls, "no answer in words")
    chosen = client.chat.completions.create(messages=messages, tool_choice="auto", **asked).choices[0]
    require(bool(chosen.message.content or chosen.message.tool_calls), "neither words nor a call")
    return {"answer": answer.message.content, "arguments": call.function.arguments, "events": len(events)}


def langchain_tools(rest: str, _grpc: str) -> dict[str, Any]:
    """Use LangChain's bind_tools: a forced call, streamed, its result sent back; a choice; structured output."""
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather_of(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
        """Tells the weather of a city."""
        return f"21 degrees {unit} in {city}"

    model = ChatOpenAI(
        base_url=f"{rest}/v1", api_key="none", model=model_name(rest), temperature=0, max_tokens=96, max_retries=0
    )
    question = HumanMessage(WEATHER)
    forced = {}
    for choice in ("weather_of", "any"):
        bound = model.bind_tools([weather_of], tool_choice=choice)
        answer = bound.invoke([question])
        require(not answer.invalid_tool_calls, f"an invalid call with tool_choice {choice}")
        (call,) = answer.tool_calls
        require(call["name"] == "weather_of" and bool(weather_of.invoke(call["args"])), "the arguments do not fit")
        forced[choice] = call["args"]
    require(forced["weather_of"] == forced["any"], "the way to force a call changes it")
    pieces = list(bound.stream([question]))
    merged = AIMessageChunk("")
    for piece in pieces:
        merged = merged + piece
    require([call["args"] for call in merged.tool_calls] == [forced["any"]], "the stream differs")
    result = weather_of.invoke(answer.tool_calls[0])
    require(isinstance(result, ToolMessage), "no message of a tool")
    # The model may call again or say something: either one is an answer.
    chosen = model.bind_tools([weather_of]).invoke([question, answer, result])
    require(bool(chosen.content or chosen.tool_calls or chosen.invalid_tool_calls), "neither words nor a call")
    report = weather_report()
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(report, method=method).invoke([question])
        require(isinstance(found, report), f"{method} gives {found!r}")
    return {"arguments": json.dumps(forced["any"]), "events": len(pieces)}


def pydantic_ai(rest: str, _grpc: str) -> dict[str, Any]:
    """Run pydantic-ai's agents: their default output (a tool call), whole and streamed; tools beside text."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(model_name(rest), provider=OpenAIProvider(base_url=f"{rest}/v1", api_key="none"))
    settings: Any = {"temperature": 0.0, "max_tokens": 96}
    report = weather_report()
    agent = Agent(model, output_type=report, model_settings=settings, retries=0)
    whole = agent.run_sync(WEATHER)
    require(isinstance(whole.output, report), f"the output is {whole.output!r}")
    require(whole.usage.output_tokens > 0, "no usage")
    streamed = agent.run_stream_sync(WEATHER)
    parts = list(streamed.stream_output(debounce_by=None))
    require(parts[-1] == whole.output, "the stream differs")
    again = agent.run_sync("And in Paris?", message_history=whole.all_messages())
    require(isinstance(again.output, report), "no output with a history of calls")

    def weather_of(city: str) -> str:
        """Tells the weather of a city."""
        return f"21 degrees in {city}"

    talker = Agent(model, tools=[weather_of], model_settings=settings, retries=3)
    require(isinstance(talker.run_sync("Say hello.").output, str), "no words where a tool may be called")
    return {"arguments": whole.output.model_dump_json(), "events": len(parts)}


def instructor(rest: str, _grpc: str) -> dict[str, Any]:
    """Use instructor's TOOLS mode and its strict mode: a model, the same in parts, and several models."""
    import instructor as library
    import openai

    report = weather_report()
    asked: Any = {
        "model": model_name(rest),
        "messages": [{"role": "user", "content": WEATHER}],
        "temperature": 0,
        "max_tokens": 96,
        "max_retries": 0,
    }
    found = []
    for mode in (library.Mode.TOOLS, library.Mode.TOOLS_STRICT):
        client = library.from_openai(openai.OpenAI(base_url=f"{rest}/v1", api_key="none", max_retries=0), mode=mode)
        found.append(client.chat.completions.create(response_model=report, **asked))
    require(all(isinstance(value, report) for value in found), f"the answers are {found!r}")
    client = library.from_openai(openai.OpenAI(base_url=f"{rest}/v1", api_key="none", max_retries=0))
    parts = list(client.chat.completions.create_partial(response_model=report, **asked))
    require(parts[-1].model_dump() == found[0].model_dump(), "the stream differs")
    return {"arguments": found[0].model_dump_json(), "events": len(parts)}


def litellm(rest: str, _grpc: str) -> dict[str, Any]:
    """Use litellm's completion with tools: a forced call, streamed and joined, its result sent back; a choice."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as library

    report = weather_report()
    function = {
        "name": "weather_report",
        "description": "Tells the weather.",
        "parameters": report.model_json_schema(),
    }
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    asked: dict[str, Any] = {
        "model": f"openai/{model_name(rest)}",
        "api_base": f"{rest}/v1",
        "api_key": "none",
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
        "max_tokens": 96,
    }
    named = {"type": "function", "function": {"name": "weather_report"}}
    whole = library.completion(messages=messages, tool_choice=named, **asked).choices[0]
    (call,) = whole.message.tool_calls
    report.model_validate_json(call.function.arguments)
    require(whole.finish_reason == "tool_calls", f"it ended with {whole.finish_reason}")
    chunks = list(library.completion(messages=messages, tool_choice="required", stream=True, **asked))
    built = library.stream_chunk_builder(chunks, messages=messages).choices[0]
    require([made.function.arguments for made in built.message.tool_calls] == [call.function.arguments], "it differs")
    history = [
        *messages,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    answer = library.completion(messages=history, tool_choice="none", **asked).choices[0]
    require(bool(answer.message.content) and not answer.message.tool_calls, "no answer in words")
    chosen = library.completion(messages=messages, tool_choice="auto", **asked).choices[0]
    require(bool(chosen.message.content or chosen.message.tool_calls), "neither words nor a call")
    return {"arguments": call.function.arguments, "events": len(chunks)}


def hugging_face(rest: str, _grpc: str) -> dict[str, Any]:
    """Use huggingface_hub's InferenceClient: whole and streamed, a schema, a forced call, token ids."""
    from huggingface_hub import InferenceClient

    report = weather_report()
    client = InferenceClient(base_url=f"{rest}/v1", api_key="none")
    asked: dict[str, Any] = {"model": model_name(rest), "temperature": 0, "max_tokens": 24}
    messages = [{"role": "user", "content": CHAT}]
    whole = client.chat_completion(messages, extra_body={"return_token_ids": True}, **asked)
    require(len(whole.choices[0]["token_ids"]) == whole.usage.completion_tokens, "token ids are missing")
    events = list(client.chat_completion(messages, stream=True, stream_options={"include_usage": True}, **asked))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    require(text == whole.choices[0].message.content and events[-1].usage is not None, "the stream differs")
    asked["max_tokens"] = 96
    question = [{"role": "user", "content": WEATHER}]
    schema = {"name": "report", "schema": report.model_json_schema(), "strict": True}
    form = client.chat_completion(question, response_format={"type": "json_schema", "json_schema": schema}, **asked)
    found = report.model_validate_json(form.choices[0].message.content)
    require(form.choices[0].finish_reason == "stop", "the form is not complete")
    function = {"name": "report", "description": "Tells it.", "parameters": report.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    (call,) = (
        client.chat_completion(question, tools=tools, tool_choice="required", **asked).choices[0].message.tool_calls
    )
    report.model_validate_json(call.function.arguments)
    return {"arguments": found.model_dump_json(), "events": len(events)}


def outlines(rest: str, _grpc: str) -> dict[str, Any]:
    """Use outlines' models of vLLM and SGLang: a choice, an expression, a schema, a stream; a grammar of vLLM."""
    import openai
    import outlines as library

    report = weather_report()
    client = openai.OpenAI(base_url=f"{rest}/v1", api_key="none", max_retries=0)
    schema = report.model_json_schema() | {"additionalProperties": False}
    for make in (library.from_vllm, library.from_sglang):
        model = make(client, model_name(rest))
        require(model(WEATHER, Literal["sunny", "rainy"], max_tokens=24) in ("sunny", "rainy"), "no choice")
        require(model(WEATHER, library.regex("[0-9]{2} C"), max_tokens=24).endswith(" C"), "the expression is not met")
        whole = model(WEATHER, library.json_schema(schema), max_tokens=96, temperature=0)
        report.model_validate_json(whole)
        pieces = list(model.stream(WEATHER, library.json_schema(schema), max_tokens=96, temperature=0))
        require("".join(pieces) == whole, "the stream differs")
    grammar = library.cfg('start: "yes" | "no"')
    answer = library.from_vllm(client, model_name(rest))(WEATHER, grammar, max_tokens=24)
    require(answer in ("yes", "no"), "the grammar is not met")
    return {"arguments": whole, "events": len(pieces)}


def openai_agents(rest: str, _grpc: str) -> dict[str, Any]:
    """Run OpenAI's agents over chat and responses: an output type, whole and streamed, a forced call, the next turn."""
    import asyncio

    import agents as library

    library.set_tracing_disabled(True)
    report = weather_report()
    called: list[str] = []

    @library.function_tool
    def weather_of(city: str) -> str:
        """Tells the weather of a city."""
        called.append(city)
        return f"21 degrees in {city}"

    async def run(kind: Any) -> tuple[Any, int]:
        client = library.AsyncOpenAI(base_url=f"{rest}/v1", api_key="none", max_retries=0)
        settings = library.ModelSettings(max_tokens=96, temperature=0)
        given: dict[str, Any] = {"name": "agent", "instructions": "Be brief.", "model": kind(model_name(rest), client)}
        typed = library.Agent(output_type=report, model_settings=settings, **given)
        found = (await library.Runner.run(typed, WEATHER)).final_output
        require(isinstance(found, report), f"the output is {found!r}")
        streamed = library.Runner.run_streamed(typed, WEATHER)
        num_events = len([event async for event in streamed.stream_events()])
        require(streamed.final_output == found, "the stream differs")
        forced = library.ModelSettings(max_tokens=96, temperature=0, tool_choice="required")
        caller = library.Agent(
            tools=[weather_of], model_settings=forced, tool_use_behavior="stop_on_first_tool", **given
        )
        first = await library.Runner.run(caller, WEATHER)
        require(called != [] and first.final_output.startswith("21 degrees"), "the tool was not called")
        history: Any = [*first.to_input_list(), {"role": "user", "content": "Thank you."}]
        answer = await library.Runner.run(library.Agent(model_settings=settings, **given), history)
        require(isinstance(answer.final_output, str), "no answer after a call")
        return found, num_events

    chat, _ = asyncio.run(run(library.OpenAIChatCompletionsModel))
    found, num_events = asyncio.run(run(library.OpenAIResponsesModel))
    require(chat == found, "chat and responses differ")
    return {"arguments": found.model_dump_json(), "events": num_events}


def haystack(rest: str, _grpc: str) -> dict[str, Any]:
    """Use Haystack's generators for chat and responses: whole and streamed, a schema, a forced call, its result."""
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def weather_of(city: str) -> str:
        """Tells the weather of a city."""
        return f"21 degrees in {city}"

    report = weather_report()
    tools = [create_tool_from_function(weather_of)]
    question = ChatMessage.from_user(WEATHER)
    for kind, limit, form in (
        (OpenAIChatGenerator, "max_tokens", "response_format"),
        (OpenAIResponsesChatGenerator, "max_output_tokens", "text_format"),
    ):
        generator = kind(
            api_key=Secret.from_token("none"),
            api_base_url=f"{rest}/v1",
            model=model_name(rest),
            generation_kwargs={limit: 96, "temperature": 0},
            max_retries=0,
        )
        whole = generator.run([question])["replies"][0].text
        pieces: list[Any] = []
        streamed = generator.run([question], streaming_callback=pieces.append)["replies"][0].text
        require(streamed == whole and len(pieces) > 1, "the stream differs")
        report.model_validate_json(generator.run([question], generation_kwargs={form: report})["replies"][0].text)
        forced = generator.run([question], tools=tools, generation_kwargs={"tool_choice": "required"})["replies"][0]
        result = ChatMessage.from_tool("21 degrees", origin=forced.tool_calls[0])
        history = [question, forced, result]
        answer = generator.run(history, tools=tools, generation_kwargs={"tool_choice": "none"})["replies"][0]
        require(bool(answer.text) and not answer.tool_calls, "no answer in words")
    return {"arguments": json.dumps(forced.tool_calls[0].arguments), "events": len(pieces)}


def weather_report() -> Any:
    """Return the class of a report, which clients turn into a tool."""
    from pydantic import BaseModel

    class WeatherReport(BaseModel):
        """Tells the weather."""

        city: str
        unit: Literal["celsius", "fahrenheit"]

    return WeatherReport


def load_generator(rest: str, _grpc: str) -> dict[str, Any]:
    """Follow vLLM's load generator: ready check, model, streamed completions, counters before and after."""
    import requests

    model = requests.get(f"{rest}/v1/models", timeout=30).json()["data"][0]
    require(model["id"] == model["root"] and model["max_model_len"] > 0, "no model details")
    require(requests.get(f"{rest}/health", timeout=30).status_code == 200, "no health")
    before = spec_counters(rest)
    num_tokens = 0
    body = {
        "model": model["id"],
        "prompt": CHAT,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 48,
        "logprobs": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for _ in range(3):
        with requests.post(f"{rest}/v1/completions", json=body, stream=True, timeout=120) as response:
            response.raise_for_status()
            lines = [line.decode() for line in response.iter_lines() if line and not line.startswith(b":")]
        require(lines[-1] == "data: [DONE]", "no end")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        num_tokens += events[-1]["usage"]["completion_tokens"]
    after = spec_counters(rest)
    drafts, drafted, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    positions = {place: count - before["per_pos"].get(place, 0) for place, count in after["per_pos"].items()}
    require(num_tokens == 3 * 48, f"{num_tokens} tokens")
    require(sum(positions.values()) == accepted, "positions do not add up")
    return {"tokens": num_tokens, "drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}


def spec_counters(rest: str) -> dict[str, Any]:
    """Return the counters of speculation, found by the beginning of their lines as load generators do."""
    import requests

    found: dict[str, Any] = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0, "per_pos": {}}
    for line in requests.get(f"{rest}/metrics", timeout=30).text.splitlines():
        name = line.removeprefix("vllm:spec_decode_num_")
        if name == line:
            continue
        value = float(line.rsplit(" ", 1)[1])
        if name.startswith("accepted_tokens_per_pos"):
            place = name.split('position="')[1].split('"')[0]
            found["per_pos"][place] = found["per_pos"].get(place, 0.0) + value
        else:
            kind = next(kind for kind in ("drafts", "draft_tokens", "accepted_tokens") if name.startswith(kind))
            found[kind] += value
    return found


def health(_rest: str, grpc_address: str) -> dict[str, Any]:
    """Use grpc-health-checking's client: Check and Watch of each service's name, and of an unknown one."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in HEALTH_NAMES:
            request = health_pb2.HealthCheckRequest(service=name)
            require(stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING, name)
            require(next(stub.Watch(request, timeout=10)).status == health_pb2.HealthCheckResponse.SERVING, name)
        try:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        except grpc.RpcError as error:
            require(error.code() == grpc.StatusCode.NOT_FOUND, str(error.code()))
        else:
            raise RuntimeError("a service that is not there is healthy")
    return {"names": len(HEALTH_NAMES)}


CHECKS: dict[str, tuple[Callable[[str, str], dict[str, Any]], tuple[str, ...]]] = {
    "lm-eval": (lm_eval, ("lm-eval",)),
    "langchain": (langchain, ("langchain-openai", "langchain-core")),
    "openai": (openai, ("openai",)),
    "openai-tools": (openai_tools, ("openai",)),
    "langchain-tools": (langchain_tools, ("langchain-openai", "langchain-core")),
    "pydantic-ai": (pydantic_ai, ("pydantic-ai-slim",)),
    "instructor": (instructor, ("instructor",)),
    "litellm": (litellm, ("litellm",)),
    "huggingface-hub": (hugging_face, ("huggingface_hub",)),
    "outlines": (outlines, ("outlines",)),
    "openai-agents": (openai_agents, ("openai-agents",)),
    "haystack": (haystack, ("haystack-ai",)),
    "load-generator": (load_generator, ("requests",)),
    "health": (health, ("grpcio-health-checking",)),
}
"""Each check, and the packages whose versions matter to it."""


def model_name(rest: str) -> str:
    """Return the name of the served model."""
    import requests

    return str(requests.get(f"{rest}/v1/models", timeout=30).json()["data"][0]["id"])


def require(condition: bool, problem: str) -> None:
    """Raise RuntimeError unless the condition holds."""
    if not condition:
        raise RuntimeError(problem)


def main() -> None:
    """Run one check, and print its findings as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--rest", required=True, help="URL of the REST door")
    parser.add_argument("--grpc", required=True, help="address of the gRPC door")
    given = parser.parse_args()
    check, packages = CHECKS[given.check]
    found = check(given.rest, given.grpc)
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({"found": found, "versions": versions}))


if __name__ == "__main__":
    main()
