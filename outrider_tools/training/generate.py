"""Text from the target: many conversations at once; those that end make room for the next ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import gumbel as device_gumbel
from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention
from outrider.device import put
from outrider.models.decoder import CausalLM
from outrider.sampling.noise import gumbel
from outrider_tools.training.prompts import Question, QuestionForm
from outrider_tools.training.rollout import noise_keys
from outrider_tools.training.texts import Texts

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A prompt, the temperature of its continuation (0 is greedy), and the most tokens of the continuation."""

    prompt: Sequence[int]
    temperature: float
    max_new_tokens: int
    seed: int = 0
    """The shared noise is drawn with this seed and choice 0."""


# Decode steps between two checks for rows that have ended.
STEPS_PER_LOOK = 8
# Most prompt tokens of one forward.
PREFILL_TOKENS = 16384

ProgressCallback = Callable[[int], None]


class Generator:
    """Continues prompts until a stop token, which is part of the answer, or until the job's limit.

    Tokens are drawn as the verify service draws them, and depend only on the seeds of the jobs.

    Rows of tokens lie on the device, each with its own pages, and run until they end by themselves. Every row holds
    `length` tokens with valid KV, and behind them the token that its next step runs.
    """

    def __init__(self, model: CausalLM, num_rows: int, max_length: int, stop_ids: Sequence[int]) -> None:
        """A prompt and its answer have at most `max_length` tokens together."""
        self._num_rows = num_rows
        self._max_length = max_length
        self._model = model
        self._attention = TritonAttention()
        device = model.device
        num_pages = -(-max_length // PAGE_SIZE)
        self._row_slots = num_pages * PAGE_SIZE
        self._kv = model.new_kv(num_rows * self._row_slots)
        self._page_tables = torch.arange(num_rows * num_pages, dtype=torch.int32, device=device).view(num_rows, -1)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self._tokens = zeros(torch.int32, max_length)
        self._length, self._limit = zeros(torch.int32), zeros(torch.int32)
        self._inverse_temperature, self._noise = zeros(torch.float32), zeros(torch.float32)
        self._active = zeros(torch.bool)
        self._seeds = [0] * num_rows
        self._noise_keys = zeros(torch.int32, 3)
        self._stop_ids = torch.tensor(list(stop_ids), dtype=torch.int32, device=device)
        self._rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._first = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._mask = torch.ones(num_rows, 1, dtype=torch.int32, device=device)
        self._graph = self._capture() if device.type == "cuda" else None

    def _admit(self, jobs: dict[int, GenerationJob]) -> None:
        """Start rows with the prompts of their jobs. All tokens of a prompt get KV except the last one."""
        device = self._tokens.device
        rows = put(list(jobs), device).long()
        prompts = [job.prompt for job in jobs.values()]
        padded = torch.zeros(len(jobs), max(map(len, prompts)), dtype=torch.int32)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self._tokens[rows, : padded.shape[1]] = padded.to(device)
        self._length[rows] = put([len(prompt) - 1 for prompt in prompts], device)
        self._limit[rows] = put([len(job.prompt) + job.max_new_tokens for job in jobs.values()], device)
        temperatures = [job.temperature for job in jobs.values()]
        self._inverse_temperature[rows] = torch.tensor([1.0 / t if t > 0 else 1.0 for t in temperatures]).to(device)
        self._noise[rows] = torch.tensor([float(t > 0) for t in temperatures]).to(device)
        self._noise_keys[rows] = noise_keys([job.seed for job in jobs.values()]).to(device)
        for row, job in jobs.items():
            self._seeds[row] = job.seed
        self._active[rows] = True
        part: dict[int, Sequence[int]] = {}
        size = 0
        for row, job in jobs.items():
            # The first decode step runs the last token.
            if len(job.prompt) > 1:
                part[row] = job.prompt[:-1]
                size += len(job.prompt) - 1
            if size >= PREFILL_TOKENS:
                self._prefill(part)
                part, size = {}, 0
        if part:
            self._prefill(part)

    def _ended(self, rows: Sequence[int]) -> dict[int, NDArray[np.int32]]:
        """Return those of `rows` that are no longer active, with all their tokens."""
        active = self._active.tolist()
        over = [row for row in rows if not active[row]]
        if not over:
            return {}
        where = put(over, self._tokens.device).long()
        tokens, lengths = self._tokens[where].cpu().numpy(), self._length[where].tolist()
        return {row: row_tokens[: length + 1] for row, row_tokens, length in zip(over, tokens, lengths, strict=True)}

    @torch.inference_mode()
    def _step(self) -> None:
        """Add a token to every active row."""
        place = self._length.long().unsqueeze(1)
        slots = torch.where(self._active, self._rows * self._row_slots + self._length, -1)
        batch = PagedBatch(
            token_ids=self._tokens.gather(1, place).squeeze(1),
            positions=self._length,
            first=self._first,
            # Rows that have ended read one key.
            cached_len=torch.where(self._active, self._length, 0),
            table_rows=self._rows,
            page_tables=self._page_tables,
            slots=slots,
            page_size=PAGE_SIZE,
            max_row_tokens=1,
            mask=self._mask,
        )
        chosen = self._sample(self._model.logits(self._model.forward(batch, self._kv, self._attention)))
        # A row that has ended may be full: it writes back the token that is there already.
        place = (place + 1).clamp_(max=self._max_length - 1)
        kept = self._tokens.gather(1, place).squeeze(1)
        self._tokens.scatter_(1, place, torch.where(self._active, chosen, kept).unsqueeze(1))
        self._length.add_(self._active.to(torch.int32))
        stopped = (chosen.unsqueeze(1) == self._stop_ids).any(1) | (self._length + 1 >= self._limit)
        self._active.logical_and_(~stopped)

    def _sample(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens, or tokens drawn by adding the shared noise, int32 [R]."""
        scores = logits * self._inverse_temperature.unsqueeze(1)
        if logits.is_cuda:
            noise = device_gumbel(self._noise_keys, self._length + 1, logits.shape[1])
            scores.addcmul_(noise, self._noise.unsqueeze(1))
        else:
            positions = (self._length + 1).tolist()
            for row in (self._active & (self._noise > 0)).nonzero()[:, 0].tolist():
                drawn = gumbel(self._seeds[row], 0, positions[row], vocab_size=logits.shape[1])
                scores[row] += torch.from_numpy(np.asarray(drawn))
        return scores.argmax(1).to(torch.int32)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record a step while no row is active, so that nothing it writes counts."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._step()
        return graph

    def run(
        self,
        jobs: Sequence[GenerationJob],
        *,
        token_budget: int | None = None,
        seconds: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> list[NDArray[np.int32]]:
        """Return answers in the order of the jobs, without their prompts.

        Once there are `token_budget` tokens, or `seconds` have passed, no more jobs begin, and the list ends early.
        `on_progress(n)` gets the number of tokens so far.

        Raises ValueError if a job does not fit `max_length`.
        """
        for job in jobs:
            if not 1 <= len(job.prompt) < len(job.prompt) + job.max_new_tokens <= self._max_length:
                raise ValueError(
                    f"a prompt of {len(job.prompt)} tokens and {job.max_new_tokens} more do not fit {self._max_length}"
                )
        answers: dict[int, NDArray[np.int32]] = {}
        running: dict[int, int] = {}
        begun = done = 0
        end = None if seconds is None else time.monotonic() + seconds
        step = self._step if self._graph is None else self._graph.replay
        while True:
            room = self._num_rows - len(running)
            if (token_budget is not None and done >= token_budget) or (end is not None and time.monotonic() >= end):
                room = 0
            new = range(begun, min(begun + room, len(jobs)))
            if new:
                free = [row for row in range(self._num_rows) if row not in running]
                rows = dict(zip(free, new, strict=False))
                self._admit({row: jobs[number] for row, number in rows.items()})
                running |= rows
                begun = new.stop
            if not running:
                return [answers[number] for number in range(begun)]
            for _ in range(STEPS_PER_LOOK):
                step()
            for row, tokens in self._ended(list(running)).items():
                number = running.pop(row)
                answers[number] = tokens[len(jobs[number].prompt) :].copy()
                done += len(answers[number])
            if on_progress is not None:
                on_progress(done)

    def _prefill(self, prompts: dict[int, Sequence[int]]) -> None:
        device = self._model.device
        counts = [len(tokens) for tokens in prompts.values()]
        slots = [row * self._row_slots + place for row, tokens in prompts.items() for place in range(len(tokens))]
        batch = PagedBatch(
            token_ids=put([token for tokens in prompts.values() for token in tokens], device),
            positions=put([place for count in counts for place in range(count)], device),
            first=put([0, *accumulate(counts)], device),
            cached_len=put([0] * len(counts), device),
            table_rows=put(list(prompts), device),
            page_tables=self._page_tables,
            slots=put(slots, device),
            page_size=PAGE_SIZE,
            max_row_tokens=max(counts),
        )
        self._model.forward(batch, self._kv, self._attention)


@dataclass(frozen=True)
class Answers:
    """The target's answers to questions.

    Attributes:
        texts: prompts and answers, one of each for every question.
        temperature: 0 for greedy answers.
        seeds: seed of each answer's noise.
        categories: category of each question, "" for none.
    """

    texts: Texts
    temperature: float
    seeds: list[int]
    categories: list[str]


def answer_questions(
    model: CausalLM,
    form: QuestionForm,
    questions: Sequence[Question],
    *,
    temperature: float,
    max_new_tokens: int,
    num_rows: int = 256,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> Answers:
    """Ask the target. The answer to question i has the seed `seed` + i and choice 0; it ends at the end of sequence.

    Each token is the argmax of logits / temperature + noise(seed, choice, position, token), as in the verify service.
    """
    prompts = [form.ask(question.text) for question in questions]
    seeds = [seed + number for number in range(len(prompts))]
    jobs = [GenerationJob(prompt, temperature, max_new_tokens, key) for prompt, key in zip(prompts, seeds, strict=True)]
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    stops = model.config.eos_token_ids
    generator = Generator(model, min(num_rows, len(jobs)), longest, stops)
    texts = Texts.join(prompts, generator.run(jobs, on_progress=on_progress))
    return Answers(texts, temperature, seeds, [question.category for question in questions])
