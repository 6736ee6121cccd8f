"""Requests with all kinds of grammars and of sampling, and drafts for them."""

from __future__ import annotations

import json
import random
import re

import jsonschema
from harness import Answer, run_all
from local_draft import Guess, noise, oracle, wrong
from threaded_engine import ThreadedEngine
from tiny_grammar import CHOICE, END, OBJECT, REGEX, SCHEMA, VOCAB

from outrider.grammar.spec import Grammar
from outrider.sampling.params import SamplingParams

GRAMMARS = [OBJECT, SCHEMA, REGEX, CHOICE]
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.8, "top_p": 0.95, "seed": 3},
    {"temperature": 1.2, "top_k": 12, "min_p": 0.02, "seed": 4, "logit_bias": {7: 3.0, 9: -100.0}},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.6, "frequency_penalty": 0.3, "num_logprobs": 2},
]

Job = tuple[list[int], SamplingParams]


def jobs() -> list[Job]:
    source = random.Random(8)
    made: list[Job] = []
    for index, (grammar, kind) in enumerate((grammar, kind) for grammar in (*GRAMMARS, None) for kind in KINDS):
        prompt = [index, *(source.randrange(VOCAB - 2) for _ in range(source.randint(1, 20)))]
        made.append((prompt, SamplingParams(grammar=grammar, **kind)))  # type: ignore[arg-type]
    return made


def run(engine: ThreadedEngine, width: int = 4, **fields: object) -> list[Answer]:
    engine.start()
    return run_all(engine, jobs(), width, max_tokens=40, stop_token_ids=frozenset([END]), **fields)


def guesser(name: str, truth: list[Answer]) -> Guess | None:
    """Guesses of the jobs' answers."""
    texts = {tuple(prompt): prompt + answer.token_ids for (prompt, _), answer in zip(jobs(), truth, strict=True)}
    right, off, random_nodes = oracle(texts, VOCAB), wrong(texts, VOCAB), noise(9, VOCAB)

    def mixed(author: object) -> None:
        for guess in (right, off, random_nodes):
            guess(author)  # type: ignore[arg-type]

    return {"none": None, "right": right, "wrong": off, "random": random_nodes, "mixed": mixed}[name]


def fits(grammar: Grammar, text: str) -> bool:
    if grammar is OBJECT:
        return isinstance(json.loads(text), dict)
    if grammar is SCHEMA:
        jsonschema.validate(json.loads(text), json.loads(grammar.source))
        return True
    return text in grammar.choices if grammar is CHOICE else re.fullmatch(grammar.source, text) is not None
