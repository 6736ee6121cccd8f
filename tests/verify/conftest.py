"""What tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_harness import RANKS_VOCAB, jobs, make_paged_engine, small_model
from harness import Answer, make_engine, run_all
from page_integrity import check_memory
from threaded_engine import ThreadedEngine
from tokenizers import Tokenizer, models

from outrider.grammar.compiler import GrammarVocabulary
from outrider.models.decoder import CausalLM
from verify_service.door import dialer

# What may come through a door is described with the layer below.
sys.path.append(str(Path(__file__).parent.parent / "rpc"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def small_truth(small: CausalLM) -> list[Answer]:
    return plain_answers(small)


@pytest.fixture(scope="module")
def model(small: CausalLM) -> CausalLM:
    """What tests of a file are about; files have other ones."""
    return small


@pytest.fixture(scope="session")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that 2 and 4 ranks divide; nothing is written to it."""
    folder = tmp_path_factory.mktemp("ranks")
    small_model(folder, vocab_size=RANKS_VOCAB)
    words = {f"word{number}": number for number in range(61)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    from tiny_grammar import tiny_vocabulary

    return tiny_vocabulary(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def truth(model: CausalLM, request: pytest.FixtureRequest) -> list[Answer]:
    """What `jobs` are answered without speculation, one at a time."""
    if model is request.getfixturevalue("small"):
        answers: list[Answer] = request.getfixturevalue("small_truth")
        return answers
    return plain_answers(model)


def plain_answers(model: CausalLM) -> list[Answer]:
    engine = make_engine(model)
    engine.start()
    try:
        return run_all(engine, jobs(), width=1, speculate=False)
    finally:
        engine.stop()


@pytest.fixture
def engines() -> Iterator[list[ThreadedEngine]]:
    """Engines that a test makes; in the end nothing may be left in them."""
    made: list[ThreadedEngine] = []
    yield made
    for engine in made:
        engine.stop()
        assert engine.scheduler.running == [] and not engine.scheduler.waiting
        check_memory(engine.memory)
        assert engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"


@pytest.fixture
def start(model: CausalLM, engines: list[ThreadedEngine]) -> Callable[..., ThreadedEngine]:
    """Makes engines of a kind."""

    def begin(kind: str, **options: Any) -> ThreadedEngine:
        if kind == "torch":
            engine = make_engine(model, **{"chunk_size": 16, "max_nodes": 24} | options)
        else:
            engine, _ = make_paged_engine(model, deterministic=kind == "deterministic", **options)
        engines.append(engine)
        return engine

    return begin


@pytest.fixture
def dialled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(dialer, "MAX_RETRY_SECONDS", 0.01)
