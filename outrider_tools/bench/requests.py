"""One request of a load generator: what it asks for and when it is due, and what came of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider_tools.files import json_objects

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
    """Prompts of random token ids; the same for the same seed."""
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
    return [_parse(where, fields, output_len) for where, fields in json_objects(path, f"--dataset-path: {path}")]


def _parse(where: str, fields: dict[str, Any], output_len: int) -> Prompt:
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


ACCEPTED, BONUS, PLAIN = 1, 2, 3
"""Where a token came from: the numbers of TokenOrigin."""


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are in seconds since the start of the measurement."""

    due: float
    """When it should have been sent; waiting for a place of --max-concurrency counts as latency."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    tokens: int = 0
    """All of them."""
    end: float = 0.0
    error: str = ""
    """The error's code; empty for a complete answer."""
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_rounds: int = 0
    """Rounds with draft tokens; known only where tokens come with their origin."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Rounds that accepted a draft token at this depth, the root's children being 1; known likewise."""
    _run: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first message."""
        later = self.tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    def gaps(self) -> Iterable[tuple[float, int]]:
        """Seconds between two messages, and the number of tokens that the second one brought."""
        for (before, _), (at, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield at - before, count

    def take(self, at: float, count: int) -> None:
        """Tokens came."""
        if count:
            self.arrivals.append((at, count))
            self.tokens += count

    def take_origins(self, origins: Iterable[int]) -> None:
        """The same tokens' origins, which tell rounds apart: accepted tokens, then the target's own."""
        for origin in origins:
            if origin == ACCEPTED:
                self._run += 1
                self.accepted_at[self._run] += 1
            else:
                self._end_round(origin == BONUS or self._run > 0)

    def finish(self, at: float, error: str = "", detail: str = "") -> None:
        """The stream ended."""
        self.end, self.error, self.detail = at, error, detail
        self._end_round(self._run > 0)  # a stop or a limit cut the target's own token off

    def _end_round(self, drafted: bool) -> None:
        self.drafted_rounds += drafted
        self._run = 0

    def as_dict(self) -> dict[str, object]:
        """For a detailed report."""
        return {
            "due": round(self.due, 6),
            "ttft": self.ttft,
            "latency": self.latency,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "arrivals": [[round(at, 6), count] for at, count in self.arrivals],
            "rounds": self.rounds,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "error": self.error,
        }
