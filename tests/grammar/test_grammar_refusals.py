"""Grammars that cannot be used are refused with a reason, and hostile ones harm nobody."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_grammar import CHOICE, END, OBJECT, SCHEMA, VOCAB

from gateway.core.reasoning import ReasoningMarkers, ReasoningStart
from gateway.core.tool_grammar import form_grammar
from outrider.errors import InternalError, InvalidRequestError, OverloadedError
from outrider.grammar.compiler import LENGTH, GrammarVocabulary, compile_grammar, probe
from outrider.grammar.spec import (
    EXACT_ONE_OF,
    FORMATS,
    MAX_DEPTH,
    Grammar,
    GrammarKind,
    check_grammar,
    without_further_keys,
)
from outrider.protocol.generation_codec import decode_grammar, encode_grammar
from outrider.protocol.speculation import Open
from outrider.protocol.speculation_codec import decode_verify, encode_verify
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from verify_service.door import grammar_checker
from verify_service.door.admission import Admission
from verify_service.door.grammar_checker import GrammarChecker, Sandbox


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        inner = {"type": "array", "items": inner}
    return inner


OVERLAPPING = {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^a"}]}
AT_SIGHT: list[tuple[Grammar, str, str]] = [
    (schema([]), "json_schema", "not an object"),
    (Grammar(GrammarKind.JSON_SCHEMA, "{"), "json_schema", "not valid JSON"),
    (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000), "json_schema", "over the limit of 65536"),
    (Grammar(GrammarKind.JSON_SCHEMA, "[" * 60_000), "json_schema", "nested"),
    (schema(deep(MAX_DEPTH)), "json_schema", "nested over 64 levels"),
    (schema({"properties": {"a": {"not": {}}}}), "json_schema.properties.a.not", "not supported; say what"),
    (schema({"anyOf": [{}, {"contains": {}}]}), "json_schema.anyOf[1].contains", "check it afterwards"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"title": "\ud800"}'), "json_schema", "lone surrogate"),
    (schema({"x-guidance": {"lenient": True}}), "json_schema.x-guidance", "remove it"),
    *(
        (schema({"items": {"propertyNames": names}}), "json_schema.items.propertyNames", "use patternProperties")
        for names in (
            {"anyOf": [{"const": "a"}]} | {"pattern": 7},
            {"pattern": "a", "minLength": 1},
            {"minLength": [1]},
            {"minLength": -1},
            {"type": "integer"},
            {"$ref": "#/nowhere"},
            {"$ref": "#/items/propertyNames"},
            7,
        )
    ),
    (schema({"$ref": "http://example.com/a.json"}), "json_schema.$ref", "begins with #"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"const": 1e400}'), "json_schema.const", "not a finite number; send"),
    (schema({"enum": [1, [float("nan")]]}), "json_schema.enum[1][0]", "not a finite number"),
    (schema({"items": {"minimum": 10**30}}), "json_schema.items.minimum", "too far from 0; send"),
    (schema({"const": 2 - 2**63}), "json_schema.const", "too far from 0"),
    (Grammar(GrammarKind.EBNF, f'start: %json {{"const": {2 - 2**63}}}'), "ebnf", "too far from 0"),
    (regex(""), "regex", "is empty"),
    (regex("a" * 5000), "regex", "over the limit of 4096"),
    (Grammar.of_choices([]), "choice", "send 1 to 1024"),
    (Grammar.of_choices(["a", ""]), "choice", "empty choice"),
    (Grammar.of_choices([str(i) for i in range(1025)]), "choice", "1025 choices"),
]

WHEN_COMPILED: list[tuple[Grammar, str]] = [
    (schema({"type": "strin"}), "Invalid type"),
    (schema({"type": "string", "minLength": 5, "maxLength": 2}), "nsatisfiable"),
    (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "allows no text"),
    (schema({"type": "string", "pattern": "^(a{1000}){1000}$"}), "too complex"),
    (schema({"type": "string", "pattern": "(a)\\1"}), "backreferences"),
    (schema(OVERLAPPING | EXACT_ONE_OF), "cannot be told apart"),
    (schema({"propertyNames": {"pattern": "("}}), "unclosed group"),
    (schema({"type": "integer", "minimum": 2**63}), "too far from 0"),
    (schema({"type": "number", "maximum": -1e30}), "too far from 0"),
    (schema({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {"type": "null"}}}), "not disjoint"),
    (regex("(a"), "unclosed group"),
    (regex("a(?=b)c"), "look-around"),
    (regex("\\bx"), "word boundary"),
    (regex("(" * 1500 + "a" + ")" * 1500), "nested parentheses"),
    (regex("((a{100}){100}){100}"), "too complex"),
    (regex("[a&&b]"), "allows no text"),
]

FINE = [
    OBJECT,
    SCHEMA,
    CHOICE,
    schema({"properties": {"not": {"type": "null"}, "x-guidance": {}}, "enum": [{"not": None}]}),
    schema({"type": "array", "items": {"type": "integer"}, "minItems": 99_999, "maxItems": 100_000}),
    schema({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
    schema(deep(MAX_DEPTH // 2 - 1)),
    schema({"enum": [2**64 - 1, -(10**18), -1e300]}),
    regex("(a+)+b"),
    regex("(a|b)*a(a|b){12}"),
]


@pytest.mark.parametrize(("grammar", "field", "words"), AT_SIGHT)
def test_what_is_wrong_at_first_sight_is_told_with_field_and_fix(grammar: Grammar, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(grammar)
    assert caught.value.field == f"grammar.{field}" and words in caught.value.message and caught.value.fix
    assert caught.value.code == "invalid_grammar"
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(grammar, "guided_json")
    assert caught.value.field.startswith("guided_json")


@pytest.mark.parametrize(("grammar", "words"), WHEN_COMPILED)
def test_what_cannot_be_compiled_is_told_with_reason_and_fix(
    vocabulary: GrammarVocabulary, grammar: Grammar, words: str
) -> None:
    check_grammar(grammar)
    with pytest.raises(InvalidRequestError) as caught:
        probe(compile_grammar(grammar, vocabulary))
    assert words in caught.value.problem and caught.value.fix and caught.value.code == "invalid_grammar"
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("grammar", FINE)
def test_what_is_large_or_recursive_but_harmless_is_taken(vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
    check_grammar(grammar)
    probe(compile_grammar(grammar, vocabulary))


ANNOTATED: list[dict[str, Any]] = [
    {"type": "string", "format": "password"},
    {"type": ["string", "null"], "format": "uuid4", "contentEncoding": "base64", "x-mine": {"not": 1}},
    {"type": "integer", "format": "int32"},
    {"format": 7},
    {"properties": {"format": {"format": "idn-email"}}, "required": ["format"], "default": {"format": "x"}},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"$schema": "https://example.com/dialect", "$dynamicAnchor": "node", "type": "null", "$vocabulary": {}},
    {"anyOf": [{"const": "if"}, {"const": "not"}], "discriminator": {"mapping": {"if": "other.json", "not": "#/a"}}},
]


@pytest.mark.parametrize("annotated", ANNOTATED)
def test_annotations_are_passed_over(vocabulary: GrammarVocabulary, annotated: dict[str, Any]) -> None:
    grammar = schema({"type": "object", "properties": {"a": annotated}, "$defs": {"b": annotated}})
    check_grammar(grammar)
    probe(compile_grammar(grammar, vocabulary))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_the_library_knows_are_held_to(vocabulary: GrammarVocabulary, name: str) -> None:
    matcher = compile_grammar(schema({"type": "string", "format": name}), vocabulary).matcher()
    text = vocabulary.tokenizer.tokenize_str('" "')
    assert not all(matcher.consume_token(token) for token in text)


def test_a_strict_schema_says_nothing_that_is_not_held_to() -> None:
    listed = schema({"items": {"uniqueItems": True}})
    check_grammar(listed)
    with pytest.raises(InvalidRequestError, match=r"items.uniqueItems: is not enforced; leave it out and check"):
        check_grammar(listed, strict=True)
    check_grammar(schema({"uniqueItems": False}), strict=True)
    named = schema({"propertyNames": {"type": "string", "format": "uuid"}})
    check_grammar(named)
    with pytest.raises(InvalidRequestError, match=r"propertyNames.format: is not enforced"):
        check_grammar(named, strict=True)


def allows(vocabulary: GrammarVocabulary, grammar: Grammar, text: str) -> bool:
    """Whether an answer of this text is complete."""
    check_grammar(grammar)
    compiled = compile_grammar(grammar, vocabulary)
    probe(compiled)
    matcher = compiled.matcher()
    return all(map(matcher.consume_token, vocabulary.tokenizer.tokenize_str(text))) and matcher.is_accepting()


def test_names_that_many_objects_refer_to_are_limited_as_they_are_written_out() -> None:
    names = {"enum": [f"{number:x}" for number in range(4500)]}
    pattern = {"pattern": "a" * 30_000}
    for kind in (names, pattern):
        maps = {f"{number:x}": {"propertyNames": {"$ref": "#/$defs/E"}} for number in range(600)}
        source = json.dumps({"$defs": {"E": kind}, "properties": maps}, separators=(",", ":"))
        with pytest.raises(InvalidRequestError, match=r"properties\.\d\.propertyNames: .*limit of 65536 bytes; use a"):
            check_grammar(Grammar(GrammarKind.JSON_SCHEMA, source))
        check_grammar(schema({"propertyNames": kind}))
    below: dict[str, Any] = {"minLength": 1}
    for _ in range(200):
        below = {"a": below}
    deep_down = {"default": below, "propertyNames": {"$ref": "#/default" + "/a" * 200}}
    far_off = {"anyOf": [{}], "propertyNames": {"$ref": "#/anyOf/" + "9" * 5000}}
    for nowhere in (deep_down, far_off):
        with pytest.raises(InvalidRequestError, match="propertyNames: is not supported"):
            check_grammar(schema(nowhere))


def test_one_of_is_any_of_unless_it_is_strict(vocabulary: GrammarVocabulary) -> None:
    assert all(allows(vocabulary, schema(OVERLAPPING), text) for text in ('"b"', '"abcd"', '"ab"'))
    apart = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    strict = Grammar(GrammarKind.JSON_SCHEMA, without_further_keys(json.dumps(apart)))
    assert allows(vocabulary, strict, "7") and not allows(vocabulary, strict, "null")
    closed = without_further_keys(json.dumps(OVERLAPPING))
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, closed), strict=True)
    with pytest.raises(InvalidRequestError, match=r"cannot be told apart; use anyOf.* or leave strict out"):
        compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, closed), vocabulary)


NAMED = {"type": "object", "additionalProperties": {"type": "integer"}}
TREE = {"$defs": {"A/b": {"title": "A", "enum": ["red", "blue"]}, "c": {"$ref": "#/$defs/A~1b"}}}


@pytest.mark.parametrize(
    ("rules", "right", "wrong"),
    [
        ({"propertyNames": {"type": "string"}}, ['{"a":1}'], ['{"a":""}']),
        ({"propertyNames": True}, ['{"a":1}'], []),
        ({"propertyNames": False}, ["{}"], ['{"a":1}']),
        ({"propertyNames": {"type": "string", "pattern": "^[a-c]+$"}}, ["{}", '{"ab":1,"c":2}'], ['{"d":1}']),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1,"abc":1}'], ['{"a":1}', '{"abcd":1}']),
        ({"propertyNames": {"minLength": 2}}, ['{"abcdefgh":1}'], ['{"a":1}']),
        ({"propertyNames": {"enum": ["red", "blue", 7]}}, ['{"red":1,"blue":2}', "{}"], ['{"re":1}', '{"red":""}']),
        ({"propertyNames": {"const": "red"}, "minProperties": 1}, ['{"red":1}'], ["{}", '{"blue":1}']),
        (TREE | {"propertyNames": {"$ref": "#/$defs/c"}}, ['{"blue":2}'], ['{"green":1}']),
        (
            {"properties": {"ab": {"type": "null"}, "X": {}}, "propertyNames": {"pattern": "^[a-c]"}},
            ['{"ab":null,"c":1}', "{}"],
            ['{"X":1}', '{"ab":1}'],
        ),
        ({"allOf": [{"required": ["a"]}], "propertyNames": {"pattern": "^a"}}, ['{"a":1,"ab":1}'], ['{"ab":1}']),
    ],
)
def test_names_of_properties_are_held_to(
    vocabulary: GrammarVocabulary, rules: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert all(allows(vocabulary, schema(NAMED | rules), text) for text in right)
    assert not any(allows(vocabulary, schema(NAMED | rules), text) for text in wrong)
    nested = schema({"type": "array", "items": NAMED | {"propertyNames": {"const": "red"}}})
    assert allows(vocabulary, nested, '[{"red":1}]') and not allows(vocabulary, nested, '[{"blue":1}]')


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")
OPEN_A = A | {"additionalProperties": True}


@pytest.mark.parametrize(
    ("rules", "right", "wrong"),
    [
        (A, ['{"a":1}'], ['{"a":1,"b":2}']),
        (A | {"type": ["object", "null"]}, ["null"], ['{"a":1,"b":2}']),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a":1}'], ['{"a":1,"b":2}']),
        ({"type": "array", "items": {"anyOf": [A, B]}}, ['[{"a":1},{"b":1}]'], ['[{"a":1,"b":2}]']),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, ['{"a":1}'], ['{"a":1,"b":2}']),
        ({"properties": {}}, ["{}"], ['{"b":2}']),
        ({"patternProperties": {"^x": {"type": "integer"}}}, ['{"x1":1}', "{}"], ['{"b":2}']),
        # No word about keys, or one about further keys.
        ({"type": "object"}, ['{"b":2}'], []),
        (OPEN_A, ['{"a":1,"b":2}'], ['{"b":2}']),
        (A | {"required": ["a", "b"]}, ['{"a":1,"b":2}'], ['{"a":1}']),
        (A | {"minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
        # Joined schemas know nothing of each other's keys.
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":2}']),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, ['{"a":1,"b":2}'], ['{"b":2}']),
        (A | {"$ref": "#/$defs/B", "$defs": {"B": B}}, ['{"a":1,"b":2}'], ['{"a":1}']),
        (
            {"properties": {"x": {"anyOf": [A, B]}, "y": {"allOf": [{"$ref": "#/properties/x/anyOf/0"}, B]}}},
            ['{"y":{"a":1,"b":2}}'],
            ['{"y":{"a":1}}'],
        ),
        ({"items": A, "allOf": [{"type": "array", "items": B}]}, ['[{"a":1,"b":2}]'], ['[{"a":1}]']),
        (
            {"properties": {"x": A}, "patternProperties": {"x": B}},
            ['{"x":{"a":1,"b":2}}'],
            ['{"x":{"a":1}}', '{"b":2}'],
        ),
        (A | {"anyOf": [B, {"required": ["c"]}]}, ['{"a":1,"b":2}', '{"a":1,"c":3}'], ['{"a":1}']),
        (
            {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}], "required": ["x"]},
            ['{"x":{"a":1,"b":2}}'],
            ['{"x":{"a":1}}'],
        ),
    ],
)
def test_objects_have_the_keys_that_their_schema_names(
    vocabulary: GrammarVocabulary, rules: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """As with xgrammar, whose default vLLM and SGLang take: small models would not stop adding keys."""
    beside_calls = form_grammar(schema(rules), [], None, ReasoningStart(ReasoningMarkers("x", "y"), False), {})
    for grammar in (schema(rules), beside_calls):
        assert [text for text in right + wrong if allows(vocabulary, grammar, text)] == right


@pytest.mark.parametrize("grammar", [OBJECT, SCHEMA, CHOICE, regex("a")])
def test_a_grammar_travels_unchanged(grammar: Grammar) -> None:
    message = encode_grammar(grammar)
    assert message is not None
    assert decode_grammar(common_pb2.Grammar.FromString(message.SerializeToString())) == grammar


@pytest.mark.parametrize("message", [common_pb2.Grammar(), common_pb2.Grammar(json_object=False)])
def test_a_message_that_says_nothing_is_no_grammar(message: common_pb2.Grammar) -> None:
    with pytest.raises(InvalidRequestError, match="says nothing"):
        decode_grammar(message)


def test_drafts_are_told_and_a_grammar_that_they_do_not_know_does_no_harm() -> None:
    sampling = SamplingParams(seed=3, grammar=CHOICE)
    opened = Open(1, [1, 2], 2, sampling, 8)
    batch = encode_verify([opened])
    (got,) = decode_verify(batch)
    assert isinstance(got, Open) and got.sampling == sampling
    batch.events[0].open.grammar.CopyFrom(common_pb2.Grammar())
    (got,) = decode_verify(batch)
    assert isinstance(got, Open) and got.sampling == SamplingParams(seed=3)


def test_verify_s_door_checks_what_the_gateway_has_checked() -> None:
    def admitted(**fields: Any) -> Grammar | None:
        request = verify_pb2.VerifyServiceGenerateRequest(prompt_token_ids=[1], max_tokens=3, **fields)
        return Admission(VOCAB, 100, ends, speculation=True).admit(request).sampling.grammar

    ends: tuple[int, ...] = (END,)
    assert admitted(grammar=encode_grammar(SCHEMA)) == SCHEMA and admitted() is None
    for fields, field in (
        ({"grammar": common_pb2.Grammar()}, "grammar"),
        ({"grammar": common_pb2.Grammar(regex="a" * 5000)}, "grammar.regex"),
        ({"grammar": encode_grammar(OBJECT), "ignore_eos": True}, "ignore_eos"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            admitted(**fields)
        assert caught.value.field == field and caught.value.fix
    ends = ()
    with pytest.raises(InvalidRequestError, match="no end-of-sequence token"):
        admitted(grammar=encode_grammar(OBJECT))


async def test_grammars_are_tried_in_processes_that_may_die(tokenizer_folder: Path) -> None:
    checker = GrammarChecker(str(tokenizer_folder), VOCAB, [END])
    try:
        await asyncio.gather(*(checker.check(grammar) for grammar in (OBJECT, SCHEMA, OBJECT)))
        with pytest.raises(InvalidRequestError) as caught:
            await checker.check(regex("(a"))
        assert caught.value.field == "grammar.regex" and caught.value.fix
        for sandbox in checker._sandboxes:
            if sandbox._process is not None:
                sandbox._process.kill()
                await sandbox._process.wait()
        await checker.check(CHOICE)
    finally:
        await checker.close()


async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(tokenizer_folder: Path) -> None:
    slow = schema({"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(1800)}})
    checker = GrammarChecker(str(tokenizer_folder), VOCAB, [END], seconds=0.02)
    try:
        with pytest.raises(InvalidRequestError, match=r"more than 0\.02 s"):
            await checker.check(slow)
        for sandbox in checker._sandboxes:
            sandbox._seconds = 60.0
        await checker.check(OBJECT)
        with pytest.raises(InvalidRequestError, match="too complex"):  # tried again: the machine may have been busy
            await checker.check(slow)
    finally:
        await checker.close()


async def test_a_process_that_does_not_start_is_started_again(tmp_path: Path) -> None:
    """What uvloop runs between fork and exec dies now and then; see `outrider`."""
    once = tmp_path / "once"
    ready = f"import sys; sys.stdout.buffer.write({LENGTH.pack(0)!r}); sys.stdout.flush(); sys.stdin.read()"
    die = f"import os, pathlib; path = pathlib.Path({str(once)!r}); path.exists() or (path.touch(), os.abort())\n"
    sandbox = Sandbox([sys.executable, "-c", die + ready], 20.0)
    try:
        assert (await sandbox._started()).returncode is None and once.exists()
    finally:
        await sandbox.close()
    for command in ([sys.executable, "-c", "import os; os.abort()"], [str(tmp_path / "no such program")]):
        with pytest.raises(InternalError, match="does not start"):
            await Sandbox(command, 20.0).judge(OBJECT)


def test_grpc_does_nothing_when_a_program_is_started() -> None:
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


async def test_a_grammar_that_broke_its_process_is_tried_again_and_what_the_process_said_is_kept(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(str(tokenizer_folder), VOCAB, [END])
    asked: list[int] = []

    async def ask(process: Any, body: bytes) -> bytes:
        asked.append(len(body))
        if len(asked) == 1:
            raise ConnectionError
        return await real(process, body)

    real = grammar_checker._ask
    monkeypatch.setattr(grammar_checker, "_ask", ask)
    try:
        with pytest.raises(InvalidRequestError, match="too much memory"):
            await checker.check(OBJECT)
        await checker.check(OBJECT)
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                await checker.check(regex("(a"))
        assert len(asked) == 3
    finally:
        await checker.close()


async def test_a_system_that_cannot_limit_memory_still_judges_grammars(tokenizer_folder: Path) -> None:
    macos = """
