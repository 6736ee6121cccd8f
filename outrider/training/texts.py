"""Token sequences to train on, and how they are put into batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

# Sequences of like length share a batch: they are sorted within this many batches' worth of shuffled ones.
SORTED_BATCHES = 32
# Batches are padded to multiples of this, so that few shapes occur.
LENGTH_STEP = 16


@dataclass(frozen=True)
class Texts:
    """Prompts and what the target answered, one after the other.

    Attributes:
        tokens: int32 [N].
        offsets: int64 [S + 1]; sequence s is tokens[offsets[s] : offsets[s + 1]].
        prompt_lens: int32 [S], tokens of each sequence that the target did not choose.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prompt_lens: NDArray[np.int32]

    @classmethod
    def join(cls, prompts: list[list[int]], answers: list[list[int]]) -> Texts:
        """Of prompts and their answers."""
        sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = [len(sequence) for sequence in sequences]
        return cls(
            np.array([token for sequence in sequences for token in sequence], np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([len(prompt) for prompt in prompts], np.int32),
        )

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64 [S]."""
        return np.diff(self.offsets)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target chose."""
        return int(self.tokens.size - self.prompt_lens.sum())

    def sequence(self, number: int) -> NDArray[np.int32]:
        """Prompt and answer."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def answer(self, number: int) -> NDArray[np.int32]:
        """The answer alone."""
        return self.sequence(number)[self.prompt_lens[number] :]

    def save(self, path: Path) -> None:
        """Write to a safetensors file, whole or not at all."""
        part = path.with_name(path.name + ".part")
        save_file({"tokens": self.tokens, "offsets": self.offsets, "prompt_lens": self.prompt_lens}, part)
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        """What `save` wrote."""
        return cls(**load_file(path))


@dataclass(frozen=True)
class TextBatch:
    """B sequences, padded on the right to T tokens. All in host memory.

    Attributes:
        token_ids: int64 [B, T].
        targets: int64 [R], places in the flattened [B * T] whose next token the target chose and knew well enough
            about: the drafter is taught the target's distribution there.
    """

    token_ids: NDArray[np.int64]
    targets: NDArray[np.int64]


def make_batch(texts: Texts, numbers: NDArray[np.int64], first_target: int) -> TextBatch:
    """Pad some sequences to one rectangle. Places before `first_target` of a sequence are no targets."""
    lengths = texts.lengths[numbers]
    width = -(-int(lengths.max()) // LENGTH_STEP) * LENGTH_STEP
    token_ids = np.zeros((len(numbers), width), np.int64)
    targets = []
    for row, number in enumerate(numbers):
        sequence = texts.sequence(int(number))
        token_ids[row, : len(sequence)] = sequence
        first = max(int(texts.prompt_lens[number]) - 1, first_target)
        targets.append(np.arange(first, len(sequence) - 1, dtype=np.int64) + row * width)
    return TextBatch(token_ids, np.concatenate(targets))


def batches(texts: Texts, num_tokens: int, first_target: int, seed: int) -> Iterator[TextBatch]:
    """Every sequence once, in an order that `seed` decides, in batches of at most about `num_tokens` padded tokens."""
    for numbers in _epoch(texts.lengths, num_tokens, seed):
        batch = make_batch(texts, numbers, first_target)
        if batch.targets.size:
            yield batch


def _epoch(lengths: NDArray[np.int64], num_tokens: int, seed: int) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    per_batch = max(1, num_tokens // max(1, int(lengths.mean())))
    groups: list[NDArray[np.int64]] = []
    for start in range(0, len(order), per_batch * SORTED_BATCHES):
        part = order[start : start + per_batch * SORTED_BATCHES]
        part = part[np.argsort(lengths[part], kind="stable")]
        groups += _cut(part, lengths, num_tokens)
    return [groups[i] for i in random.permutation(len(groups))]


def _cut(order: NDArray[np.int64], lengths: NDArray[np.int64], num_tokens: int) -> list[NDArray[np.int64]]:
    """Cut ascending sequences where the padded rectangle would grow past `num_tokens`."""
    groups, start = [], 0
    for end in range(1, len(order) + 1):
        full = end < len(order) and (end + 1 - start) * int(lengths[order[end]]) > num_tokens
        if full or end == len(order):
            groups.append(order[start:end])
            start = end
    return groups
