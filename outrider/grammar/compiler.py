"""Compiles grammars for a model's tokens with the grammar library, and tracks answers in them. Torch-free.

The tokens that may come next are known after an answer and after every draft path below it: a trie below the answer's
newest committed token has a mask at each node. Following a commit means going down the trie, where nodes that drafts
guessed right have their masks already. One matcher of the library moves about in the trie.

Run as `python -m outrider.grammar.compiler`, it tries grammars in a process of its own, which a hostile one may break.
Arguments: the model's folder, its vocabulary's size, the tokens that end an answer. It reads frames with a `Grammar`
from stdin and answers each with a `Verdict` on stdout: four bytes of length, little-endian, then msgpack. It first
sends an empty frame, when it is ready, and ends with its stdin.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import secrets
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from outrider.errors import ConfigError, InvalidGrammarError, OutriderError, panics_as_errors
from outrider.grammar.spec import EMPTY_DIRECTIVE, FORM_BELOW, PATTERN_BELOW, Grammar, GrammarKind, prepare_schema

LENGTH = struct.Struct("<I")
"""The length in front of each frame."""
MEMORY_BYTES = 2 << 30
"""Address space of the process that tries grammars; the tokenizer needs a tenth of it."""


class GrammarVocabulary:
    """The bytes that each token stands for, and the tokens that end an answer.

    Special tokens stand for no bytes, so that no grammar ever allows one inside a text. Ids past the tokenizer's own
    are never legal.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.end_ids = frozenset(end_ids)

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> GrammarVocabulary:
        """Read the `tokenizer.json` of a model's folder, in about 0.3 s for 49k tokens.

        `vocab_size`: ids below this are legal. `end_ids`: tokens that end an answer. Raises ConfigError if the library
        cannot read the tokenizer, or if nothing can end an answer.
        """
        ends = sorted({token for token in end_ids if token < vocab_size})
        if not ends:
            raise ConfigError("the model has no end-of-sequence token, so that no constrained answer could end")
        try:
            text = _without_spelling((folder / "tokenizer.json").read_bytes(), ends)
            with panics_as_errors():
                tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder}: the grammar library cannot read the tokenizer: {error}") from None
        return cls(tokenizer, vocab_size, ends)

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.size // 32)


def _without_spelling(tokenizer_json: bytes, end_ids: Sequence[int]) -> str:
    """Return a tokenizer.json whose special tokens, and tokens that end an answer, have names that no text holds.

    The library tokenizes text that a grammar forces. It would read the name of such a token there as the token itself,
    which does not stand for these bytes.
    """
    tokenizer = msgspec.json.decode(tokenizer_json)
    model, unlikely = tokenizer["model"], secrets.token_hex(8)
    names: dict[str, str] = {}
    for added in tokenizer.get("added_tokens") or ():
        if added.get("special") or added["id"] in end_ids:
            names[added["content"]] = name = f"\ufdd0{added['id']}:{unlikely}"
            added["content"], added["special"] = name, True
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    elif isinstance(vocab, list):  # of a unigram model: pieces and scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if merges := model.get("merges"):
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges)
        model["merges"] = [merge for merge, pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return msgspec.json.encode(tokenizer).decode()


_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=20_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    # Otherwise messages show the whole grammar and the answer so far.
    verbose_errors=False,
)
"""With these, a mask takes at most 40 ms, and the lexer states of one grammar some 40 MB."""

_OPTIONS = {
    # Without a bound, a small model may write line breaks for ever.
    "whitespace_pattern": r"[ \n\r\t]{1,40}",
    "lenient": False,
}
_DEFAULTS = {"coerce_one_of": True}
"""Defaults of options that a schema may set; see `EXACT_ONE_OF`."""
_MOST_MASKS = 50_000
"""Masks after which a grammar is compiled again: its lexer keeps the states it has met, up to a limit."""
_MAX_REASON = 300
_PROBE_TOKENS = 48
_NUM_PROBES = 4
_MOST_LOOKED_AT = 4096
_TOO_MUCH = ("too many", "too big", "too large", "too complex", "fuel", "limit", "max is")
"""Words in the library's messages when one of `_LIMITS` was reached."""
_QUOTED = re.compile(r'^ *\d+ \| .*$|"(?:\\.|[^"\\\n])*"', re.MULTILINE)
"""Quotations of the grammar in the library's messages: numbered lines, and names or texts."""
_FIXES = {
    GrammarKind.JSON_OBJECT: "report it",
    GrammarKind.JSON_SCHEMA: "leave out what is not supported, or split the schema",
    GrammarKind.REGEX: "use a regular expression without look-around and backreferences, and with small repetitions",
    GrammarKind.CHOICE: "send fewer or shorter texts",
    GrammarKind.EBNF: "send Lark with a rule start, or GBNF with a rule root",
}


