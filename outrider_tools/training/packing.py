"""Batches of one shape: sequences one after the other, so that nothing is compiled or captured twice."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider_tools.training.texts import TextBatch, Texts, count_targets

# Room for targets beyond their mean share: batches that hold still more of them leave some out.
SPARE_TARGETS = 1.05
# Rows of targets come in multiples of this.
TARGET_STEP = 1024
# Sequences of a batch, at most: one for so many tokens, and always so many.
TOKENS_A_SEQUENCE, MIN_SEQUENCES = 64, 8


class PackedBatches:
    """Every sequence that has targets once an epoch, in batches of exactly `num_tokens` tokens.

    Attributes:
        longest: no sequence of any batch has more tokens.
        num_targets: the length of each batch's `targets`.
    """

    def __init__(self, texts: Texts, num_tokens: int, first_target: int) -> None:
        """Raises ConfigError where a sequence is longer than a batch."""
        self._texts = texts
        self._num_tokens = num_tokens
        self._first_target = first_target
        targets = count_targets(texts, first_target)
        self._numbers = np.flatnonzero(targets)
        self._lengths = texts.lengths
        kept = self._lengths[self._numbers]
        self.longest = int(kept.max(initial=1))
        if self.longest > num_tokens:
            raise ConfigError(f"batch_tokens {num_tokens} is less than the longest text's {self.longest} tokens")
        share = float(targets.sum() / max(1, int(kept.sum())))
        step = min(TARGET_STEP, num_tokens)
        self.num_targets = min(num_tokens, -(-int(num_tokens * share * SPARE_TARGETS) // step) * step)
        # Padding takes sequences too.
        self._max_sequences = max(MIN_SEQUENCES, num_tokens // TOKENS_A_SEQUENCE)
        self._num_bounds = self._max_sequences + -(-num_tokens // self.longest) + 1

    def groups(self, seed: int) -> list[NDArray[np.int64]]:
        """An epoch: the numbers of each batch's sequences."""
        random = np.random.default_rng(seed)
        order = self._numbers[random.permutation(len(self._numbers))]
        ends = np.cumsum(self._lengths[order])
        groups, start, before = [], 0, 0
        while start < len(order):
            end = int(np.searchsorted(ends, before + self._num_tokens, "right"))
            end = min(end, start + self._max_sequences)
            groups.append(order[start:end])
            start, before = end, int(ends[end - 1])
        return groups

    def batch(self, numbers: NDArray[np.int64]) -> TextBatch:
        """Of one group."""
        token_ids = np.zeros((1, self._num_tokens), np.int64)
        bounds = [0]
        places = []
        for number in numbers.tolist():
            sequence, begin = self._texts.sequence(number), bounds[-1]
            bounds.append(begin + len(sequence))
            token_ids[0, begin : bounds[-1]] = sequence
            first = max(int(self._texts.prompt_lens[number]) - 1, self._first_target)
            places.append(np.arange(begin + first, bounds[-1] - 1, dtype=np.int64))
        while bounds[-1] < self._num_tokens:
            bounds.append(min(bounds[-1] + self.longest, self._num_tokens))
        padded = np.full(self._num_bounds, self._num_tokens, np.int32)
        padded[: len(bounds)] = bounds
        found = np.concatenate(places)[: self.num_targets]
        # Any place that all steps of an unrolled drafter can be asked about.
        targets = np.full(self.num_targets, found[0], np.int64)
        targets[: found.size] = found
        return TextBatch(token_ids, targets, int(found.size), padded, self.longest)
