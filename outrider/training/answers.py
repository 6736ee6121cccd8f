"""The target's answers that a drafter is measured on: greedy, or sampled with the shared noise as the service does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.gumbel import gumbel as device_gumbel
from outrider.attention.base import AttentionBackend
from outrider.device import put
from outrider.models.base import CausalLM
from outrider.sampling.noise import gumbel
from outrider.training.decoding import Decoder
from outrider.training.generate import Generator, Job, Told
from outrider.training.prompts import ChatForm, Question
from outrider.training.ranking import noise_keys
from outrider.training.texts import Texts


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
    jobs = [_KeyedJob(prompt, temperature, max_new_tokens, key) for prompt, key in zip(prompts, seeds, strict=True)]
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    generator = _KeyedGenerator(model, min(num_rows, len(jobs)), longest, model.config.eos_token_ids)
    texts = Texts.join(prompts, generator.run(jobs, told=told))
    return Answers(texts, temperature, seeds, [question.category for question in questions])


@dataclass(frozen=True, slots=True)
class _KeyedJob(Job):
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


class _KeyedGenerator(Generator):
    def __init__(self, model: CausalLM, num_rows: int, max_length: int, stop_ids: Sequence[int]) -> None:
        super().__init__(model, 1, 2, stop_ids)
        self._keyed = _KeyedDecoder(model, self._attention, num_rows, max_length, stop_ids)
        self._decoder = self._keyed

    def _admit(self, jobs: dict[int, Job]) -> None:
        self._keyed.set_seeds(list(jobs), [job.seed for job in jobs.values() if isinstance(job, _KeyedJob)])
        super()._admit(jobs)
