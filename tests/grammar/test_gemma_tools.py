"""Calls as Gemma 4 writes them are held to the schemas of tools: what the grammar allows is read and fits."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_grammar import byte_level
from tokenizers import pre_tokenizers

from gateway.core.gemma_calls import QUOTE
from gateway.core.request import Tool
from gateway.core.tool_grammar import forced_grammars
from gateway.core.tool_parser import FORMATS, ToolCallParser, ToolCalls
from outrider.errors import InvalidRequestError
from outrider.grammar.compiler import CompiledGrammar, GrammarVocabulary, compile_grammar, judge
from outrider.grammar.spec import GrammarKind

FORM = FORMATS["gemma4"]
TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
    },
    "required": ["name"],
}


SIGNS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
IDS = {mark: len(SIGNS) + at for at, mark in enumerate((FORM.opener, FORM.closer, FORM.quote))}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    """All bytes, and the marks as special tokens, as the model has them."""
    folder = tmp_path_factory.mktemp("bytes")
    inner = byte_level(SIGNS)
    inner.add_special_tokens(["<end>", *IDS])
    assert all(inner.token_to_id(mark) == token for mark, token in IDS.items())
    inner.save(str(folder / "tokenizer.json"))
    return GrammarVocabulary.from_folder(folder, inner.get_vocab_size(), [SIGNS.index("<end>")])


def compiled(schema: dict[str, Any], vocabulary: GrammarVocabulary, *, strict: bool = True) -> CompiledGrammar:
    parameters = {"type": "object", "$defs": {"Tree": TREE}} | schema
    tools = [Tool(name="f", parameters=parameters, strict=strict), Tool(name="other", strict=True)]
    grammar, _ = forced_grammars(tools, FORM, IDS)
    assert grammar.kind is GrammarKind.EBNF
    return compile_grammar(grammar, vocabulary)


def ends(grammar: CompiledGrammar, text: str) -> bool | None:
    """Whether a call may end here; None where the text itself is not allowed."""
    matcher = grammar.matcher()
    spell = grammar.vocabulary.tokenizer.tokenize_str
    for sign in text:
        if not all(map(matcher.consume_token, [IDS[QUOTE]] if sign == "`" else spell(sign))):
            return None
    return bool(matcher.is_accepting())


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "arguments", "expected"),
    [
        (an_object(b={"type": "integer"}, a={"type": "string"}), "{a:`x`,b:1}", True),
        (an_object(b={"type": "integer"}, a={"type": "string"}), "{b:1,a:`x`}", None),  # not the template's order
        (an_object(a={"type": "string"}), '{a:`"}], <|é\n`}', True),
        (an_object(a={"type": "string"}), "{a:x}", None),
        (an_object(a={"type": "string"}), "{a:`x`", False),
        (an_object(a={"type": "string", "maxLength": 2}), '{a:"xy"}', True),
        (an_object(a={"type": "integer", "minimum": 3}), "{a:12}", True),
        (an_object(a={"type": "integer", "minimum": 3}), "{a:2}", None),
        (an_object(a={"enum": ["x", "::= %llguidance"]}), "{a:`::= %llguidance`}", True),
        (an_object(a={"enum": ["x", "y"]}), "{a:`z`}", None),
        (an_object(a={"type": "array", "items": {"const": "x"}, "minItems": 2}), "{a:[`x`,`x`,`x`]}", True),
        (an_object(a={"type": "array", "items": {"const": "x"}, "minItems": 2}), "{a:[`x`]}", None),
        (an_object(a={"type": "array", "maxItems": 1}), "{a:[]}", True),
        (an_object(a={"type": "array", "maxItems": 1}), "{a:[1,2]}", None),
        (an_object(a={"anyOf": [{"type": "string"}, {"type": "null"}]}), "{a:null}", True),
        (an_object(a={"$ref": "#/$defs/Tree"}), "{a:{kids:[{name:`x`}],name:`y`}}", True),
        (an_object(a={"$ref": "#/$defs/Tree"}), "{a:{kids:[{}],name:`y`}}", None),
        (an_object(a={"type": "object", "additionalProperties": {"type": "boolean"}}), "{a:{x:true,y:false}}", True),
        (an_object(a={"type": "object", "additionalProperties": {"type": "boolean"}}), "{a:{x:1}}", None),
        (an_object(a={}), "{a:[{b:{}},`x`,null,-1.5]}", True),
        (an_object(**{"a key: 1": True}), '{"a key: 1":1}', True),
        ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}, "required": ["b"]},
         "{b:null,c:null}", True),
        ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}, "{}", True),
        ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}, "{b:null}", True),
        ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["b"]}, "{a:null}", None),
        ({}, "{}", True),
        ({}, "{a:1}", None),
        ({"properties": {"a": True}, "additionalProperties": True}, '{"b": 1}', True),
    ],
)  # fmt: skip
def test_arguments_fit_the_schema_in_the_form_of_the_model(
    schema: dict[str, Any], arguments: str, expected: bool | None, vocabulary: GrammarVocabulary
) -> None:
    assert ends(compiled(schema, vocabulary), f"call:f{arguments}") is expected


LEAVES = st.sampled_from(
    [{}, True, {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"},
     {"type": "null"}, {"type": ["string", "null"]}, {"enum": ["a", "b c"]}, {"enum": [1, "x", None]}, {"const": "::="},
     {"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^[ab]{2}$"}, {"$ref": "#/$defs/Tree"},
     {"title": "T", "description": "any"}]
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "C", "d e", 'f"', "g:", "é"])


def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.integers(0, 2), st.integers(1, 2),
    )  # fmt: skip
    return lists | objects(inner) | st.lists(inner, min_size=1, max_size=3).map(lambda cases: {"anyOf": cases})


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inner, max_size=4).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
            },
            optional={"additionalProperties": st.sampled_from([True, False, {"type": "integer"}])},
        )
    )


@settings(max_examples=examples(60))
@given(schema=objects(st.recursive(LEAVES, nodes, max_leaves=6)), seed=st.integers(0, 2**32))
def test_whatever_the_grammar_allows_is_a_call_that_fits(
    schema: dict[str, Any], seed: int, vocabulary: GrammarVocabulary
) -> None:
    matcher = compiled(schema, vocabulary).matcher()
    chance, tokens = random.Random(seed), list[int]()
    ending = {vocabulary.tokenizer.tokenize_str(sign)[0] for sign in '}],"'} | {IDS[QUOTE]}
    while not matcher.is_accepting():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        ends_something = [token for token in allowed if token in ending]
        tokens.append(chance.choice(ends_something if ends_something and chance.random() < 0.7 else allowed))
        assert matcher.consume_token(tokens[-1])
    spelled = {IDS[QUOTE]: QUOTE.encode()}
    text = b"".join(spelled.get(token) or vocabulary.tokenizer.decode_bytes([token]) for token in tokens).decode()
    parser = ToolCallParser(ToolCalls(FORM, frozenset({"f", "other"}), forced=True))
    deltas: list[Any] = [*parser.push(text), *parser.finish()]
    assert deltas[0].name in ("f", "other")
    if deltas[0].name == "f":
        arguments = json.loads("".join(delta.arguments for delta in deltas))
        jsonschema.validate(arguments, schema | {"$defs": {"Tree": TREE}})


@pytest.mark.parametrize(
    "schema",
    [{"properties": 7}, {"properties": {"a": 5}}, {"required": 7}, {"required": [[]]}, an_object(a={"$ref": {}}),
     an_object(a={"enum": 1}), an_object(a={"anyOf": 1}), an_object(a={"anyOf": []}), an_object(a={"type": {}}),
     an_object(a={"type": "array", "minItems": "1"}), an_object(a={"type": "array", "maxItems": 0.5}),
     an_object(a={"type": "array", "items": [1]}), an_object(a={"$ref": "#/$defs/nowhere"}), an_object(a=False)],
)  # fmt: skip
def test_what_is_no_schema_is_refused_by_the_grammar_library_and_harms_nobody(
    schema: dict[str, Any], vocabulary: GrammarVocabulary
) -> None:
    tools = [Tool(name="f", parameters={"type": "object"} | schema, strict=True)]
    assert judge(forced_grammars(tools, FORM, IDS)[0], vocabulary).problem


def test_large_and_deep_schemas_end(vocabulary: GrammarVocabulary) -> None:
    chain = {f"d{at}": an_object(a={"$ref": f"#/$defs/d{at + 1}"}) for at in range(500)} | {"d500": {"type": "null"}}
    tools = [Tool(name="f", parameters=an_object(a={"$ref": "#/$defs/d0"}) | {"$defs": chain})]
    grammar, loose = forced_grammars(tools, FORM, {})
    assert loose is not None and "ref500" in grammar.source
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "array", "items": deep, "minItems": 1}
    assert ends(compiled(an_object(a=deep), vocabulary, strict=False), "call:f{a:[[1]]}") is None
    # Each of these needs all definitions beside it.
    many = {f"p{at}": {"$ref": "#/$defs/d0", "minLength": at} for at in range(500)}
    parameters = an_object(**many) | {"$defs": {"d0": {"description": "x" * 9000}}}
    with pytest.raises(InvalidRequestError, match="over the limit"):
        forced_grammars([Tool(name="f", parameters=parameters, strict=True)], FORM, {})
    grammar, loose = forced_grammars([Tool(name="f", parameters=parameters)], FORM, {})
    assert loose is None and "p1" not in grammar.source
