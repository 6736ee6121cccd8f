"""Tries grammars in a process of its own, which a hostile one may break: `python -m outrider.grammar.sandbox`.

Arguments: the model's folder, its vocabulary's size, the tokens that end an answer. Reads frames from stdin and answers
each on stdout: four bytes of length, little-endian, then msgpack; a `Grammar`, and a `Verdict` on it. An empty frame
comes first, when it is ready. Ends with its stdin.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from outrider.errors import ConfigError, InvalidRequestError
from outrider.grammar.compiler import GrammarVocabulary, compile_grammar, probe
from outrider.grammar.spec import Grammar

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 2 << 30
"""Address space of the process; it needs a tenth of that for the tokenizer."""


class Verdict(msgspec.Struct, frozen=True):
    """What was found; an empty problem means that the grammar can be used."""

    problem: str = ""
    fix: str = ""
    lasting: bool = True
    """Whether the same would be found again: what a busy machine had no time or memory for is no such thing."""


def judge(grammar: Grammar, vocabulary: GrammarVocabulary | None) -> Verdict:
    """Compile a grammar and try it out. Without a vocabulary none can be used."""
    if vocabulary is None:
        return Verdict("cannot be used: the grammar library does not know the model's tokenizer", "leave it out")
    try:
        probe(compile_grammar(grammar, vocabulary))
    except InvalidRequestError as error:
        return Verdict(error.problem, error.fix)
    return Verdict()


def serve(vocabulary: GrammarVocabulary | None, requests: BinaryIO, answers: BinaryIO) -> None:
    """Judge what comes until nothing does any more."""
    decoder = msgspec.msgpack.Decoder(Grammar)
    _write(answers, b"")
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        grammar = decoder.decode(requests.read(LENGTH.unpack(head)[0]))
        _write(answers, msgspec.msgpack.encode(judge(grammar, vocabulary)))


def _write(answers: BinaryIO, body: bytes) -> None:
    answers.write(LENGTH.pack(len(body)) + body)
    answers.flush()


def main(argv: list[str]) -> int:
    """Serve stdin; returns the exit code."""
    folder, size, *end_ids = argv
    os.nice(5)
    vocabulary: GrammarVocabulary | None = None
    # The engine serves such a model, too, without grammars.
    with suppress(ConfigError):
        vocabulary = GrammarVocabulary.from_folder(Path(folder), int(size), [int(token) for token in end_ids])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(vocabulary, sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