@dataclass(eq=False, repr=False)
class CompiledGrammar:
    """A grammar ready to make matchers, which share what they learn about its tokens. One thread uses it at a time."""

    grammar: Grammar
    vocabulary: GrammarVocabulary
    _pristine: LLMatcher
    num_masks: int = 0
    """Masks computed by all of its matchers."""
    num_renewals: int = 0
    """How often the grammar was compiled again. Matchers share nothing with those made before that."""
    renew: Callable[[GrammarState], None] | None = None
    """Starts compiling the grammar again for an answer, which then gets `GrammarState.renewed`; None never does."""

    @property
    def worn(self) -> bool:
        """Whether the grammar should be compiled again before another request uses it."""
        return self.num_masks > _MOST_MASKS

    def matcher(self) -> LLMatcher:
        """Return a matcher at the start of an answer; takes some microseconds."""
        return self._pristine.deep_copy()

    def adopt(self, fresh: CompiledGrammar) -> None:
        """Make matchers from `fresh`, the same grammar compiled again, from now on."""
        self._pristine = fresh.matcher()
        self.num_masks = 0
        self.num_renewals += 1


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compile a grammar that has passed `check_grammar`; takes 1 ms to a second, without holding the interpreter.

    Raises InvalidGrammarError if it cannot be compiled within the limits, or allows no text at all.
    """
    try:
        matcher = LLMatcher(vocabulary.tokenizer, source_of(grammar), log_level=0, limits=_LIMITS)
    except (ValueError, RecursionError, LookupError) as error:
        raise refusal(grammar, str(error)) from None
    if not matcher.is_error():
        # A lexer that is too large only fails at the first mask.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    return CompiledGrammar(grammar, vocabulary, matcher)


def source_of(grammar: Grammar) -> str:
    """Return the grammar in the library's own form."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.source)
            prepare_schema(schema)
            return LLMatcher.grammar_from_json_schema(schema, defaults=_DEFAULTS, overrides=_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_lark(f"start: {_terminal(grammar.source)}")
        case GrammarKind.CHOICE:
            # A JSON string is also a literal of the library's language.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in grammar.choices))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark_of(grammar))


def _terminal(pattern: str) -> str:
    """Convert a regular expression to Lark, with digits and words of ASCII, as in JavaScript and JSON Schema."""
    return f"/{regex_to_lark(pattern, use_ascii='dw')}/"


def _lark_of(grammar: Grammar) -> str:
    rules, with_pattern, pattern = grammar.source.partition(f"\n{PATTERN_BELOW}\n")
    if with_pattern:
        return f"{rules}\nPATTERN: {_terminal(pattern)}"
    rules, below, form = grammar.source.partition(f"\n{FORM_BELOW}\n")
    try:
        if not below:
            return _as_lark(rules)
        # Rules converted from GBNF begin with a directive to the library, which is not allowed within other rules.
        return f"{rules}\nform: %lark {{ {_as_lark(form).lstrip().removeprefix(EMPTY_DIRECTIVE)}\n}}"
    except Exception as error:  # a rule that is missing or there twice raises no class of its own
        raise refusal(grammar, str(error)) from None


def _as_lark(rules: str) -> str:
    """Return rules in Lark, converting those in GBNF."""
    # The library takes a grammar for GBNF unless a line begins with "start:", which in Lark may be "?start:", too.
    return any_to_lark(rules) if "::=" in rules else rules


def refusal(grammar: Grammar, reason: str) -> InvalidGrammarError:
    """Return the error that a client gets for a grammar that the library refuses or gives up on."""
    problem, fix = reason.replace("<non-verbose/>", " "), _FIXES[grammar.kind]
    own = _QUOTED.sub("", problem)
    if "regex parse error" in own:
        # The lines before the last quote the library's own form of the grammar.
        problem = (
            f"holds a regular expression that is not supported: {problem.rpartition('error: ')[2].splitlines()[0]}"
        )
        fix = _FIXES[GrammarKind.REGEX]
    elif "lookarounds not supported" in own:
        problem, fix = "holds a regular expression with look-around or a word boundary", _FIXES[GrammarKind.REGEX]
    elif "coerce_one_of" in own:
        problem = "holds a oneOf whose cases cannot be told apart"
        fix = "use anyOf, which allows the same texts and more, or leave strict out, so that oneOf is read as anyOf"
    elif "unknown special token" in own:
        problem, fix = "names a special token", "name it by its id, as <[1]>, or leave it out"
    elif "Token range end too large" in own or "number too large" in own:
        problem, fix = (
            "holds a number that is too large",
            "name tokens by ids of the vocabulary, and use small repetitions",
        )
    elif "Failed to generate regex for" in own:
        problem, fix = "holds a limit of numbers that is too far from 0", "use limits of at most 17 digits"
    elif own.startswith("NoExtension"):
        problem, fix = "allows no text at all", "let it match something"
    elif any(sign in own for sign in _TOO_MUCH):
        problem, fix = f"is too complex ({problem})", "use smaller repetitions and fewer alternatives"
    problem = " ".join(problem.split())[:_MAX_REASON] or "cannot be compiled"
    return InvalidGrammarError(grammar.field, problem, fix)


def probe(compiled: CompiledGrammar) -> None:
    """Write a few answers of random legal tokens, to see whether masks within an answer can be computed, too.

    Raises InvalidGrammarError if they cannot.
    """
    source = random.Random(compiled.grammar.digest)
    for _ in range(_NUM_PROBES):
        matcher = compiled.matcher()
        for _ in range(_PROBE_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8) if not matcher.is_stopped() else None
            if matcher.is_error():
                raise refusal(compiled.grammar, matcher.get_error())
            legal = np.flatnonzero(np.unpackbits(mask, bitorder="little")) if mask is not None else ()
            text = [token for token in legal[:_MOST_LOOKED_AT] if token not in compiled.vocabulary.end_ids]
            if not text:
                break
            if not matcher.consume_token(int(source.choice(text))):
                raise refusal(compiled.grammar, matcher.get_error())


Mask = NDArray[np.int32]
"""[num_words]: bit v % 32 of word v // 32 is set where token v may come next."""

TokenPath = tuple[int, ...]
"""Draft tokens, from the one below the newest committed token on."""


@dataclass(slots=True, eq=False)
class GrammarNode:
    """The state after one token. A node has no reference to its parent, so dropping it frees all nodes below it."""

    gave_up: bool = False
    """Whether the library failed here; it is asked again only if this node becomes the root."""
    mask: Mask | None = None
    """None until it has been asked for."""
    children: dict[int, GrammarNode] = field(default_factory=dict)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; False while there is no mask."""
        return self.mask is not None and bool(int(self.mask[token >> 5]) >> (token & 31) & 1)


class GrammarState:
    """One answer under a grammar.

    After a token that ends the answer, and where the grammar allows no more text, only tokens that end it are legal.
    `error` says why the root's mask cannot be computed, once that is certain. While the state `waits`, the mask cannot
    be computed yet.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.root = GrammarNode()
        """The state after the newest committed token."""
        self.num_committed = 0
        """Committed tokens of the answer."""
        self.error: OutriderError | None = None
        self.waits = False
        """Whether the grammar is being compiled again for the root's mask."""
        self.compiled = compiled
        self._was_renewed = False
        self._end_ids = compiled.vocabulary.end_ids
        self.end_mask = _end_mask(self._end_ids, compiled.vocabulary.num_words)
        """The mask that allows only tokens that end the answer."""
        self._matcher = compiled.matcher()
        self._num_renewals = compiled.num_renewals
        self._answer: list[int] = []
        # The matcher has consumed this many tokens of the answer, and then this path.
        self._num_consumed = 0
        self._path: TokenPath = ()

    def follow(self, token_ids: Sequence[int]) -> None:
        """Follow committed tokens. They are legal, since they were sampled under the masks."""
        for token in token_ids:
            self.root = self.root.children.get(token) or GrammarNode()
        self._answer += token_ids
        self.num_committed += len(token_ids)
        behind = self._answer[self._num_consumed :]
        num_known = _num_common(behind, self._path)
        self._num_consumed += num_known
        self._path = self._path[num_known:]

    def child(self, node: GrammarNode, token: int) -> GrammarNode | None:
        """Return the state after `token` below a node that has its mask; None if the grammar forbids the token."""
        found = node.children.get(token)
        if found is None and node.allows(token):
            found = node.children[token] = GrammarNode()
        return found

    def mask(self, node: GrammarNode, path: TokenPath) -> Mask | None:
        """Return the mask of the node at the end of `path`, computing it if needed; None if it cannot be computed."""
        if node.mask is None and not (node.gave_up and path) and not self.waits and self.error is None:
            ends = path[-1] in self._end_ids if path else bool(self._answer) and self._answer[-1] in self._end_ids
            node.mask = self.end_mask if ends else self._compute(path)
            node.gave_up = node.mask is None
        return node.mask

    def renewed(self, error: OutriderError | None = None) -> None:
        """Called when the grammar was compiled again as `CompiledGrammar.renew` asked, or failed to with `error`."""
        self.waits, self._was_renewed, self.error = False, True, error

    def find(self, path: TokenPath) -> GrammarNode | None:
        """Return the state after a path, computing the masks on the way. None if it is forbidden or a mask fails."""
        node: GrammarNode | None = self.root
        for depth, token in enumerate(path):
            if node is None or self.mask(node, path[:depth]) is None:
                return None
            node = self.child(node, token)
        return node

    def _compute(self, path: TokenPath) -> Mask | None:
        mask = self._try(path)
        if mask is None and not path:
            mask = self._try_afresh()
        if mask is None:
            # A matcher cannot leave its error state.
            self._restart(self.compiled.matcher())
        elif not path:
            self._was_renewed = False
        return mask

    def _try_afresh(self) -> Mask | None:
        """Compute the root's mask with the grammar compiled again: others may have used up what its matchers share.

        Returns None while it is being compiled, and, with `error` set, if it is not compiled or does not help.
        """
        # All answers of a grammar get here at once, and compiling takes up to a second: the first one's serves all.
        if self._num_renewals < self.compiled.num_renewals:
            self._restart(self.compiled.matcher())
            if (mask := self._try(())) is not None:
                return mask
        if self._was_renewed or self.compiled.renew is None:
            self.error = refusal(self.compiled.grammar, self._matcher.get_error())
        else:
            self.waits = True
            self.compiled.renew(self)
        return None

    def _try(self, path: TokenPath) -> Mask | None:
        matcher = self._matcher
        self.compiled.num_masks += 1
        if not self._move(path) or matcher.is_error():
            return None
        if matcher.is_stopped():
            return self.end_mask
        packed = matcher.compute_bitmask()
        # The library's mask has one bit more than there are tokens: one word more if tokens fill whole words.
        words = np.frombuffer(packed, np.int32)[: self.compiled.vocabulary.num_words]
        return None if matcher.is_error() else words

    def _move(self, path: TokenPath) -> bool:
        """Move the matcher to the end of a path below the answer; return False if that fails."""
        matcher, behind = self._matcher, self._answer[self._num_consumed :]
        num_same = 0 if behind else _num_common(path, self._path)
        num_back = len(self._path) - num_same
        if num_back and not matcher.rollback(num_back):
            return False
        self._num_consumed, self._path = len(self._answer), path
        more = [*behind, *path[num_same:]]
        return not more or bool(matcher.consume_tokens(more))

    def _restart(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_renewals = self.compiled.num_renewals
        self._num_consumed, self._path = 0, ()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both sequences begin with alike."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def unpack(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """Return a mask as bool [vocab_size]: True where a token may come next."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _end_mask(end_ids: frozenset[int], num_words: int) -> Mask:
    """Return a mask that allows only tokens that end an answer."""
    words = np.zeros(num_words, np.uint32)
    for token in end_ids:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)


class Verdict(msgspec.Struct, frozen=True):
    """The result of trying a grammar; an empty problem means that it can be used."""

    problem: str = ""
    fix: str = ""
    lasting: bool = True
    """Whether the same would be found again; False if the machine had too little time or memory."""


def judge(grammar: Grammar, vocabulary: GrammarVocabulary | None) -> Verdict:
    """Compile a grammar and try it out. Without a vocabulary no grammar can be used."""
    if vocabulary is None:
        return Verdict("cannot be used: the grammar library does not know the model's tokenizer", "leave it out")
    try:
        probe(compile_grammar(grammar, vocabulary))
    except InvalidGrammarError as error:
        return Verdict(error.problem, error.fix)
    return Verdict()


def serve(vocabulary: GrammarVocabulary | None, requests: BinaryIO, answers: BinaryIO) -> None:
    """Judge the grammars in `requests` until it ends."""
    decoder = msgspec.msgpack.Decoder(Grammar)
    _write(answers, b"")
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        grammar = decoder.decode(requests.read(LENGTH.unpack(head)[0]))
        _write(answers, msgspec.msgpack.encode(judge(grammar, vocabulary)))


def _write(answers: BinaryIO, body: bytes) -> None:
    answers.write(LENGTH.pack(len(body)) + body)
    answers.flush()


def main(argv: list[str]) -> int:
    """Serve stdin; return the exit code."""
    folder, size, *end_ids = argv
    os.nice(5)
    vocabulary: GrammarVocabulary | None = None
    # The engine also serves a model whose tokenizer cannot be read, but without grammars.
    with suppress(ConfigError):
        vocabulary = GrammarVocabulary.from_folder(Path(folder), int(size), [int(token) for token in end_ids])
    # macOS does not limit memory, and a lower hard limit cannot be raised.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(vocabulary, sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
