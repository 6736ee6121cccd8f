"""An engine on a small model, driven to completion."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from threaded_engine import ThreadedEngine

from outrider.grammar.compiler import GrammarVocabulary
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.sampling.params import SamplingParams
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.torch_executor import TorchExecutor
from verify_service.speculation.budget import WIDTHS, CostModel
from verify_service.speculation.colocated_draft import ColocatedDraft

PAGE_SIZE = 4


@dataclass
class Answer:
    """What a request's sink received."""

    updates: list[GenerationUpdate] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    request: Request | None = None

    def take(self, update: GenerationUpdate) -> None:
        self.updates.append(update)
        if update.last:
            self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def num_accepted(self) -> int:
        return sum(update.num_accepted_tokens for update in self.updates)


class Silence:
    """An observer that notes nothing."""

    def round(self, entries: object, updates: object, figures: object) -> None:
        return

    def flush(self) -> None:
        return


def tiny_model(folder: Path) -> CausalLM:
    """A random Llama of 61 tokens; its logits are spread, so that greedy text does not hang on rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=60,
    )
    torch.manual_seed(11)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6.0)
    model.save_pretrained(folder)
    return load_model(folder, torch.float32)


def make_engine(
    model: CausalLM,
    num_pages: int = 256,
    share_generated: bool = True,
    vocabulary: GrammarVocabulary | None = None,
    colocated: ColocatedDraft | None = None,
    keep_prefixes: bool = True,
    **limits: object,
) -> ThreadedEngine:
    """An engine that finds every draft token cheap, so that speculation is exercised."""
    memory = Memory(num_pages, PAGE_SIZE, keep_prefixes, share_generated)
    executor = TorchExecutor(model, num_pages, PAGE_SIZE)
    cost = CostModel([1e-3] * len(WIDTHS))
    bounds = EngineLimits(model.config.vocab_size, model.config.max_positions, **limits)  # type: ignore[arg-type]
    return ThreadedEngine(executor, memory, cost, bounds, Silence(), vocabulary=vocabulary, colocated=colocated)


def make_request(
    answer: Answer,
    prompt: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    max_tokens: int = 16,
    **fields: object,
) -> Request:
    """`speculate`, True by default, and fields of GenerationRequest."""
    speculate = fields.pop("speculate", True)
    asked = GenerationRequest(
        "test",
        list(prompt),
        params,
        max_tokens,
        disable_speculation=not speculate,
        **fields,  # type: ignore[arg-type]
    )
    return Request.begin(asked, answer.take, vocab_size)


def run_all(
    engine: ThreadedEngine, jobs: Sequence[tuple[Sequence[int], SamplingParams]], width: int = 4, **fields: object
) -> list[Answer]:
    """Run jobs, `width` at a time, and return their answers."""
    answers = []
    for start in range(0, len(jobs), width):
        group = []
        for prompt, params in jobs[start : start + width]:
            answer = Answer()
            engine.submit(make_request(answer, prompt, params, engine.limits.vocab_size, **fields))
            group.append(answer)
        for answer in group:
            assert answer.done.wait(60)
        answers += group
    return answers


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    """Token ids of each answer."""
    return [answer.token_ids for answer in answers]
