"""How well a head guesses, offline: on answers that the target gave at temperature 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.training.dense import target_states
from outrider.training.eagle3 import Eagle3Head
from outrider.training.target import Target
from outrider.training.texts import Texts, make_batch
from outrider.training.tree import TreeShape, tree_accepts

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]

BATCH_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of a head over some answers.

    Attributes:
        rates: by depth from 1 on, the share of all places where the head's likeliest token is the target's when the
            target's features end that many tokens before; the tokens between are the target's, the features the
            head's own. Tokens outside the draft vocabulary count as missed.
        chain: accept length (accepted + 1) of chains, over the rounds that decoding takes.
        tree: the same of trees.
        num_tokens: of the answers.
    """

    rates: list[float]
    chain: float
    tree: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    target: Target,
    head: Eagle3Head,
    texts: Texts,
    *,
    depth: int = 10,
    tree: TreeShape | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure a head on `texts`, whose answers must be the target's greedy ones.

    `tree.depth` limits chains and trees, `depth` the rates. The features of the prompt are the target's.
    """
    tree = tree or TreeShape()
    hits, possible = np.zeros(depth), np.zeros(depth)
    chains, trees = _Rounds(), _Rounds()
    for start in range(0, len(texts), BATCH_SEQUENCES):
        numbers = np.arange(start, min(start + BATCH_SEQUENCES, len(texts)))
        batch = make_batch(texts, numbers, 0)
        token_ids = torch.from_numpy(batch.token_ids).to(target.device)
        features, _ = target_states(target.model, token_ids, head.shape.feature_layers)
        agree = teacher_forced(target, head, token_ids, features, depth)
        for row, number in enumerate(numbers):
            first, last = int(texts.prompt_lens[number]), int(texts.lengths[number])
            own = agree[:, row, :last]
            _count(own, first, hits, possible)
            chains.walk(_run_lengths(own[: tree.depth]), first, last)
            text = token_ids[row, :last]
            accepts = tree_accepts(target, head, text, features[row, :last], tree, first_root=first - 1)
            trees.walk(accepts.cpu().numpy(), first, last)
        if told is not None:
            told(int(numbers[-1]) + 1, len(texts))
    return Evaluation(
        rates=(hits / np.maximum(possible, 1)).tolist(),
        chain=chains.accept_length,
        tree=trees.accept_length,
        num_tokens=texts.num_answer_tokens,
    )


def teacher_forced(target: Target, head: Eagle3Head, token_ids: Tensor, features: Tensor, depth: int) -> Flags:
    """Whether the head's likeliest token is the text's: bool [depth, B, T].

    Entry [d, b, t] is of the guess d + 1 tokens past the root t, after features of the positions before t. What
    would lie behind the sequence is False.
    """
    found = torch.zeros(depth, *token_ids.shape, dtype=torch.bool, device=token_ids.device)
    with target.autocast():
        for step, feature in enumerate(head.unroll(features, target.embed(token_ids), target.rotary, depth)):
            guesses = head.target_ids[head.lm_head(head.norm(feature)).argmax(-1)]
            # Base t - 1 has the root t as its first token.
            width = token_ids.shape[1] - step - 2
            if width > 0:
                found[step, :, 1 : 1 + width] = guesses[:, :width] == token_ids[:, step + 2 :]
    flags: Flags = found.cpu().numpy()
    return flags


def _count(agree: Flags, first: int, hits: NDArray[np.float64], possible: NDArray[np.float64]) -> None:
    """Add what was guessed and what could be: guesses of answer tokens, `first` being the answer's first.

    The first round begins at the prompt's last token.
    """
    length = agree.shape[1]
    for step in range(agree.shape[0]):
        roots = slice(max(1, first - 1 - step), length - step - 1)
        hits[step] += agree[step, roots].sum()
        possible[step] += max(0, roots.stop - roots.start)


def _run_lengths(agree: Flags) -> Counts:
    """How many guesses in a row are right from each root, int64 [T]."""
    lengths: Counts = np.cumprod(agree, axis=0).sum(0).astype(np.int64)
    return lengths


class _Rounds:
    """Decoding in rounds, replayed over answers that are known."""

    def __init__(self) -> None:
        self._tokens = 0
        self._rounds = 0

    def walk(self, accepts: Counts, first: int, last: int) -> None:
        """`accepts` [T]: draft tokens accepted after each root. The answer is tokens `first` to `last` - 1."""
        root = first - 1
        while root < last - 1:
            root += min(int(accepts[root]) + 1, last - 1 - root)
            self._rounds += 1
        self._tokens += last - first

    @property
    def accept_length(self) -> float:
        return self._tokens / max(1, self._rounds)
