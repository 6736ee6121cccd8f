"""Token sequences to train on, their batches, and the draft vocabulary made from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from outrider.errors import ConfigError
from outrider_tools.files import replacing

Tokens = Sequence[int] | NDArray[np.int32]
IntT = TypeVar("IntT", np.int32, np.int64)

# Room for targets above their mean share. A batch of fixed shape that has still more leaves some out.
SPARE_TARGETS = 1.05
# In batches of fixed shape, the number of targets is a multiple of this.
TARGET_STEP = 1024
# Most sequences of a batch: one for this many tokens, but always at least this many.
TOKENS_A_SEQUENCE, MIN_SEQUENCES = 64, 8


@dataclass(frozen=True)
class Texts:
    """Prompts and the target's answers, one after the other.

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
        """Make texts of prompts and their answers."""
        parts: list[Tokens] = [np.empty(0, np.int32)]
        for prompt, answer in zip(prompts, answers, strict=True):
            parts += [prompt, answer]
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        tokens = np.concatenate(parts, dtype=np.int32, casting="unsafe")
        return cls(tokens, _offsets(lengths), np.array([len(prompt) for prompt in prompts], np.int32))

    @classmethod
    def concat(cls, parts: Sequence[Texts]) -> Texts:
        """Concatenate texts."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            _offsets(lengths),
            np.concatenate([part.prompt_lens for part in parts]),
        )

    def digest(self) -> str:
        """Return a hash of these texts."""
        found = hashlib.sha256(self.tokens.tobytes())
        found.update(self.offsets.tobytes() + self.prompt_lens.tobytes())
        return found.hexdigest()[:16]

    def without(self, endings: Iterable[Sequence[int]]) -> Texts:
        """Return the texts whose prompt ends with none of `endings`."""
        kept = np.ones(len(self), np.bool_)
        ends = self.offsets[:-1] + self.prompt_lens
        for ending in endings:
            places = np.flatnonzero(self.prompt_lens >= len(ending))
            for back, token in enumerate(reversed(ending), 1):
                places = places[self.tokens[ends[places] - back] == token]
            kept[places] = False
        return Texts(self.tokens[np.repeat(kept, self.lengths)], _offsets(self.lengths[kept]), self.prompt_lens[kept])

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64 [S]."""
        return np.diff(self.offsets)

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens that the target chose."""
        return int(self.tokens.size - self.prompt_lens.sum())

    def sequence(self, number: int) -> NDArray[np.int32]:
        """Return a sequence's prompt and answer."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def answer(self, number: int) -> NDArray[np.int32]:
        """Return a sequence's answer alone."""
        return self.sequence(number)[self.prompt_lens[number] :]

    def answer_tokens(self) -> NDArray[np.int32]:
        """Return the tokens of all answers, one after the other."""
        return np.concatenate([np.empty(0, np.int32), *(self.answer(number) for number in range(len(self)))])

    def save(self, path: Path) -> None:
        """Write to a safetensors file, whole or not at all."""
        with replacing(path) as part:
            save_file({"tokens": self.tokens, "offsets": self.offsets, "prompt_lens": self.prompt_lens}, part)

    @classmethod
    def load(cls, path: Path) -> Texts:
        """Load texts that `save` wrote."""
        return cls(**load_file(path))


def _offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True)
class TextBatch:
    """Sequences one after the other, M tokens in all. In host memory.

    Attributes:
        token_ids: int64 [M].
        targets: int64 [R], places whose next token the target chose, with enough text before them: there the drafter
            learns the target's distribution.
        num_targets: how many of `targets` count; the others repeat a place so that all batches have one shape.
        bounds: int32 [S + 1], sequence s is tokens bounds[s] to bounds[s + 1] - 1. Padding forms sequences of its own;
            the last ones may be empty.
        parts: int32 [P + 1], bounds of what a head reads as sequences: some of them are cut in two.
        longest: no sequence of any batch is longer.
    """

    token_ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    num_targets: int
    bounds: NDArray[np.int32]
    parts: NDArray[np.int32]
    longest: int


