"""Text from the target, drawn with the shared noise: every job has a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.gumbel import gumbel as device_gumbel
from outrider.attention.base import AttentionBackend
from outrider.device import put
from outrider.models.decoder import CausalLM
from outrider.sampling.noise import gumbel
from outrider_tools.training.decoding import Decoder
from outrider_tools.training.generate import Generator, Job
from outrider_tools.training.ranking import noise_keys


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
