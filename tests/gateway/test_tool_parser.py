"""Calls of tools are found in an answer however it is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template

from gateway.core.gemma_calls import read_arguments, write_value
from gateway.core.tool_parser import FORMATS, TextDelta, ToolCallParser, ToolCalls, find_format

NAMES = frozenset({"look_up", "add"})
Calls = list[tuple[str, str]]


def parse(form: str, pieces: Sequence[str], **options: Any) -> tuple[str, Calls]:
    """The text, and name and arguments of each call, as a client puts them together."""
    parser = ToolCallParser(ToolCalls(FORMATS[form], NAMES, **options))
    text, calls, whole = "", [], "".join(pieces)
    for news in [*map(parser.push, pieces), parser.finish()]:
        for delta in news:
            if isinstance(delta, TextDelta):
                text += delta.text
                spaces, _, rest = delta.text.rpartition(whole[delta.start : delta.end])
                assert not (spaces + rest).strip() and delta.end - delta.start <= len(delta.text)
                continue
            assert bool(delta.id) == bool(delta.name) == (delta.index == len(calls))
            if delta.id:
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    return text, calls


ADD = ("add", '{"a": 1, "b": [2, "}"]}')
LOOK = ("look_up", '{"text": "say \\"{hi\\" \\\\"}')
ADD_JSON = f'{{"name": "{ADD[0]}", "arguments": {ADD[1]}}}'
LOOK_JSON = f'{{"arguments": {LOOK[1]}, "name": "{LOOK[0]}"}}'
LLAMA_JSON = f'{{"type": "function", "name": "{ADD[0]}", "parameters": {ADD[1]}}}'


def in_gemma(value: Any) -> str:
    """A value as Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_gemma, value))}]"
    return "None" if value is None else json.dumps(value)


def gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


ADD_GEMMA = gemma("add", '{a:1,b:[2,<|"|>}<|"|>]}')
LOOK_GEMMA = gemma("look_up", in_gemma(json.loads(LOOK[1])))
ADD_CLOSE, LOOK_CLOSE = ("add", '{"a":1,"b":[2,"}"]}'), ("look_up", LOOK[1].replace(": ", ":"))

CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", "hello\n", "hello\n", []),
    ("hermes", f"<tool_call>\n{ADD_JSON}\n</tool_call>", "", [ADD]),
    ("hermes", f"Let me see.\n\n<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{LOOK_JSON}</tool_call>\n",
     "Let me see.", [ADD, LOOK]),
    ("hermes", f"<tool_call>{ADD_JSON}</tool_call> done <b>", "done <b>", [ADD]),
    ("hermes", f"Let me see.\n\n<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{LOOK_JSON}</tool_call> Done.\n",
     "Let me see.\n\n\n Done.\n", [ADD, LOOK]),
    ("hermes", f"Well\n<tool_call> what </tool_call>\n<tool_call>{ADD_JSON}</tool_call>\n",
     "Well\n<tool_call> what </tool_call>", [ADD]),
    ("hermes", f"Well\n<tool_call>{ADD_JSON} so", "Well\n so", [ADD]),
    ("hermes", f"Well\n<tool_call>{ADD_JSON[:-1]}", "Well", [ADD]),
    ("hermes", f"<tool_call>[{ADD_JSON}, {LOOK_JSON}]</tool_call>", "", [ADD, LOOK]),
    ("hermes", "<tool_call> nothing </tool_call>", "<tool_call> nothing </tool_call>", []),
    ("hermes", "<tool_call>{\"name\": 7}</tool_call>", "<tool_call>{\"name\": 7}</tool_call>", []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "<tool_call>\n<tool_call> nothing", "<tool_call>\n<tool_call> nothing", []),
    ("hermes", f"<tool_call>{ADD_JSON}<tool_call>\n<tool_call> so", "<tool_call>\n<tool_call> so", [ADD]),
    ("hermes", f"<tool_call>{ADD_JSON}<tool_call></tool_call> so", "<tool_call></tool_call> so", [ADD]),
    ("hermes", '<tool_call>{"name": "add", "argum', "", [("add", "")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", f"<tool_call>{ADD_JSON[:-1]}</tool_call> so", "so", [ADD]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", ADD_JSON, ADD_JSON, []),
    ("llama3", LLAMA_JSON, "", [ADD]),
    ("llama3", f"<|python_tag|>{LLAMA_JSON}; {LLAMA_JSON}", "", [ADD, ADD]),
    ("llama3", '{"name": "somebody", "parameters": {}}', '{"name": "somebody", "parameters": {}}', []),
    ("llama3", f"So: {LLAMA_JSON}", f"So: {LLAMA_JSON}", []),
    ("mistral", f"[TOOL_CALLS] [{ADD_JSON}, {LOOK_JSON}]", "", [ADD, LOOK]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]look_up{LOOK[1]}", "", [ADD, LOOK]),
    ("mistral", f"See:\n[TOOL_CALLS][{ADD_JSON}] [1] shows", "See:\n [1] shows", [ADD]),
    ("llama3", f"Well, <|python_tag|>{LLAMA_JSON}\n; [so]", "Well, \n; [so]", [ADD]),
    ("mistral", "[1, 2] is [TOOL", "[1, 2] is [TOOL", []),
    ("mistral", "[TOOL_CALLS]I would\nnot", "[TOOL_CALLS]I would\nnot", []),
    ("json", f" \n{ADD_JSON}\n", "", [ADD]),
    ("json", f"[{ADD_JSON}, {LOOK_JSON}]", "", [ADD, LOOK]),
    ("json", '{"name": "add", "arguments": null}', "", [("add", "{}")]),
    ("json", f"[{ADD_JSON}]\nso", "so", [ADD]),
    ("json", f"{ADD_JSON}\n, so", ", so", [ADD]),
    ("json", "[]", "[]", []),
    ("json", "[1, 2] and {", "[1, 2] and {", []),
    ("json", '{"a": {"name": "add"}} ', '{"a": {"name": "add"}} ', []),
    ("json", "{", "{", []),
    ("gemma4", "hello\n", "hello\n", []),
    ("gemma4", f"Let me see.\n{ADD_GEMMA}{LOOK_GEMMA}", "Let me see.", [ADD_CLOSE, LOOK_CLOSE]),
    ("gemma4", f"{ADD_GEMMA}\n{LOOK_GEMMA} so\n", "so\n", [ADD_CLOSE, LOOK_CLOSE]),
    ("gemma4", "<|tool_call>call:add{a:1}call:add{}<tool_call|>", "", [("add", '{"a":1}'), ("add", "{}")]),
    ("gemma4", "<|tool_call>call:google:mcp:add{}<tool_call|>", "", [("add", "{}")]),
    ("gemma4", "<|tool_call>add{a:1}<tool_call|>", "<|tool_call>add{a:1}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:{a:1}<tool_call|>", "<|tool_call>call:{a:1}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:two words{}<tool_call|>", "<|tool_call>call:two words{}<tool_call|>", []),
    ("gemma4", "<|tool_call>", "<|tool_call>", []),
    ("gemma4", "<|tool_call>call:add", "<|tool_call>call:add", []),
    ("gemma4", "<|tool_call>call:add{", "", [("add", "{")]),
    ("gemma4", '<|tool_call>call:add{a:<|"|>say "hi', "", [("add", '{"a":"say \\"hi')]),
    ("gemma4", '<|tool_call>call:add{a:<|"|>b<|', "", [("add", '{"a":"b')]),
    ("gemma4", "<|tool_call>call:add{a:1, b:12", "", [("add", '{"a":1,"b":')]),
    ("gemma4", gemma("add", '{a:true,b:false,c:null,d:None,e:-1.5e3,f:{g:{},h:[[],{}]},i:<|"|><|"|>}'), "",
     [("add", '{"a":true,"b":false,"c":null,"d":null,"e":-1.5e3,"f":{"g":{},"h":[[],{}]},"i":""}')]),
    ("gemma4", gemma("add", '{a:<|"|>{"b": "<|tool_call>", [\\\n<|<tool_call|>}<|"|>}'), "",
     [("add", '{"a":"{\\"b\\": \\"<|tool_call>\\", [\\\\\\n<|<tool_call|>}"}')]),
    # What models drift to: JSON, quoted keys, and words without quotes.
    ("gemma4", gemma("add", ADD[1]), "", [ADD_CLOSE]),
    ("gemma4", gemma("look_up", LOOK[1]), "", [LOOK_CLOSE]),
    ("gemma4", f"<|tool_call>{ADD_JSON}<tool_call|>", "", [ADD]),
    ("gemma4", gemma("add", '{<|"|>a: b<|"|> : 1 , c d:Rome is, x NaN:NaN,e:}'), "",
     [("add", '{"a: b":1,"c d":"Rome is","x NaN":"NaN","e":""}')]),
    ("gemma4", gemma("add", "{a:x, y, b:[1,,2],}"), "", [("add", '{"a":"x","b":[1,2]}')]),
    # Half of a surrogate pair is no text that an answer could hold.
    ("hermes", r'<tool_call>{"name": "\ud83d"}', r'<tool_call>{"name": "\ud83d"}', []),
    ("hermes", r'<tool_call>{"arguments": "\ud83d", "name": "add"}',
     r'<tool_call>{"arguments": "\ud83d", "name": "add"}', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_text_and_calls_are_told_apart(form: str, answer: str, text: str, calls: Calls) -> None:
    assert parse(form, [answer]) == (text, calls)
    assert parse(form, list(answer)) == (text, calls)


ALPHABET = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", ADD_JSON, LOOK_JSON, LLAMA_JSON,
            "<|tool_call>", "<tool_call|>", '<|"|>', "call:", ADD_GEMMA,
            "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "<", "add",
            '{"name": "add", ', '"arguments": ', "é"]  # fmt: skip


@settings(max_examples=examples(100))
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(ALPHABET), max_size=12), st.data())
def test_any_cut_into_pieces_gives_the_same(form: str, parts: list[str], data: st.DataObject) -> None:
    answer = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    options = {"forced": data.draw(st.booleans()), "parallel": data.draw(st.booleans())}
    assert parse(form, pieces, **options) == parse(form, [answer], **options)


