"""Text from the target: many conversations at once, those that end make room for the next."""

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
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention
from outrider.device import put
from outrider.models.decoder import CausalLM
from outrider.sampling.noise import gumbel
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.rollout import noise_keys
from outrider_tools.training.texts import Texts

PAGE_SIZE = 16
# The finest step of the uniform numbers that exponential ones are made of.
MIN_EXPONENTIAL = 2.0**-24


class Decoder:
    """Rows of tokens on the device, each with pages of its own. A row runs until it ends by itself.

    Every row holds `length` tokens with valid KV and behind them the token that its next step runs.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        num_rows: int,
        max_length: int,
        stop_ids: Sequence[int],
    ) -> None:
        self.num_rows = num_rows
        self.max_length = max_length
        self.page_size = PAGE_SIZE
        self._model = model
        self._attention = attention
        device = model.device
        num_pages = -(-max_length // PAGE_SIZE)
        self._row_slots = num_pages * PAGE_SIZE
        self.kv = model.new_kv(num_rows * self._row_slots)
        self.page_tables = torch.arange(num_rows * num_pages, dtype=torch.int32, device=device).view(num_rows, -1)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self._tokens = zeros(torch.int32, max_length)
        self._length, self._limit = zeros(torch.int32), zeros(torch.int32)
        self._inverse_temperature, self._noise = zeros(torch.float32), zeros(torch.float32)
        self._active = zeros(torch.bool)
        self._stop_ids = torch.tensor(list(stop_ids), dtype=torch.int32, device=device)
        self._rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._first = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._mask = torch.ones(num_rows, 1, dtype=torch.int32, device=device)
        self._graph = self._capture() if device.type == "cuda" else None

    def slot(self, row: int, position: int) -> int:
        """KV slot of a position of a row."""
        return row * self._row_slots + position

    def begin(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        temperatures: Sequence[float],
    ) -> None:
        """Rows start anew: with their prompts, which have KV but for the last token, to at most `limits` tokens."""
        device = self._tokens.device
        where = put(rows, device).long()
        width = max(len(prompt) for prompt in prompts)
        padded = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self._tokens[where, :width] = padded.to(device)
        self._length[where] = put([len(prompt) - 1 for prompt in prompts], device)
        self._limit[where] = put(limits, device)
        inverse = torch.tensor([1.0 / t if t > 0 else 1.0 for t in temperatures])
        self._inverse_temperature[where] = inverse.to(device)
        self._noise[where] = torch.tensor([float(t > 0) for t in temperatures]).to(device)
        self._active[where] = True

    def step(self) -> None:
        """Every active row gets a token."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def ended(self, rows: Sequence[int]) -> dict[int, NDArray[np.int32]]:
        """Those of `rows` that are not active any more, with all their tokens."""
        active = self._active.tolist()
        over = [row for row in rows if not active[row]]
        if not over:
            return {}
        where = put(over, self._tokens.device).long()
        tokens, lengths = self._tokens[where].cpu().numpy(), self._length[where].tolist()
        return {row: row_tokens[: length + 1] for row, row_tokens, length in zip(over, tokens, lengths, strict=True)}

    @torch.inference_mode()
    def _step(self) -> None:
        place = self._length.long().unsqueeze(1)
        slots = torch.where(self._active, self._rows * self._row_slots + self._length, -1)
        batch = PagedBatch(
            token_ids=self._tokens.gather(1, place).squeeze(1),
            positions=self._length,
            first=self._first,
            # Rows that have ended read one key.
            cached_len=torch.where(self._active, self._length, 0),
            table_rows=self._rows,
            page_tables=self.page_tables,
            slots=slots,
            page_size=self.page_size,
            max_row_tokens=1,
            mask=self._mask,
        )
        chosen = self._sample(self._model.logits(self._model.forward(batch, self.kv, self._attention)))
        # A row that has ended may be full: what it would write goes back to where it came from.
        place = (place + 1).clamp_(max=self.max_length - 1)
        kept = self._tokens.gather(1, place).squeeze(1)
        self._tokens.scatter_(1, place, torch.where(self._active, chosen, kept).unsqueeze(1))
        self._length.add_(self._active.to(torch.int32))
        stopped = (chosen.unsqueeze(1) == self._stop_ids).any(1) | (self._length + 1 >= self._limit)
        self._active.logical_and_(~stopped)

    def _sample(self, logits: Tensor) -> Tensor:
        """int32 [R]: the likeliest token, or one drawn by adding Gumbel noise."""
        scores = logits * self._inverse_temperature.unsqueeze(1)
        # Never 0, whose logarithm would make any token win, and would spoil greedy rows.
        gumbel = torch.empty_like(scores).exponential_().clamp_(min=MIN_EXPONENTIAL).log_()
        return scores.addcmul_(gumbel, self._noise.unsqueeze(1), value=-1.0).argmax(1).to(torch.int32)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record a step while no row is active: it writes nothing that counts."""
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


@dataclass(frozen=True, slots=True)
class KeyedJob(Job):
    """A job whose noise is keyed by `seed` and choice 0."""

    seed: int


class _KeyedDecoder(Decoder):
    """Draws with the shared noise. A row's key is set before it begins."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        num_rows: int,
        max_length: int,
        stop_ids: Sequence[int],
    ) -> None:
        # First, since a captured step reads them.
        self._keys = torch.zeros(num_rows, 3, dtype=torch.int32, device=model.device)
        self._seeds = [0] * num_rows
        super().__init__(model, attention, num_rows, max_length, stop_ids)

    def set_seeds(self, rows: Sequence[int], seeds: list[int]) -> None:
        """Key rows' noise."""
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[row] = seed
        self._keys[put(rows, self._keys.device).long()] = noise_keys(seeds).to(self._keys.device)

    def _sample(self, logits: Tensor) -> Tensor:
        scores = logits * self._inverse_temperature.unsqueeze(1)
        if logits.is_cuda:
            noise = device_gumbel(self._keys, self._length + 1, logits.shape[1])
            return scores.addcmul_(noise, self._noise.unsqueeze(1)).argmax(1).to(torch.int32)
        positions, sampled = (self._length + 1).tolist(), (self._active & (self._noise > 0)).tolist()
        for row, position in enumerate(positions):
            if sampled[row]:
                drawn = gumbel(self._seeds[row], 0, position, vocab_size=logits.shape[1])
                scores[row] += torch.from_numpy(np.asarray(drawn))
        return scores.argmax(1).to(torch.int32)


