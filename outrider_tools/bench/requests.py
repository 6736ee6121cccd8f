"""Requests of a load generator: their prompts, when they are due, records of their answers, and the figures."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import ConfigError
from outrider.metrics import MetricsPage
from outrider.protocol.generation import TokenOrigin
from outrider_tools.bench.report import Row
from outrider_tools.files import json_objects

FIRST_RANDOM_ID = 256
"""Random ids begin here if the vocabulary is large enough: the first ids are special tokens in many tokenizers."""
MAX_PROMPT_TOKENS = 1 << 20
PERCENTILES = (50, 90, 99)
MAX_DEPTHS = 16
_DRAFTS = "vllm:spec_decode_num_drafts"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_GATEWAY_ROUNDS = "outrider_gateway_rounds"
_ACCEPT_LENGTH = "outrider_gateway_accept_length"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's input: a text or token ids, and the most tokens to generate."""

    max_tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    system: str = ""


def random_prompts(
    count: int, seed: str, *, input_len: int, output_len: int, vocab_size: int, spread: float = 0.0
) -> list[Prompt]:
    """Return prompts of random token ids, the same ones for the same seed.

    Both lengths are in tokens; each is drawn uniformly from [length * (1 - spread), length * (1 + spread)].
    """
    draw = random.Random(f"prompts {seed}")
    first = FIRST_RANDOM_ID if vocab_size > 2 * FIRST_RANDOM_ID else 0
    prompts = []
    for _ in range(count):
        ids = tuple(draw.randrange(first, vocab_size) for _ in range(_near(draw, input_len, spread)))
        prompts.append(Prompt(_near(draw, output_len, spread), token_ids=ids))
    return prompts


