"""An engine from options, and what the door must know of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.grammar.vocabulary import GrammarVocabulary
from outrider.host.cores import keep_to
from outrider.host.garbage import take_over
from outrider.logs import get_logger
from outrider.models.store_folder import hash_tokenizer
from verify_service.engine.engine import VerifyEngine
from verify_service.engine.inbox import VerifyInbox
from verify_service.engine.observer import Observer
from verify_service.engine.parts import build, load
from verify_service.frames.engine import Ready

log = get_logger(__name__)


@dataclass(frozen=True)
class Built:
    """An engine that has not run yet."""

    engine: VerifyEngine
    ready: Ready


def assemble(options: VerifyOptions, inbox: VerifyInbox, observer: Observer) -> Built:
    """Load and warm up what the options name, which takes from seconds to minutes. Raises ConfigError."""
    keep_to(options.engine_cpus)
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    path, model = load(options)
    parts = build(options, path, model)
    limits = parts.limits
    vocabulary = _grammar_vocabulary(path, limits.vocab_size, model.config.eos_token_ids)
    engine = VerifyEngine(parts.executor, parts.memory, parts.cost, limits, observer, inbox, vocabulary)
    ready = Ready(
        model_path=str(path),
        tokenizer_hash=hash_tokenizer(path),
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=list(model.config.eos_token_ids),
        max_running=limits.max_running,
        max_waiting=limits.max_waiting,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
    )
    # A collection at a time of its own choosing could fall between two rounds.
    take_over()
    return Built(engine, ready)


def _grammar_vocabulary(path: Path, vocab_size: int, end_ids: Sequence[int]) -> GrammarVocabulary | None:
    """The tokenizer as grammars see it; a model whose tokenizer the library cannot read is served without grammars."""
    try:
        return GrammarVocabulary.from_folder(path, vocab_size, end_ids)
    except ConfigError as error:
        log.warning("requests with a grammar will be refused: %s", error.message)
        return None
