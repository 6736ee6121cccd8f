"""Rounds of random requests as tensors, and the same requests for the reference sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.sampling_state import (
    BIASED,
    ENDS_ANSWER,
    GOES_ON,
    IN_PROMPT,
    MASKED,
    PENALIZED,
    RoundTokens,
    SampleBuffers,
    SamplingTables,
    WalkOutputs,
)
from outrider.sampling.params import ANY_END, AnswerEnd, SamplingParams
from outrider.sampling.sampler import RequestSampler


@dataclass
class Case:
    """One request and its tree: entry i hangs below entry parents[i], or below the root at -1."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    parents: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    extend: int = 1
    """Committed tokens in the round, the root last."""
    samples: bool = True
    masked: bool = False
    thresholds: tuple[float, float] = (1.0, 1.0)
    end: AnswerEnd = ANY_END

    def path(self, node: int) -> list[int]:
        """Token ids from below the root to a node; -1 is the root."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.token_ids[node])
            node = self.parents[node]
        return path

    def position(self, node: int) -> int:
        """Where the token sampled at a node stands."""
        return len(self.prompt) + len(self.output) + len(self.path(node))


@dataclass
class Round:
    """A round of cases on a device."""

    cases: Sequence[Case]
    vocab_size: int
    tokens: RoundTokens
    tables: SamplingTables
    mask: torch.Tensor

    def allowed(self, index: int) -> np.ndarray:
        """Tokens that the mask allows at a token of the round: bool [V]."""
        bits = np.unpackbits(self.mask[index].cpu().numpy().view(np.uint8), bitorder="little")
        return bits[: self.vocab_size].astype(bool)

    def expected(self, logits: torch.Tensor, row: int, node: int) -> int:
        """What the reference samples at a node of a row."""
        case = self.cases[row]
        sampler = RequestSampler(case.params, case.prompt, self.vocab_size, case.end)
        sampler.commit(case.output)
        index = self.index(row, node)
        mask = self.allowed(index) if case.masked else None
        return sampler.sample(logits[index].cpu(), case.path(node), case.position(node), mask)

    def index(self, row: int, node: int) -> int:
        """Index in the round of a node (-1: the root) of a row."""
        return int(self.tokens.root[row]) + 1 + node

    def buffers(self, candidates: int = 2048) -> SampleBuffers:
        """New buffers that fit. A short list of candidates sends most rows the long way."""
        return SampleBuffers.new(len(self.tokens.token_ids), self.vocab_size, self.tokens.token_ids.device, candidates)


def walk_outputs(num_rows: int, max_depth: int, device: torch.device | str) -> WalkOutputs:
    num_tokens, error = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
    tokens, accepted = torch.zeros(2, num_rows, max_depth, dtype=torch.int32, device=device)
    return WalkOutputs(num_tokens, tokens, accepted, error)


def signed(word: int) -> int:
    """The int32 of the same bits."""
    return int(np.array(word & 0xFFFFFFFF, np.uint32).view(np.int32))


def make_round(cases: Sequence[Case], vocab_size: int, device: str, padding: int = 2, seed: int = 0) -> Round:
    """Lay out the cases as rows of one round, with the tables in another order than the rows."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[int]] = {name: [] for name in ("token_ids", "positions", "parents", "rows")}
    first, root = [0], []
    for row, case in enumerate(cases):
        committed = (case.prompt + case.output)[-case.extend :]
        base = first[-1] + len(committed) - 1
        root.append(base if case.samples else -1)
        length = len(case.prompt) + len(case.output)
        columns["token_ids"] += [*committed, *case.token_ids]
        columns["positions"] += range(length - len(committed), length)
        columns["positions"] += [case.position(node) - 1 for node in range(len(case.parents))]
        columns["parents"] += [-1, *range(first[-1], base)]
        columns["parents"] += [base + 1 + parent for parent in case.parents]
        columns["rows"] += [row] * (len(committed) + len(case.parents))
        first.append(base + 1 + len(case.parents))
    for name, value in (("token_ids", 0), ("positions", 0), ("parents", -1), ("rows", -1)):
        columns[name] += [value] * padding
    # One padding row as well.
    first.append(first[-1])
    root.append(-1)
    places = [2 * (len(cases) - 1 - row) for row in range(len(cases))]
    tensors = {name: int32(values, device) for name, values in columns.items()}
    tokens = RoundTokens(
        **tensors,
        first=int32(first, device),
        root=int32(root, device),
        table_rows=int32([*places, 0], device),
        cached_len=int32([0] * len(root), device),
    )
    words = -(-vocab_size // 32)
    bits = rng.random((len(columns["rows"]), words * 32)) < 0.7
    mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(device)
    return Round(cases, vocab_size, tokens, make_tables(cases, places, vocab_size, device), mask)


def make_tables(cases: Sequence[Case], places: Sequence[int], vocab_size: int, device: str) -> SamplingTables:
    """The tables' rows at `places`; what lies between must not be read, or not matter."""
    size = 2 * len(cases)
    floats, ints = torch.full((size, 8), 7.0), torch.full((size, 8), -1, dtype=torch.int32)
    counts, bias = torch.full((size, vocab_size), 3, dtype=torch.int32), torch.full((size, vocab_size), 50.0)
    for place, case in zip(places, cases, strict=True):
        params = case.params
        floats[place] = torch.tensor(
            [params.temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty,
             params.repetition_penalty, *case.thresholds]
        )  # fmt: skip
        flags = PENALIZED * params.penalized + BIASED * bool(params.logit_bias) + MASKED * case.masked
        flags += GOES_ON * bool(case.end.min_tokens)
        min_length = len(case.prompt) + case.end.min_tokens
        wanted = -1 if params.num_logprobs is None else params.num_logprobs
        ints[place] = int32(
            [signed(params.seed), signed(params.seed >> 32), params.choice_index, params.top_k, wanted, flags,
             min_length, 0],
            "cpu",
        )  # fmt: skip
        if params.penalized or case.end.min_tokens:
            row = np.bincount(case.output, minlength=vocab_size)
            row[case.prompt] |= IN_PROMPT
            row[list(case.end.token_ids)] |= ENDS_ANSWER
            counts[place] = torch.from_numpy(row.astype(np.int32))
        if params.logit_bias:
            bias[place] = 0.0
            for token_id, value in params.logit_bias.items():
                bias[place, token_id] = value
    return SamplingTables(*(table.to(device) for table in (floats, ints, counts, bias)))


def int32(values: Sequence[int], device: str) -> torch.Tensor:
    """A tensor as kernels want metadata."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_logits(num_tokens: int, width: int, seed: int, device: str, scale: float = 2.5) -> torch.Tensor:
    """Normal logits, float32 [num_tokens, width], the same on every device."""
    values = scale * np.random.default_rng(seed).normal(size=(num_tokens, width))
    return torch.from_numpy(values.astype(np.float32)).to(device)
