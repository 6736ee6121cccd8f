"""A tiny vocabulary, and what the engine's tests know of grammars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "verify"))

from tiny_grammar import tiny_vocabulary

from outrider.grammar.compiler import GrammarVocabulary


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_vocabulary(folder)
    return folder


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))