def read_prompts(path: Path, output_len: int) -> list[Prompt]:
    """Return the prompts of a JSONL file, in order.

    A line is an object with `prompt` (text), `turns` (the first one is used), `messages` (the first system and user
    messages are used) or `prompt_token_ids`; `max_tokens` overrides `output_len`. Raises ConfigError, naming the line.
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
    """Return the system message and the user's turn."""
    messages = fields.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        by_role = {str(message.get("role")): message.get("content") for message in reversed(messages)}
        return by_role.get("system", ""), by_role.get("user")
    turns = fields.get("turns")
    return "", turns[0] if isinstance(turns, list) and turns else fields.get("prompt")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _near(draw: random.Random, length: int, spread: float) -> int:
    return draw.randint(max(1, math.ceil(length * (1 - spread))), max(1, math.floor(length * (1 + spread))))


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield the seconds from the start at which requests are due, without end; the same ones for the same seed.

    `rate` is the mean number a second, infinite for all at once. Gaps are gamma distributed: a `burstiness` of 1 gives
    a Poisson process, a smaller one bursts, a larger one more even arrivals.
    """
    draw = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        yield at
        if math.isfinite(rate):
            at += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times are in seconds since the start of the measurement."""

    due: float
    """When the request should have been sent. Waiting for a free place of --max-concurrency counts as latency."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many came then."""
    tokens: int = 0
    """All tokens that came."""
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
    """Rounds with draft tokens; known only if tokens come with their origin."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Rounds that accepted a draft token at each depth (1 for the root's children); known only with origins."""
    _run: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None without one."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first message; None if no token came later."""
        later = self.tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    def gaps(self) -> Iterable[tuple[float, int]]:
        """Yield for each two messages in a row the seconds between them and the number of tokens in the second one."""
        for (before, _), (at, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield at - before, count

    def take(self, at: float, count: int) -> None:
        """Note that `count` tokens came at time `at`."""
        if count:
            self.arrivals.append((at, count))
            self.tokens += count

    def take_origins(self, origins: Iterable[int]) -> None:
        """Count rounds by the origins of the same tokens: a round is its accepted tokens, then the target's own."""
        for origin in origins:
            if origin == TokenOrigin.ACCEPTED:
                self._run += 1
                self.accepted_at[self._run] += 1
            else:
                self._end_round(origin == TokenOrigin.BONUS or self._run > 0)

    def finish(self, at: float, error: str = "", detail: str = "") -> None:
        """Note that the stream ended."""
        self.end, self.error, self.detail = at, error, detail
        self._end_round(self._run > 0)  # a stop or a limit may cut off the target's own token

    def _end_round(self, drafted: bool) -> None:
        self.drafted_rounds += drafted
        self._run = 0

    def as_dict(self) -> dict[str, object]:
        """Return the fields of a detailed report."""
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


@dataclass(frozen=True)
class LoadPoint:
    """One load to measure."""

    concurrency: int = 0
    """Most requests at once; 0 for no limit, which needs a rate."""
    rate: float = math.inf
    """Mean requests a second; infinite for a closed loop."""
    burstiness: float = 1.0
    num_prompts: int = 0
    """Number of requests; 0 goes on until `seconds` are over."""
    seconds: float = 0.0
    """No request begins later than this, and tokens that come later do not count for throughput; 0 for no limit."""
    timeout: float = 600.0
    """Most seconds for one request."""
    seed: int = 0


@dataclass
class LoadRun:
    """Result of one load."""

    records: list[RequestRecord] = field(default_factory=list)
    window: float = 0.0
    """Seconds over which throughput is computed."""
    cpu_seconds: float = 0.0
    """Processor time of the load generator itself."""


def spread_of(values: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return mean, percentiles and maximum of weighted values; empty without values.

    A percentile is the least value at or below which that share of the weight lies.
    """
    if not values:
        return {}
    found, weights = np.array([value for value, _ in values]), np.array([weight for _, weight in values])
    percentiles = np.percentile(found, PERCENTILES, weights=weights, method="inverted_cdf")
    return {
        "mean": float(np.average(found, weights=weights)),
        **{f"p{share}": float(value) for share, value in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(found.max()),
    }


@dataclass(frozen=True)
class Acceptance:
    """Success of speculation in a run. `at_depth`: by depth from 1, share of drafted rounds that accepted a token."""

    accept_length: float
    at_depth: dict[int, float]


def acceptance(records: Sequence[RequestRecord], page: MetricsPage | None) -> Acceptance | None:
    """Return a run's acceptance, from its records or else from what the metrics page gained; None if neither has it.

    The page counts the requests of all clients, so it is used only if the door reports no origins.
    """
    rounds = sum(record.rounds for record in records)
    length = sum(record.tokens for record in records) / rounds if rounds else 0.0
    drafted = sum(record.drafted_rounds for record in records)
    if drafted:
        total: Counter[int] = Counter()
        for record in records:
            total.update(record.accepted_at)
        return Acceptance(length, {depth: count / drafted for depth, count in sorted(total.items())})
    if page is not None and page.total(_GATEWAY_ROUNDS):
        drafts = page.total(_DRAFTS)
        depths: Counter[int] = Counter()
        for labels, value in page.labelled(_PER_POSITION):
            depths[int(labels.rpartition(",")[2]) + 1] += round(value)
        shares = {depth: count / drafts for depth, count in sorted(depths.items()) if drafts}
        return Acceptance(length or page.histogram(_ACCEPT_LENGTH).mean, shares)
    return Acceptance(length, {}) if rounds else None


def errors_of(records: Iterable[RequestRecord]) -> Counter[str]:
    """Return the number of failed requests by error code."""
    return Counter(record.error for record in records if record.error)


def rows_of(run: LoadRun, case: str, page: MetricsPage | None = None) -> Iterator[Row]:
    """Yield a run's result rows. `page` is what the gateway's metrics gained during the run."""
    complete = [record for record in run.records if not record.error]
    ended = [record for record in complete if record.end <= run.window]
    window = run.window or 1e-9
    yield Row(case, "requests", len(run.records), "")
    yield Row(case, "failed", len(run.records) - len(complete), "")
    for code, count in sorted(errors_of(run.records).items()):
        yield Row(case, f"failed_{code}", count, "")
    yield Row(case, "seconds", run.window, "s")
    yield Row(case, "requests_per_second", len(ended) / window, "requests/s")
    came = sum(count for record in run.records for at, count in record.arrivals if at <= run.window)
    yield Row(case, "tokens_per_second", came / window, "tokens/s")
    yield Row(case, "prompt_tokens_per_second", sum(record.prompt_tokens for record in ended) / window, "tokens/s")
    yield Row(case, "prompt_tokens", sum(record.prompt_tokens for record in complete), "tokens")
    yield Row(case, "cached_prompt_tokens", sum(record.cached_tokens for record in complete), "tokens")
    yield Row(case, "completion_tokens", sum(record.tokens for record in complete), "tokens")
    gaps = [gap for record in complete for gap in record.gaps()]
    for name, values in (
        ("ttft_ms", [(record.ttft, 1) for record in complete if record.ttft is not None]),
        ("itl_ms", [(gap / count, count) for gap, count in gaps]),
        ("message_gap_ms", [(gap, 1) for gap, _ in gaps]),
        ("tpot_ms", [(record.tpot, 1) for record in complete if record.tpot is not None]),
        ("e2e_ms", [(record.latency, 1) for record in complete]),
    ):
        for part, value in spread_of(values).items():
            yield Row(case, f"{name}_{part}", value * 1e3, "ms")
    if (found := acceptance(complete, page)) is not None:
        yield Row(case, "accept_length", found.accept_length, "tokens")
        if drafted := sum(record.draft_tokens for record in complete):
            share = sum(record.accepted_tokens for record in complete) / drafted
            yield Row(case, "accepted_over_draft_tokens", share, "ratio")
        for depth, value in found.at_depth.items():
            if depth <= MAX_DEPTHS:
                yield Row(case, f"accept_rate_depth_{depth}", value, "ratio")
    yield Row(case, "client_cpu_share", run.cpu_seconds / window, "cores")
