"""Text from the target: many conversations at once, those that end make room for the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention
from outrider.device import put
from outrider.models.decoder import CausalLM
from outrider_tools.training.decoding import Decoder

# Decode steps between two looks at who has ended.
STEPS_PER_LOOK = 8
# Prompt tokens of one forward.
PREFILL_TOKENS = 16384

Told = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, at what temperature it is continued (0 is greedy), and by how many tokens at most."""

    prompt: Sequence[int]
    temperature: float
    max_new_tokens: int


class Generator:
    """Continues prompts until a stop token, which is part of the answer, or until the job's limit.

    Sampled text depends on `seed`, on the jobs and their order, and on `num_rows`.
    """

    def __init__(self, model: CausalLM, num_rows: int, max_length: int, stop_ids: Sequence[int], seed: int = 0) -> None:
        """`max_length`: tokens of prompt and answer together at most."""
        self._model = model
        self._attention = TritonAttention()
        torch.manual_seed(seed)
        self._decoder = self._make_decoder(num_rows, max_length, stop_ids)

    def _make_decoder(self, num_rows: int, max_length: int, stop_ids: Sequence[int]) -> Decoder:
        """Called once, when model and attention are there."""
        return Decoder(self._model, self._attention, num_rows, max_length, stop_ids)

    def run(
        self,
        jobs: Sequence[Job],
        *,
        token_budget: int | None = None,
        seconds: float | None = None,
        told: Told | None = None,
    ) -> list[list[int]]:
        """`arrays`, as lists."""
        found = self.arrays(jobs, token_budget=token_budget, seconds=seconds, told=told)
        return [answer.tolist() for answer in found]

    def arrays(
        self,
        jobs: Sequence[Job],
        *,
        token_budget: int | None = None,
        seconds: float | None = None,
        told: Told | None = None,
    ) -> list[NDArray[np.int32]]:
        """Answers in the order of the jobs, without their prompts.

        Once `token_budget` tokens are there, or `seconds` have passed, no more jobs begin: the list then ends early.
        `told(n)` hears how many tokens are there.

        Raises:
            ValueError: a job does not fit `max_length`.
        """
        for job in jobs:
            if not 1 <= len(job.prompt) < len(job.prompt) + job.max_new_tokens <= self._decoder.max_length:
                raise ValueError(
                    f"a prompt of {len(job.prompt)} tokens and {job.max_new_tokens} more do not fit "
                    f"{self._decoder.max_length}"
                )
        answers: dict[int, NDArray[np.int32]] = {}
        running: dict[int, int] = {}
        begun = done = 0
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            room = self._decoder.num_rows - len(running)
            if (token_budget is not None and done >= token_budget) or (end is not None and time.monotonic() >= end):
                room = 0
            new = range(begun, min(begun + room, len(jobs)))
            if new:
                free = [row for row in range(self._decoder.num_rows) if row not in running]
                rows = dict(zip(free, new, strict=False))
                self._admit({row: jobs[number] for row, number in rows.items()})
                running |= rows
                begun = new.stop
            if not running:
                return [answers[number] for number in range(begun)]
            for _ in range(STEPS_PER_LOOK):
                self._decoder.step()
            for row, tokens in self._decoder.ended(list(running)).items():
                number = running.pop(row)
                answers[number] = tokens[len(jobs[number].prompt) :].copy()
                done += len(answers[number])
            if told is not None:
                told(done)

    def _admit(self, jobs: dict[int, Job]) -> None:
        self._decoder.begin(
            list(jobs),
            [list(job.prompt) for job in jobs.values()],
            [len(job.prompt) + job.max_new_tokens for job in jobs.values()],
            [job.temperature for job in jobs.values()],
        )
        part: dict[int, Sequence[int]] = {}
        size = 0
        for row, job in jobs.items():
            # The last token is left to the first decode step.
            if len(job.prompt) > 1:
                part[row] = job.prompt[:-1]
                size += len(job.prompt) - 1
            if size >= PREFILL_TOKENS:
                self._prefill(part)
                part, size = {}, 0
        if part:
            self._prefill(part)

    def _prefill(self, prompts: dict[int, Sequence[int]]) -> None:
        decoder, device = self._decoder, self._model.device
        counts = [len(tokens) for tokens in prompts.values()]
        slots = [decoder.slot(row, place) for row, tokens in prompts.items() for place in range(len(tokens))]
        batch = PagedBatch(
            token_ids=put([token for tokens in prompts.values() for token in tokens], device),
            positions=put([place for count in counts for place in range(count)], device),
            first=put([0, *accumulate(counts)], device),
            cached_len=put([0] * len(counts), device),
            table_rows=put(list(prompts), device),
            page_tables=decoder.page_tables,
            slots=put(slots, device),
            page_size=decoder.page_size,
            max_row_tokens=max(counts),
        )
        self._model.forward(batch, decoder.kv, self._attention)


def greedy_answers(
    model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int], num_rows: int
) -> list[list[int]]:
    """What the target answers at temperature 0, without the prompts."""
    jobs = [Job(prompt, 0.0, max_new_tokens) for prompt in prompts]
    max_length = max(len(prompt) for prompt in prompts) + max_new_tokens
    return Generator(model, min(num_rows, len(jobs)), max_length, stop_ids).run(jobs)
