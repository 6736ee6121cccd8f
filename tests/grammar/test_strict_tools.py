"""A strict tool that the model chooses to call: text is free, a call that is begun fits its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_grammar import byte_level
from tokenizers import pre_tokenizers

from gateway.core.gemma_calls import QUOTE
from gateway.core.reasoning import ReasoningMarkers, ReasoningStart
from gateway.core.request import Tool
from gateway.core.tool_grammar import forced_grammars, form_grammar, strict_grammar
from gateway.core.tool_parser import FORMATS
from outrider.grammar.compiler import CompiledGrammar, GrammarVocabulary, compile_grammar, judge, probe
from outrider.grammar.spec import Grammar, GrammarKind, check_grammar

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "$defs": {
        "City": {
            "type": "string",
            "format": "place",
            "maxLength": 12,
            "description": 'a ::= b, %llguidance {} and "x" / é 🙂',
        }
    },
}
TOOLS = [
    Tool(name="weather.of-1", parameters=PLACE, strict=True),
    Tool(name="now", strict=True),
    Tool(name="anything", parameters={"type": "object"}),
]
ROME = '{"name": "weather.of-1", "arguments": {"city": "Rome", "unit": "celsius"}}'
NOW = '{"name":"now","arguments":{}}'
WRONG = '{"name": "weather.of-1", "arguments": {"city": "Rome", "unit": "kelvin"}}'
ROME_GEMMA = 'weather.of-1{city:"Rome",unit:`celsius`}'
FREE = '{"name": "anything", "arguments": {"a": [1]}}'


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_call>", "<tool_call|>", '<|"|>']


@pytest.fixture(scope="module", params=[[], MARKS])
def vocabulary(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> GrammarVocabulary:
    """All bytes; some models have the marks as tokens that are not special."""
    folder = tmp_path_factory.mktemp("bytes")
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    inner = byte_level(signs)
    inner.add_special_tokens(["<end>"])
    inner.add_tokens(request.param)
    inner.save(str(folder / "tokenizer.json"))
    return GrammarVocabulary.from_folder(folder, inner.get_vocab_size(), [signs.index("<end>")])


def mark_ids(vocabulary: GrammarVocabulary) -> dict[str, int]:
    has_marks = vocabulary.tokenizer.tokenize_str(MARKS[0])[1:] == []
    return {mark: vocabulary.tokenizer.tokenize_str(mark)[0] for mark in MARKS} if has_marks else {}


def compiled(form: str, vocabulary: GrammarVocabulary, wanted: Grammar | None = None) -> CompiledGrammar:
    if wanted is None:
        grammar = strict_grammar(TOOLS, FORMATS[form], mark_ids(vocabulary))
    else:
        grammar = form_grammar(wanted, TOOLS, FORMATS[form], None, mark_ids(vocabulary))
    assert grammar is not None
    made = compile_grammar(grammar, vocabulary)
    probe(made)
    return made


def ends(grammar: CompiledGrammar, text: str) -> bool | None:
    """Whether an answer may end here; None where the text itself is not allowed."""
    matcher = grammar.matcher()
    for token in grammar.vocabulary.tokenizer.tokenize_str(text):
        if not matcher.consume_token(token):
            return None
    return bool(matcher.is_accepting())


def gemma(call: str) -> str:
    return f"<|tool_call>call:{call.replace('`', QUOTE)}<tool_call|>"


def called(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", "Hello, {world}. <tool> < <tool_cal>", True),
        ("hermes", f"Let me see.\n{called(ROME)}", True),
        ("hermes", f"{called(ROME)}\n{called(NOW)} and more", True),
        ("hermes", f"{called(FREE)}", True),
        ("hermes", f"<tool_call>{ROME}</tool_call>", True),
        ("hermes", f"Let me see.\n<tool_call>\n{ROME[:30]}", False),
        ("hermes", f"Let me see.\n{called(WRONG)}", None),
        ("hermes", f"{called(ROME)}{called(WRONG)}", None),
        ("hermes", called('{"name": "unknown", "arguments": {}}'), None),
        ("hermes", called('{"name": "now", "arguments": {"zone": 1}}'), None),
        ("hermes", "<tool_call> what", None),
        ("hermes", f"<think>\n<b>What</b> to do?</think>\n{called(NOW)}", True),
        ("hermes", f"<think>Well</think>{called(WRONG)}", None),
        ("gemma4", "Hello, {world}. <tool> < <|tool_cal", True),
        ("gemma4", f"Let me see.\n{gemma(ROME_GEMMA)}{gemma('now{}')}", True),
        ("gemma4", f"<think>Well</think>{gemma(ROME_GEMMA)} and more", True),
        ("gemma4", gemma("anything{a:[1,`b\n`,{c:null,d:{}}],e:true}"), True),
        ("gemma4", f"<|tool_call>call:{ROME_GEMMA[:14]}", False),
        ("gemma4", gemma(ROME_GEMMA.replace("celsius", "kelvin")), None),
        ("gemma4", gemma("weather.of-1{city:`Rome`,unit:`celsius`}"), None),  # the city has a greatest length
        ("gemma4", gemma('weather.of-1{city:"Rome"}'), None),
        ("gemma4", gemma('weather.of-1{city:"Rome, far away",unit:`celsius`}'), None),
        ("gemma4", gemma("now{zone:1}"), None),
        ("gemma4", gemma("unknown{}"), None),
        ("gemma4", "<|tool_call> what", None),
        ("json", "<think>Well</think> done", True),
        ("json", "Hello, {world}", True),
        ("json", ROME, True),
        ("json", NOW, True),
        ("json", f"[{ROME}, {NOW}]", True),
        ("json", f"[{NOW}", False),
        ("json", FREE, True),
        ("json", '{"name": "unknown", "arguments": {"city": 1}}', True),
        ("json", '{"answer": 4}', True),
        ("json", ROME[:-1], False),
        ("json", WRONG, None),
        ("json", f"[{ROME}, {WRONG}]", None),
        ("json", '{"name": "now", "arguments": {"zone": 1}}', None),
        ("json", '{"name": "now", "parameters": {}}', None),
    ],
)
def test_text_is_free_and_calls_fit(form: str, text: str, expected: bool | None, vocabulary: GrammarVocabulary) -> None:
    assert ends(compiled(form, vocabulary), text) is expected


AGE = '{"type": "object", "properties": {"age": {"$ref": "#/$defs/Age"}}, "required": ["age"], \
"additionalProperties": false, "$defs": {"Age": {"type": "integer", "format": "int32"}}}'
LLAMA = ROME.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        *((form, '{"age": 7}', True) for form in FORMATS),
        *((form, '{"age": "7"}', None) for form in FORMATS),
        *((form, "Hello", None) for form in FORMATS),
        *((form, "", False) for form in FORMATS),
        ("hermes", called(ROME), True),
        ("hermes", f"\n{called(ROME)}\n{called(FREE)}", True),
        ("hermes", called(WRONG), None),
        ("hermes", f"{called(ROME)}{{", None),
        ("hermes", ROME, None),
        ("gemma4", gemma(ROME_GEMMA), True),
        ("gemma4", f"\n{gemma(ROME_GEMMA)}{gemma('anything{}')}", True),
        ("gemma4", gemma("now{zone:1}"), None),
        ("gemma4", ROME_GEMMA, None),
        ("json", ROME, True),
        ("json", f"[{ROME}, {FREE}]", True),
        ("json", WRONG, None),
        ("llama3", LLAMA, True),
        ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", True),
        ("mistral", f"[TOOL_CALLS][{ROME}, {NOW}]", True),
        ("mistral", f"[{ROME}]", None),
    ],
)
def test_an_answer_has_its_form_or_is_calls(
    form: str, text: str, expected: bool | None, vocabulary: GrammarVocabulary
) -> None:
    assert ends(compiled(form, vocabulary, Grammar(GrammarKind.JSON_SCHEMA, AGE)), text) is expected


def test_beside_calls_any_object_may_be_the_form(vocabulary: GrammarVocabulary) -> None:
    grammar = compiled("hermes", vocabulary, Grammar(GrammarKind.JSON_OBJECT))
    assert ends(grammar, '{"a": [1]}') is ends(grammar, called(NOW)) is True
    assert ends(grammar, "[1]") is None


THOUGHT = "\nWhat {is} [he] after? <b>\n"


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{THOUGHT}</think>\n\n{{"age": 7}}', True),
        (f'{THOUGHT}</think>{{"age": 7}}', True),
        (f"{THOUGHT}</think>no", None),
        (f"{THOUGHT}</think></think>", None),
        (THOUGHT, False),
    ],
)
def test_a_form_may_come_behind_reasoning(
    begun: bool, tools: list[Tool], text: str, expected: bool | None, vocabulary: GrammarVocabulary
) -> None:
    start = ReasoningStart(ReasoningMarkers("<think>", "</think>"), begun)
    wanted, ids = Grammar(GrammarKind.JSON_SCHEMA, AGE), mark_ids(vocabulary)
    grammar = compile_grammar(form_grammar(wanted, tools, FORMATS["hermes"], start, ids), vocabulary)
    probe(grammar)
    assert ends(grammar, text if begun else f"<think>{text}") is expected
    assert ends(grammar, '{"age": 7}') is (not begun), "without the marker all is thought once it has begun"
    assert begun or ends(grammar, "hello") is None
    if tools:
        assert ends(grammar, f"{'' if begun else '<think>'}{THOUGHT}</think>\n{called(NOW)}") is True


def test_a_choice_may_come_behind_reasoning(vocabulary: GrammarVocabulary) -> None:
    start = ReasoningStart(ReasoningMarkers("<think>", "</think>"), False)
    wanted = Grammar.of_choices(["a ::= b", "né", 'say "%llguidance"'])
    grammar = compile_grammar(form_grammar(wanted, [], None, start, mark_ids(vocabulary)), vocabulary)
    assert all(ends(grammar, text) for choice in wanted.choices for text in (choice, f"<think>x</think>{choice}"))


@pytest.mark.parametrize("form", FORMATS)
def test_one_of_of_a_strict_tool_is_held_to(form: str, vocabulary: GrammarVocabulary) -> None:
    cases = [{"properties": {"a": {"type": kind}}} for kind in ("integer", "number")]
    for strict in (True, False):
        tools = [Tool(name="now", strict=strict, parameters={"type": "object", "oneOf": cases})]
        made = [forced_grammars(tools, FORMATS[form], {})[0]]
        if strict:
            made.append(form_grammar(Grammar(GrammarKind.JSON_OBJECT), tools, FORMATS[form], None, {}))
            made += [grammar] if (grammar := strict_grammar(tools, FORMATS[form], {})) else []
        for grammar in made:
            assert ("told apart" in judge(grammar, vocabulary).problem) is strict


def test_schemas_that_are_too_much_for_one_grammar_are_not_held_to_unless_they_are_strict() -> None:
    large = {"type": "object", "description": "x" * 40_000}
    tools = [Tool(name=name, parameters=large) for name in ("a", "b")]
    grammar, loose = forced_grammars([*tools, Tool(name="c", parameters=PLACE, strict=True)], FORMATS["json"], {})
    held = json.loads(grammar.source)["$defs"]
    assert loose is None and held["tool0"] == held["tool1"] == {"type": "object"} and "City" in held["tool2"]["$defs"]


BEHIND: list[tuple[Grammar, list[str], list[str]]] = [
    (Grammar(GrammarKind.REGEX, r"[a-c]+/\d\n::=%llguidance"), ["ab/7\n::=%llguidance"], ["ab/x", "ab/7 "]),
    # It fits the marker, too, and yet reasoning is free where it begins with that.
    (Grammar(GrammarKind.REGEX, ".*"), ["", "one line", "a <b>"], ["two\nlines"]),
    (Grammar(GrammarKind.EBNF, 'start: "a" thought "}" // }\nthought: form+\nform: "b"'), ["ab}", "abb}"], ["a}", "b"]),
    (Grammar(GrammarKind.EBNF, '\n%llguidance {}\n\nstart: A\nA: "a"'), ["a"], ["b"]),
    (Grammar(GrammarKind.EBNF, '%ignore " "\nstart: "a" "::="'), ["a::=", "a  ::="], ["a:"]),
    (Grammar(GrammarKind.EBNF, 'root ::= "a" | end # }\nend ::= [0-9]+ "}"'), ["a", "12}"], ["12", "aa"]),
]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("wanted", "right", "wrong"), BEHIND)
def test_expressions_and_context_free_grammars_may_come_behind_reasoning(
    begun: bool, wanted: Grammar, right: list[str], wrong: list[str], vocabulary: GrammarVocabulary
) -> None:
    start = ReasoningStart(ReasoningMarkers("<think>", "</think>"), begun)
    grammar = compile_grammar(form_grammar(wanted, [], None, start, mark_ids(vocabulary)), vocabulary)
    probe(grammar)
    check_grammar(grammar.grammar)
    thought = f"{'' if begun else '<think>'}{THOUGHT}</think>"
    assert all(ends(grammar, f"{thought}{space}{text}") for text in right for space in ("", "\n\n"))
    assert not any(ends(grammar, f"{thought}{text}") for text in wrong)
    assert begun or all(ends(grammar, text) for text in right)


def test_without_a_strict_tool_or_with_marks_that_are_no_text_nothing_is_held() -> None:
    assert strict_grammar([TOOLS[2]], FORMATS["hermes"], {}) is None
    assert all(strict_grammar(TOOLS, FORMATS[form], {}) is None for form in ("llama3", "mistral"))


@settings(max_examples=examples(25))
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=60))
def test_any_text_without_a_call_is_allowed(text: str, vocabulary: GrammarVocabulary) -> None:
    assert ends(compiled("hermes", vocabulary), text) is ("<tool_call>" not in text)
