"""Token sequences to train on, and how they are put into batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tokens = Sequence[int] | NDArray[np.int32]

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
    def join(cls, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Texts:
        """Of prompts and their answers."""
        parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        for prompt, answer in zip(prompts, answers, strict=True):
            parts += [np.asarray(prompt, np.int32), np.asarray(answer, np.int32)]
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        return cls(
            np.concatenate(parts),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([len(prompt) for prompt in prompts], np.int32),
        )

    @classmethod
    def together(cls, parts: Sequence[Texts]) -> Texts:
        """One after the other."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.concatenate([part.prompt_lens for part in parts]),
        )

    def without(self, prompts: Iterable[Tokens]) -> Texts:
        """Those whose prompt is none of these."""
        known = {np.asarray(prompt, np.int32).tobytes() for prompt in prompts}
        kept = np.array(
            [
                self.tokens[start : start + size].tobytes() not in known
                for start, size in zip(self.offsets[:-1].tolist(), self.prompt_lens.tolist(), strict=True)
            ],
            np.bool_,
        )
        if kept.all():
            return self
        return Texts(
            self.tokens[np.repeat(kept, self.lengths)],
            np.concatenate([[0], np.cumsum(self.lengths[kept])]).astype(np.int64),
            self.prompt_lens[kept],
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

    def answer_tokens(self) -> NDArray[np.int32]:
        """Of all answers, one after the other."""
        return np.concatenate([np.empty(0, np.int32), *(self.answer(number) for number in range(len(self)))])

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
    """B sequences, padded on the right to T tokens; or, with `bounds`, any number one after the other. In host memory.

    Attributes:
        token_ids: int64 [B, T]; B is 1 with `bounds`.
        targets: int64 [R], places in the flattened [B * T] whose next token the target chose and knew well enough
            about: the drafter is taught the target's distribution there.
        num_targets: how many of `targets` count; those behind repeat a place so that all batches are of one shape.
        bounds: int32 [S + 1], sequence s is tokens bounds[s] to bounds[s + 1] - 1. Padding is sequences of its own;
            the last ones may be empty.
        longest: with `bounds`, no sequence of any batch is longer.
    """

    token_ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    num_targets: int
    bounds: NDArray[np.int32] | None = None
    longest: int = 0


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
    places = np.concatenate(targets)
    return TextBatch(token_ids, places, places.size)


class Batches:
    """Every sequence once an epoch, in an order that a seed decides, in padded rectangles of about `num_tokens`."""

    def __init__(self, texts: Texts, num_tokens: int, first_target: int) -> None:
        self._texts = texts
        self._num_tokens = num_tokens
        self._first_target = first_target
        self._targets = count_targets(texts, first_target)

    def groups(self, seed: int) -> list[NDArray[np.int64]]:
        """An epoch: the numbers of each batch's sequences. A batch has targets."""
        groups = _epoch(self._texts.lengths, self._num_tokens, seed)
        return [group for group in groups if self._targets[group].any()]

    def batch(self, numbers: NDArray[np.int64]) -> TextBatch:
        """Of one group."""
        return make_batch(self._texts, numbers, self._first_target)


def batches(texts: Texts, num_tokens: int, first_target: int, seed: int) -> Iterator[TextBatch]:
    """One epoch of `Batches`."""
    plan = Batches(texts, num_tokens, first_target)
    return map(plan.batch, plan.groups(seed))


def count_targets(texts: Texts, first_target: int) -> NDArray[np.int64]:
    """How many places of each sequence are targets, int64 [S]."""
    first = np.maximum(texts.prompt_lens.astype(np.int64) - 1, first_target)
    return np.maximum(texts.lengths - 1 - first, 0)


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
