"""What a grammar allows after an answer, and after every draft path below it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_grammar import CHOICE, END, OBJECT, REGEX, SCHEMA, TOKENS, VOCAB, byte_level, text_of, tiny_vocabulary
from tokenizers import decoders, models, pre_tokenizers

from outrider.errors import ConfigError, InvalidRequestError
from outrider.grammar import compiler
from outrider.grammar.compiler import (
    CompiledGrammar,
    GrammarState,
    GrammarVocabulary,
    TokenPath,
    compile_grammar,
    probe,
    unpack,
)
from outrider.grammar.spec import Grammar, GrammarKind


def legal(state: GrammarState, path: TokenPath = ()) -> list[int]:
    """Tokens that may come after a path that is allowed."""
    node = state.find(path)
    assert node is not None
    mask = state.mask(node, path)
    if mask is None:  # asked again, for the grammar may have been compiled anew
        mask = state.mask(node, path)
    assert mask is not None
    return [int(token) for token in np.flatnonzero(unpack(mask, VOCAB))]


def renewing(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """A grammar that is compiled anew at once when it must be."""
    compiled = compile_grammar(grammar, vocabulary)

    def renew(state: GrammarState) -> None:
        compiled.adopt(compiler.compile_grammar(grammar, vocabulary))
        state.renewed()

    compiled.renew = renew
    return compiled


def write(state: GrammarState, source: random.Random, most: int) -> list[int]:
    """An answer of random legal tokens; where it may end it does."""
    answer: list[int] = []
    while len(answer) < most and END not in answer:
        tokens = legal(state)
        # Whitespace leads nowhere, and takes most of the tokens.
        text = [token for token in tokens if not text_of([token]).isspace()]
        token = END if END in tokens else source.choice(text or tokens)
        state.follow([token])
        answer.append(token)
    return answer


names = st.sampled_from(["a", "b", "ab", "x1"])
leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^(ab|x){1,3}$"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["yes", "ab", 12, None]},
        {"const": {"a": [1, "x"]}},
        {"type": ["null", "boolean"]},
        {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 10, "maximum": 12}]},
    ]
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
    objects = st.builds(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
    )
    return st.one_of(lists, objects)


@settings(max_examples=examples(60))
@given(schema=st.recursive(leaves, nested, max_leaves=6), seed=st.integers(0, 2**32))
def test_every_complete_answer_parses_and_fits_its_schema(
    vocabulary: GrammarVocabulary, schema: dict[str, Any], seed: int
) -> None:
    state = GrammarState(compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), vocabulary))
    answer = write(state, random.Random(seed), 150)
    if answer[-1] == END:
        jsonschema.validate(json.loads(text_of(answer)), schema)
        assert legal(state) == [END], "more than the end is legal behind the end"
    else:
        assert len(answer) == 150


@pytest.mark.parametrize("grammar", [OBJECT, SCHEMA, REGEX, CHOICE])
def test_a_mask_depends_on_history_and_path_alone(vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
    compiled, source = compile_grammar(grammar, vocabulary), random.Random(5)
    answer = write(GrammarState(compiled), source, 30)
    state = GrammarState(compiled)
    for length, token in enumerate(answer):
        for _ in range(4):  # in any order, with answers cut short and taken up again
            path: TokenPath = ()
            for _ in range(source.randint(0, 5)):
                tokens = [token for token in legal(state, path) if token != END]
                if not tokens:
                    break
                path = (*path, source.choice(tokens))
            fresh = GrammarState(compile_grammar(grammar, vocabulary))
            fresh.follow([*answer[:length], *path])
            assert legal(state, path) == legal(fresh)
        state.follow([token])


def test_a_path_with_a_forbidden_token_has_no_state(vocabulary: GrammarVocabulary) -> None:
    state = GrammarState(compile_grammar(CHOICE, vocabulary))
    yes, no = TOKENS.index("yes"), TOKENS.index("n")
    assert state.find((yes, no)) is None and state.find((no,)) is not None
    assert state.find((no, END)) is None, "n alone is no choice"
    assert state.find((yes, END)) is not None
    assert legal(state, (yes, END)) == [END]
    assert state.find((yes, END, yes)) is None


def test_what_lies_off_the_committed_path_is_forgotten_and_what_lies_on_it_is_kept(
    vocabulary: GrammarVocabulary,
) -> None:
    compiled = compile_grammar(CHOICE, vocabulary)
    state = GrammarState(compiled)
    yes, y, a = TOKENS.index("yes"), TOKENS.index("y"), TOKENS.index("a")
    for path in ((yes,), (y,), (a,)):
        legal(state, path)
    kept = state.root.children[yes]
    num_masks = compiled.num_masks
    state.follow([yes])
    assert state.root is kept
    legal(state)
    assert compiled.num_masks == num_masks, "a mask was computed twice"


def test_special_and_padding_tokens_are_never_legal_within_a_text(vocabulary: GrammarVocabulary) -> None:
    anything = GrammarState(compile_grammar(Grammar(GrammarKind.REGEX, r"(.|\n)*"), vocabulary))
    assert legal(anything) == [*range(VOCAB - 2), END]
    state = GrammarState(compile_grammar(OBJECT, vocabulary))
    state.follow([TOKENS.index('{"')])
    assert not {VOCAB - 2, END} & set(legal(state))


def test_a_grammar_whose_shared_memory_is_used_up_goes_on_with_a_fresh_one(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> GrammarState:
        return GrammarState(compile_grammar(Grammar(GrammarKind.REGEX, "([a-e]{1,9}x){5,9}"), vocabulary))

    want = write(made(), random.Random(1), 60)
    limits = compiler._LIMITS
    tight = type(limits)(
        **{name: getattr(limits, name) for name in ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items")},
        max_lexer_states=60,
        verbose_errors=False,
    )
    monkeypatch.setattr(compiler, "_LIMITS", tight)
    compiled = renewing(Grammar(GrammarKind.REGEX, "([a-e]{1,9}x){5,9}"), vocabulary)
    first = compiled._pristine
    for seed in (2, 3, 4, 5, 6, 7, 8):
        write(GrammarState(compiled), random.Random(seed), 60)
    assert write(GrammarState(compiled), random.Random(1), 60) == want
    assert compiled._pristine is not first, "the limit was never reached"


def test_answers_that_shared_what_is_used_up_share_one_fresh_compilation(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = renewing(CHOICE, vocabulary)
    states = [GrammarState(compiled) for _ in range(5)]
    want, worn = legal(GrammarState(compiled)), [state._matcher for state in states]
    real = GrammarState._try
    monkeypatch.setattr(GrammarState, "_try", lambda self, path: None if self._matcher in worn else real(self, path))
    made: list[Grammar] = []
    monkeypatch.setattr(compiler, "compile_grammar", lambda *given: (made.append(given[0]), compile_grammar(*given))[1])
    assert [legal(state) for state in states] == [want] * 5
    assert made == [CHOICE]


def test_an_answer_on_which_the_library_gives_up_has_an_error_and_no_mask(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_LIMITS", type(compiler._LIMITS)(max_lexer_states=30, verbose_errors=False))
    state = GrammarState(compile_grammar(Grammar(GrammarKind.REGEX, "([a-e]{1,9}x){5,9}"), vocabulary))
    source = random.Random(1)
    while (mask := state.mask(state.root, ())) is not None:
        state.follow([source.choice([int(token) for token in np.flatnonzero(unpack(mask, VOCAB)) if token != END])])
        assert state.num_committed < 90
    assert state.error is not None and "too complex" in state.error.message


def test_giving_up_on_a_draft_path_harms_neither_the_answer_nor_other_paths(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_grammar(CHOICE, vocabulary)
    state = GrammarState(compiled)
    yes, no = TOKENS.index("yes"), TOKENS.index("n")
    legal(state)
    tried: list[TokenPath] = []
    real = GrammarState._try

    def failing(self: GrammarState, path: TokenPath) -> Any:
        tried.append(path)
        return None if path[:1] == (yes,) else real(self, path)

    monkeypatch.setattr(GrammarState, "_try", failing)
    first = compiled._pristine
    for _ in range(3):
        node = state.find((yes,))
        assert node is not None and state.mask(node, (yes,)) is None
    assert tried == [(yes,)], "what failed was tried again"
    assert compiled._pristine is first, "a draft had the grammar compiled anew"
    assert END not in legal(state, (no,)) and state.error is None
    state.follow([yes])
    assert END in legal(state)


def test_a_model_that_cannot_end_an_answer_has_no_vocabulary(vocabulary: GrammarVocabulary, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        GrammarVocabulary.from_folder(tmp_path, VOCAB, [])
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        GrammarVocabulary.from_folder(tmp_path, VOCAB, [1])


@pytest.mark.parametrize("vocab_size", [VOCAB, 64])
def test_masks_have_a_bit_for_each_token_and_no_word_more(tmp_path: Path, vocab_size: int) -> None:
    tiny_vocabulary(tmp_path)
    vocabulary = GrammarVocabulary.from_folder(tmp_path, vocab_size, [END])
    state = GrammarState(compile_grammar(OBJECT, vocabulary))
    mask = state.mask(state.root, ())
    assert mask is not None and mask.shape == state.end_mask.shape == (2,)


def test_a_tokenizer_on_which_the_library_panics_is_refused_like_any_it_cannot_read(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("<end>", 0.0), ("<0xZZ>", 0.0)], 0, False))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        GrammarVocabulary.from_folder(tmp_path, inner.get_vocab_size(), [1])


def byte_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """All of ASCII, and tokens that end an answer: one among the pieces, one that is special, and one that is not."""
    if kind == "unigram":
        pieces = [("<unk>", 0.0), ("<end>", 0.0), *((chr(code), -1.0) for code in range(32, 127)), ("end", -1.0)]
        inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
        inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<unk>", "<end", "<end>", "<e", "<en"]
        merges = [("<", "e"), ("<e", "n"), ("<en", "d"), ("<end", ">")] if kind == "merged" else []
        inner = byte_level(signs, merges, "<unk>")
    inner.add_special_tokens(["<unk>", "<end>", "<|stop|>"])
    inner.add_tokens(["<|halt|>"])
    return inner


@pytest.mark.parametrize("kind", ["bpe", "merged", "unigram"])
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["<end>"]})), '"<end>"'),
        (Grammar.of_choices(["a <|stop|> b"]), "a <|stop|> b"),
        (Grammar.of_choices(["a<|halt|>b"]), "a<|halt|>b"),
        (Grammar(GrammarKind.REGEX, r"<\|stop\|><end>x"), "<|stop|><end>x"),
        (Grammar(GrammarKind.EBNF, 'start: "<end>" "x"'), "<end>x"),
    ],
)
def test_a_text_that_spells_a_special_token_is_written_as_text(
    tmp_path: Path, kind: str, grammar: Grammar, text: str
) -> None:
    inner = byte_tokenizer(kind)
    inner.save(str(tmp_path / "tokenizer.json"))
    ends = [token for name in ("<end>", "<|stop|>", "<|halt|>") if (token := inner.token_to_id(name)) is not None]
    vocabulary = GrammarVocabulary.from_folder(tmp_path, inner.get_vocab_size(), ends)
    compiled = compile_grammar(grammar, vocabulary)
    probe(compiled)
    state, answer = GrammarState(compiled), list[int]()
    while True:
        mask = state.mask(state.root, ())
        assert mask is not None
        token = int(np.flatnonzero(unpack(mask, vocabulary.size))[0])
        if token in ends:
            break
        state.follow([token])
        answer.append(token)
    assert inner.decode(answer, skip_special_tokens=False) == text


def test_a_special_token_has_no_name_in_a_grammar(tmp_path: Path) -> None:
    byte_tokenizer("bpe").save(str(tmp_path / "tokenizer.json"))
    vocabulary = GrammarVocabulary.from_folder(tmp_path, 300, [258])
    with pytest.raises(InvalidRequestError, match="names a special token; name it by its id"):
        compile_grammar(Grammar(GrammarKind.EBNF, 'start: <|stop|> "x"'), vocabulary)
