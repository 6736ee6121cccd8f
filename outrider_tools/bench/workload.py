"""What a load generator asks for: prompts from a file or of random token ids, and when each is sent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

FIRST_RANDOM_ID = 256
"""Random ids begin here where the vocabulary allows it: the first ones are special tokens in many tokenizers."""
MAX_PROMPT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's input: a text or token ids, and the most tokens to generate."""

    max_tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    system: str = ""


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths in tokens; each is drawn evenly from [length * (1 - spread), length * (1 + spread)]."""

    input_len: int
    output_len: int
    spread: float = 0.0
    vocab_size: int = 10000


def random_prompts(count: int, lengths: RandomLengths, seed: str) -> list[Prompt]:
    """Prompts of random token ids; the same for the same seed. Raises ConfigError for an empty vocabulary."""
    if lengths.vocab_size < 1:
        raise ConfigError(f"--random-vocab-size: {lengths.vocab_size} is below 1; use the model's")
    draw = random.Random(f"prompts {seed}")
    first = FIRST_RANDOM_ID if lengths.vocab_size > 2 * FIRST_RANDOM_ID else 0
    prompts = []
    for _ in range(count):
        length = _near(draw, lengths.input_len, lengths.spread)
        ids = tuple(draw.randrange(first, lengths.vocab_size) for _ in range(length))
        prompts.append(Prompt(_near(draw, lengths.output_len, lengths.spread), token_ids=ids))
    return prompts


def read_prompts(path: Path, output_len: int) -> list[Prompt]:
    """Prompts of a JSONL file, in order.

    A line is an object with `prompt` (text), `turns` (the first one is taken), `messages` (a system message and the
    first user's) or `prompt_token_ids`; `max_tokens` overrides `output_len`. Raises ConfigError, naming the line.
    """
    try:
        lines = path.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: {path} cannot be read: {error}; give a JSONL file") from None
    prompts = [_parse(path, number, line, output_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--dataset-path: {path} holds no prompt; write a JSON object a line")
    return prompts


def _parse(path: Path, number: int, line: str, output_len: int) -> Prompt:
    where = f"--dataset-path: {path}, line {number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: not an object; write it as {{'prompt': 'text'}}")
    max_tokens = fields.get("max_tokens", output_len)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens {max_tokens!r} is not a whole number of at least 1")
    ids = fields.get("prompt_token_ids")
    if ids is not None:
        if not isinstance(ids, list) or not 1 <= len(ids) <= MAX_PROMPT_TOKENS or not all(map(_is_id, ids)):
            raise ConfigError(f"{where}: prompt_token_ids must be 1 to {MAX_PROMPT_TOKENS} token ids")
        return Prompt(max_tokens, token_ids=tuple(ids))
    system, text = _text_of(fields)
    if not isinstance(text, str) or not text or not isinstance(system, str):
        raise ConfigError(f"{where}: no prompt; give prompt, turns, messages or prompt_token_ids")
    return Prompt(max_tokens, text=text, system=system)


def _text_of(fields: dict[str, Any]) -> tuple[Any, Any]:
    """System message and user's turn."""
    messages = fields.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        said = {str(message.get("role")): message.get("content") for message in reversed(messages)}
        return said.get("system", ""), said.get("user")
    turns = fields.get("turns")
    return "", turns[0] if isinstance(turns, list) and turns else fields.get("prompt")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _near(draw: random.Random, length: int, spread: float) -> int:
    return draw.randint(max(1, math.ceil(length * (1 - spread))), max(1, math.floor(length * (1 + spread))))


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are due, without end; the same for the same seed.

    `rate` is the mean number a second, infinite for all at once. Gaps are gamma distributed: with `burstiness` 1 this
    is a Poisson process, below it comes in bursts, above it more evenly.
    """
    draw = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        yield at
        if math.isfinite(rate):
            at += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))
