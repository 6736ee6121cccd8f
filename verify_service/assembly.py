"""An engine from options, and what the door must know of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import torch

from outrider.config.verify import VerifyOptions
from verify_service.engine import Engine
from verify_service.garbage import take_over
from verify_service.inbox import Inbox
from verify_service.observer import Observer
from verify_service.parts import build, load
from verify_service.wire import Ready


@dataclass(frozen=True)
class Built:
    """An engine that has not run yet."""

    engine: Engine
    ready: Ready


def assemble(options: VerifyOptions, inbox: Inbox, observer: Observer) -> Built:
    """Load and warm up what the options name, which takes from seconds to minutes. Raises ConfigError."""
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    path, model = load(options)
    parts = build(options, path, model)
    limits = parts.limits
    engine = Engine(parts.executor, parts.memory, parts.cost, limits, observer, inbox)
    ready = Ready(
        model_path=str(path),
        tokenizer_hash=hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest(),
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
