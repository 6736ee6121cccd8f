"""Answers for the split benchmark, as a client of the gateway sees them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.split.cases import SplitCase
from outrider.chat_template import ChatTemplate
from outrider.cli.client import Sampling, encode
from outrider.errors import ConfigError
from outrider.models.store_folder import TOKENIZER_FILE
from outrider.rpc.channel import open_channel
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from outrider_tools.training.prompts import read_questions

WARM_PROMPTS = ("Say hello to everyone in the room.", "Explain how a bicycle stays upright.")


@dataclass
class CaseAnswers:
    """All answers of a case."""

    texts: list[list[int]] = field(default_factory=list)
    """Token ids of each answer, in the order of the prompts."""
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.texts))


_SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["title", "points"], "properties": {
    "title": {"type": "string", "maxLength": 80},
    "points": {"type": "array", "minItems": 6, "maxItems": 6, "items": {
        "type": "object", "additionalProperties": false, "required": ["name", "detail", "weight"], "properties": {
            "name": {"type": "string", "maxLength": 40}, "detail": {"type": "string", "maxLength": 160},
            "weight": {"type": "integer", "minimum": 0, "maximum": 100}}}}}}"""
"""Schema of the answers of cases with JSON."""


def read_prompts(path: Path) -> list[str]:
    """Return the first turns of a file with a JSON object, with "turns" or "prompt", in each line."""
    return [question.text for question in read_questions(path)]


def chat_prompts(folder: Path, path: Path) -> list[list[int]]:
    """Return such questions as token ids in the chat of the model in `folder`: heads guess little in other text.

    Raises ConfigError for a model without a chat template.
    """
    tokenizer, template = Tokenizer.from_file(str(folder / TOKENIZER_FILE)), ChatTemplate.load(folder)
    if template is None:
        raise ConfigError(f"{folder} has no chat template")
    turns = [[{"role": "user", "content": prompt}] for prompt in read_prompts(path)]
    return [tokenizer.encode(template.render(turn), add_special_tokens=False).ids for turn in turns]


def prompts_for(case: SplitCase, questions: list[str], least: int, tokenizer: Tokenizer) -> list[str]:
    """Return as many prompts as the case asks for (or `least`, and two for each place of a batch), of its length."""
    count = case.num_prompts or max(least, 2 * case.batch if case.batch > 1 else 0)
    if not case.context:
        return [questions[index % len(questions)] for index in range(count)]
    lengths = [len(tokenizer.encode(question).ids) for question in questions]
    prompts = []
    for index in range(count):
        parts, room, place = [], case.context, index
        while room > 0:
            parts.append(questions[place % len(questions)])
            room -= lengths[place % len(questions)]
            # Join questions in another order each time that they are used again.
            place += 1 + index // len(questions)
        prompts.append(tokenizer.decode(tokenizer.encode("\n".join(parts)).ids[: case.context]))
    return prompts


def request(prompt: str, seed: int, max_tokens: int, case: SplitCase) -> gateway_pb2.GatewayServiceGenerateRequest:
    """Return a request with one user turn."""
    sampling = Sampling(
        temperature=case.temperature,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=not case.json,
        speculation=case.drafts,
    )
    asked = encode(sampling, [("user", prompt)])
    if case.json:
        asked.grammar.json_schema = _SCHEMA
    return asked


async def _answer(stub: Any, message: gateway_pb2.GatewayServiceGenerateRequest, answers: CaseAnswers) -> list[int]:
    tokens: list[int] = []
    async for response in stub.Generate(message):
        tokens += response.token_ids
        if response.HasField("usage"):
            answers.rounds += response.usage.num_rounds
            answers.drafted += response.usage.num_draft_tokens
            answers.accepted += response.usage.num_accepted_tokens
    return tokens


async def answer_all(address: str, prompts: list[str], case: SplitCase, max_tokens: int) -> CaseAnswers:
    """Answer all prompts, `case.batch` at a time."""
    channel = open_channel(address)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    answers = CaseAnswers()
    places = asyncio.Semaphore(case.batch)

    async def one(index: int, prompt: str) -> list[int]:
        async with places:
            return await _answer(stub, request(prompt, index, max_tokens, case), answers)

    start = time.perf_counter()
    answers.texts = list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))
    answers.seconds = time.perf_counter() - start
    await channel.close()
    return answers


def warm_up(address: str, case: SplitCase, prompts: list[str], max_tokens: int) -> None:
    """Ask for some answers that do not count, to calibrate drafts and warm up code, for such prompts, too."""
    asyncio.run(answer_all(address, prompts, case, 2))
    others = [WARM_PROMPTS[place % len(WARM_PROMPTS)] for place in range(max(case.batch, 2))]
    asyncio.run(answer_all(address, others, case, max_tokens))