class Batches:
    """Batches of `num_tokens` tokens. An epoch has every sequence with targets once, in an order made from a seed.

    With `fixed_shape`, all batches are padded to one shape, so that nothing is compiled or captured twice. Without it
    they have at most `num_tokens` tokens, unless a single sequence has more.

    Attributes:
        longest: no sequence of any batch has more tokens.
        num_targets: with `fixed_shape`, the length of each batch's `targets`.
    """

    def __init__(
        self, texts: Texts, num_tokens: int, first_target: int, fixed_shape: bool = False, cuts: float = 0.0
    ) -> None:
        """Places of a sequence before `first_target` are no targets. `cuts` is the share of sequences with two parts.

        Raises ConfigError if a sequence is longer than a batch of fixed shape.
        """
        self._texts = texts
        self._num_tokens = num_tokens
        self._fixed_shape = fixed_shape
        self._cuts = cuts
        self._lengths = texts.lengths
        self._first = np.maximum(texts.prompt_lens.astype(np.int64) - 1, first_target)
        targets = np.maximum(self._lengths - 1 - self._first, 0)
        self._numbers = np.flatnonzero(targets)
        kept = self._lengths[self._numbers]
        self.longest = int(kept.max(initial=1))
        if fixed_shape and self.longest > num_tokens:
            raise ConfigError(f"batch_tokens {num_tokens} is less than the longest text's {self.longest} tokens")
        share = float(targets.sum() / max(1, int(kept.sum())))
        step = min(TARGET_STEP, num_tokens)
        self.num_targets = min(num_tokens, -(-int(num_tokens * share * SPARE_TARGETS) // step) * step)
        # Padding takes sequences, too.
        self._max_sequences = max(MIN_SEQUENCES, num_tokens // TOKENS_A_SEQUENCE)
        self._num_bounds = self._max_sequences + -(-num_tokens // self.longest) + 1

    def groups(self, seed: int) -> list[NDArray[np.int64]]:
        """Return an epoch: the numbers of each batch's sequences."""
        random = np.random.default_rng(seed)
        order = self._numbers[random.permutation(len(self._numbers))]
        ends = np.cumsum(self._lengths[order])
        groups, start, before = [], 0, 0
        while start < len(order):
            end = int(np.searchsorted(ends, before + self._num_tokens, "right"))
            end = max(start + 1, min(end, start + self._max_sequences))
            groups.append(order[start:end])
            start, before = end, int(ends[end - 1])
        return groups

    def batch(self, numbers: NDArray[np.int64], seed: int = 0) -> TextBatch:
        """Return the batch of one group. The seed decides where sequences are cut."""
        bounds, places = [0], []
        for number in numbers.tolist():
            begin = bounds[-1]
            bounds.append(begin + int(self._lengths[number]))
            places.append(np.arange(begin + self._first[number], bounds[-1] - 1, dtype=np.int64))
        token_ids = np.concatenate([self._texts.sequence(number) for number in numbers.tolist()]).astype(np.int64)
        targets = np.concatenate(places)
        parts = self._parts(bounds, numbers, seed)
        if not self._fixed_shape:
            return TextBatch(token_ids, targets, targets.size, np.array(bounds, np.int32), parts, self.longest)
        targets = targets[: self.num_targets]
        # Pad with any place for which all steps of an unrolled drafter have a base.
        padded_targets = _padded(targets, self.num_targets, int(targets[0]))
        while bounds[-1] < self._num_tokens:
            bounds.append(min(bounds[-1] + self.longest, self._num_tokens))
        padded_bounds = _padded(np.array(bounds, np.int32), self._num_bounds, self._num_tokens)
        # Padding after the last part is split as it is for the target.
        parts = np.concatenate([parts, padded_bounds[len(numbers) + 1 :]])
        parts = _padded(parts, self._num_bounds + self._max_sequences, self._num_tokens)
        token_ids = _padded(token_ids, self._num_tokens, 0)
        return TextBatch(token_ids, padded_targets, targets.size, padded_bounds, parts, self.longest)

    def _parts(self, bounds: list[int], numbers: NDArray[np.int64], seed: int) -> NDArray[np.int32]:
        """Return bounds with a cut in some sequences. Cuts do not depend on how sequences are put into batches."""
        found = list(bounds)
        for number, (start, end) in zip(numbers.tolist(), pairwise(bounds), strict=True):
            random = np.random.default_rng([seed, number])
            if random.random() < self._cuts:
                found.append(int(random.integers(start, end)))
        # A cut at a sequence's first token has no effect.
        return np.unique(found).astype(np.int32)


def _padded(values: NDArray[IntT], size: int, value: int) -> NDArray[IntT]:
    return np.pad(values, (0, size - values.size), constant_values=value)


def choose_vocabulary(
    texts: Texts, vocab_size: int, draft_vocab_size: int, always: Sequence[int] = ()
) -> NDArray[np.int64]:
    """Return the answers' most frequent tokens and those in `always`, as ascending target ids [draft_vocab_size].

    Tokens that do not occur follow in the order of their ids: byte-level vocabularies list the common ones first.

    Raises ConfigError if the target's vocabulary is too small, or `always` too large.
    """
    if not len(set(always)) <= draft_vocab_size <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {draft_vocab_size} of the target's {vocab_size} tokens is impossible")
    counts = np.bincount(texts.answer_tokens(), minlength=vocab_size)
    counts[list(always)] = np.iinfo(np.int64).max
    chosen = np.argsort(-counts, kind="stable")[:draft_vocab_size]
    return np.sort(chosen)


def coverage(texts: Texts, chosen: NDArray[np.int64], vocab_size: int) -> float:
    """Return the share of the answers' tokens that a vocabulary holds."""
    known = np.zeros(vocab_size, np.bool_)
    known[chosen] = True
    return int(known[texts.answer_tokens()].sum()) / max(1, texts.num_answer_tokens)