@settings(max_examples=examples(70))
@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_without_calls_comes_through_unchanged(form: str, answer: str) -> None:
    if FORMATS[form].opener not in answer or form == "json":
        assert parse(form, [answer]) == (answer, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(70))
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.tuples(st.sampled_from(sorted(NAMES)),
       st.dictionaries(st.text(max_size=6), VALUES, max_size=3)), min_size=1, max_size=3), st.booleans())  # fmt: skip
def test_every_call_that_is_written_is_read(form: str, written: list[tuple[str, Any]], ascii_only: bool) -> None:
    made = FORMATS[form]
    bodies = [
        json.dumps({"name": name, made.arguments_key: arguments}, ensure_ascii=ascii_only)
        for name, arguments in written
    ]
    if made.closer:
        answer = "\n".join(f"{made.opener}\n{body}\n{made.closer}" for body in bodies)
    elif form == "llama3":
        answer = made.opener + "; ".join(bodies)
    else:
        answer = f"{made.opener}[{', '.join(bodies)}]"
    text, calls = parse(form, [answer])
    assert text == "" and [(name, json.loads(arguments)) for name, arguments in calls] == written
    first = parse(form, [answer], parallel=False)[1]
    assert first == calls[:1]


WORDS = st.from_regex(r"[a-z_][\w.-]{0,5}( \w{1,3})?", fullmatch=True)
GEMMA_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8).filter(lambda text: '<|"|>' not in text) | st.sampled_from(['"', "}]{[,:", "<|tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
GEMMA_CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(WORDS, GEMMA_VALUES, max_size=2)), min_size=1, max_size=2
)


