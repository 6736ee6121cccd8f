"""Context-free grammars in Lark and in GBNF, and schemas whose objects have no further keys."""

from __future__ import annotations

import json

import pytest

from outrider.errors import InvalidRequestError
from outrider.grammar.compiler import GrammarVocabulary, compile_grammar, judge
from outrider.grammar.spec import Grammar, GrammarKind, check_grammar, without_further_keys

LARK = 'start: greeting ", " NAME\ngreeting: "hi" | "ho"\nNAME: /[a-c]+/'
SOURCES = [LARK, f"?{LARK}", f"%llguidance {{}}\n\n{LARK}", 'root ::= ("hi" | "ho") ", " [a-c]+']


def ebnf(source: str) -> Grammar:
    return Grammar(GrammarKind.EBNF, source)


@pytest.mark.parametrize("source", SOURCES)
def test_both_languages_derive_the_same_texts(vocabulary: GrammarVocabulary, source: str) -> None:
    check_grammar(ebnf(source))
    compiled = compile_grammar(ebnf(source), vocabulary)
    for text, derived in (("ho, abc", True), ("he, abc", False), ("hi, d", False)):
        matcher = compiled.matcher()
        tokens = vocabulary.tokenizer.tokenize_str(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is derived, text


@pytest.mark.parametrize("source", ["start: missing", "root ::= (", "nothing", "root ::= " + "(" * 5000])
def test_what_is_no_grammar_is_refused(vocabulary: GrammarVocabulary, source: str) -> None:
    with pytest.raises(InvalidRequestError, match="grammar") as caught:
        compile_grammar(ebnf(source), vocabulary)
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("root ::= missing", "Rule 'missing' not found"),
        ('rule ::= "a"', "No 'root' rule found"),
        ('root ::= a-b\na-b ::= "c"\nA-B ::= "d"', "Rule 'A_B' already exists"),
    ],
)
def test_a_rule_that_is_missing_or_there_twice_is_named(
    vocabulary: GrammarVocabulary, source: str, problem: str
) -> None:
    assert problem in judge(ebnf(source), vocabulary).problem


@pytest.mark.parametrize(
    "source", ["start: <[{}]>", "start: <[1,2-{}]>", f"start: <[{10**20}]>", f'start: "a"{{{10**20}}}']
)
def test_a_token_or_a_count_that_is_too_large_is_not_called_complex(vocabulary: GrammarVocabulary, source: str) -> None:
    with pytest.raises(InvalidRequestError, match="a number that is too large; name tokens by ids of the vocabulary"):
        compile_grammar(ebnf(source.replace("{}", str(vocabulary.size))), vocabulary)


@pytest.mark.parametrize(
    "source",
    ['start: "number too large" name', "start: limit name\nlimit: /[0-9]+/", 'start: "regex parse error" name'],
)
def test_what_a_message_quotes_of_a_grammar_says_nothing_of_what_is_wrong(
    vocabulary: GrammarVocabulary, source: str
) -> None:
    for name in ("missing", "limit_of_rows"):
        refused = judge(ebnf(source.replace("name", name)), vocabulary)
        assert refused.problem.startswith(f'at 1(8): unknown name: "{name}"')
        assert refused.fix == "send Lark with a rule start, or GBNF with a rule root"


def test_strict_schemas_have_no_further_keys_unless_they_say_so() -> None:
    inner = {"type": "object", "properties": {"type": {"enum": [{"properties": {}}]}}}
    schema = {
        "properties": {"a": inner, "b": {"type": "object", "additionalProperties": True}},
        "items": [{"anyOf": [{"type": "object"}]}],
        "allOf": [{"properties": {"c": {}}}],
    }
    closed = json.loads(without_further_keys(json.dumps(schema)))
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"] == inner | {"additionalProperties": False}
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert closed["items"][0]["anyOf"][0]["additionalProperties"] is False
    assert closed["allOf"] == schema["allOf"]