class KeyedGenerator(Generator):
    """Continues `KeyedJob`s. Neither their order nor `num_rows` nor a seed of its own plays a part in the noise."""

    _decoder: _KeyedDecoder

    def _make_decoder(self, num_rows: int, max_length: int, stop_ids: Sequence[int]) -> _KeyedDecoder:
        return _KeyedDecoder(self._model, self._attention, num_rows, max_length, stop_ids)

    def _admit(self, jobs: dict[int, Job]) -> None:
        self._decoder.set_seeds(list(jobs), [job.seed for job in jobs.values() if isinstance(job, KeyedJob)])
        super()._admit(jobs)


@dataclass(frozen=True)
class Answers:
    """Answers of the target to questions.

    Attributes:
        texts: prompts and answers, as many as there were questions.
        temperature: 0 for greedy ones.
        seeds: of each answer's noise.
        categories: of each question, "" for none.
    """

    texts: Texts
    temperature: float
    seeds: list[int]
    categories: list[str]


def answer_questions(
    model: CausalLM,
    form: ChatForm,
    questions: Sequence[Question],
    *,
    temperature: float,
    max_new_tokens: int,
    num_rows: int = 256,
    seed: int = 0,
    told: Told | None = None,
) -> Answers:
    """Ask the target; the answer to question i has the seed `seed` + i and choice 0. End of sequence is obeyed.

    Each token is the argmax of logits / temperature + noise(seed, choice, position, token), as in the verify service.
    """
    prompts = [form.ask(question.text) for question in questions]
    seeds = [seed + number for number in range(len(prompts))]
    jobs = [KeyedJob(prompt, temperature, max_new_tokens, key) for prompt, key in zip(prompts, seeds, strict=True)]
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    generator = KeyedGenerator(model, min(num_rows, len(jobs)), longest, model.config.eos_token_ids)
    texts = Texts.join(prompts, generator.run(jobs, told=told))
    return Answers(texts, temperature, seeds, [question.category for question in questions])