import resource, sys
from outrider.grammar import compiler
def setrlimit(which, limits, real=resource.setrlimit):
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    real(which, limits)
resource.setrlimit = setrlimit
compiler.main(sys.argv[1:])
"""
    sandbox = Sandbox([sys.executable, "-c", macos, str(tokenizer_folder), str(VOCAB), str(END)], 60.0)
    try:
        assert not (await sandbox.judge(OBJECT)).problem
    finally:
        await sandbox.close()


async def test_a_tokenizer_that_the_library_cannot_read_is_told_at_the_door(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(str(tmp_path), VOCAB, [END])
    try:
        with pytest.raises(InvalidRequestError, match="does not know the model's tokenizer") as caught:
            await checker.check(OBJECT)
        assert caught.value.fix
    finally:
        await checker.close()


async def test_a_key_with_many_grammars_leaves_places_and_turns_to_others(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(str(tokenizer_folder), VOCAB, [END], seconds=60.0)
    asked: list[bytes] = []
    may_go = asyncio.Event()

    async def ask(process: Any, body: bytes) -> bytes:
        asked.append(body)
        await may_go.wait()
        return await real(process, body)

    real = grammar_checker._ask
    monkeypatch.setattr(grammar_checker, "_ask", ask)
    flood = [asyncio.create_task(checker.check(regex(f"a{{{count}}}"), "flood/0")) for count in range(1, 61)]
    try:
        # All have asked: those without a place are told so at once, and the others wait.
        refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        others = [asyncio.create_task(checker.check(regex(f"a{{{count}}}"), "other/1")) for count in (40, 70)]
        await asyncio.sleep(0)
        assert len(refused) == 12
        for task in refused:
            error = task.exception()
            assert isinstance(error, OverloadedError) and error.code == "share_used_up"
        may_go.set()
        await asyncio.gather(*others, *(task for task in flood if task not in refused))
        # One of the other key's was the flood's as well; it is tried once, when the first of both has its turn.
        assert len(asked) == 49
        places = [next(at for at, body in enumerate(asked) if text in body) for text in (b"a{40}", b"a{70}")]
        assert max(places) <= 6, "the flood had two processes, and then every second turn"
    finally:
        await checker.close()