@settings(max_examples=examples(10))  # each is read hundreds of times
@given(GEMMA_CALLS)
def test_every_call_that_gemma_writes_is_read_wherever_the_answer_is_cut(written: list[tuple[str, Any]]) -> None:
    answer = "Well." + "".join(gemma(name, in_gemma(arguments)) for name, arguments in written)
    text, calls = parse("gemma4", [answer])
    assert text == "Well." and [(name, json.loads(arguments)) for name, arguments in calls] == written
    for cut in range(len(answer) + 1):
        assert parse("gemma4", [answer[:cut], answer[cut:]]) == (text, calls)
        # What max_tokens leaves of it is the beginning of the same calls.
        _, begun = parse("gemma4", [answer[:cut]])
        assert all(name == whole[0] for (name, _), whole in zip(begun, calls, strict=False))
        assert [part for _, part in begun[:-1]] == [whole for _, whole in calls[: max(0, len(begun) - 1)]]
        assert not begun or calls[len(begun) - 1][1].startswith(begun[-1][1])


@settings(max_examples=examples(100))
@given(st.lists(st.sampled_from(["{", "}", "[", "]", ",", ":", '"', "\\", '<|"|>', "<|", " ", "\n", "a", "1", "é"])))
def test_arguments_of_gemma_that_end_are_json_whatever_is_in_them(parts: list[str]) -> None:
    read: list[str] = []
    steps = read_arguments(read.append)
    next(steps)
    try:
        for character in "{" + "".join(parts):
            steps.send(character)
    except StopIteration:
        assert isinstance(json.loads("".join(read)), dict)


def test_a_forced_answer_begins_behind_the_opener() -> None:
    assert parse("hermes", [ADD_JSON], forced=True) == ("", [ADD])
    assert parse("mistral", [f"[{ADD_JSON}]"], forced=True) == ("", [ADD])
    assert parse("gemma4", [ADD_GEMMA.removeprefix("<|tool_call>")], forced=True) == ("", [ADD_CLOSE])
    assert parse("json", ['{"name": "add", "arguments": {}}'], forced=True) == ("", [("add", "{}")])


def test_the_format_is_found_by_the_marks_of_the_template() -> None:
    for template, name in (
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("within <tool_call></tool_call>", "hermes"),
        ("<|python_tag|>", "llama3"),
        ("{{ '<|tool_call>call:' }} {{ '}<tool_call|>' }}", "gemma4"),
        ("{{ messages }}", "json"),
        (None, "json"),
    ):
        assert find_format("auto", template) is FORMATS[name]
    assert find_format("llama3", "<tool_call>") is FORMATS["llama3"]
    assert find_format("none", "<tool_call>") is None


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("in_call", [False, True])
def test_a_model_stuck_in_whitespace_is_read_on(form: str, in_call: bool) -> None:
    """Half a million characters: looked at again for each that follows, the run would take minutes."""
    opener = (FORMATS[form].opener or "[") if in_call else ""
    assert parse(form, [opener, *[" " * 64] * 8000]) == (opener + " " * 512_000, [])


def test_gemma_s_keys_are_in_the_order_of_its_template() -> None:
    value = {"b": 1, "C d": "x", "a": {"Z": [True, None], "y": 'say "hi"'}}
    order = Template("{% for key, _ in value | dictsort %}{{ key }};{% endfor %}").render(value=value)
    assert order == "a;b;C d;"
    assert write_value(value) == '{a:{y:<|"|>say "hi"<|"|>,Z:[true,null]},b:1,"C d":<|"|>x<|"|>}'
