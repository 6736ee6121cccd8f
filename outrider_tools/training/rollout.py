"""A draft model over one known text: once with the target's features, and then ahead of them from many roots at once.

Row b of the text is what the draft model runs at position b: token b, or for a head token b + 1 with the feature of
position b. A root is a token of the text; its row and the rows of its tree see the rows before it, and their own path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.attention.base import TokenBatch
from outrider.models.drafters.base import DraftModel
from outrider_tools.training.rollout_attention import BranchAttention, BranchBatch, TextAttention

# Logits that are in memory at a time.
CHUNK_LOGITS = 2**27


class TextDraft:
    """See the module.

    Attributes:
        token_ids: int64 [T].
        offset: 1 for a head, whose first row is that of token 1; else 0.
    """

    @torch.inference_mode()
    def __init__(self, model: DraftModel, token_ids: Tensor, features: Tensor | None) -> None:
        """`features` [T, layers * hidden] of the target, None for a model without them."""
        self.model = model
        self.token_ids = token_ids
        self.offset = 0 if features is None else 1
        self.features = None if features is None else model.project(features)
        self.attention = TextAttention()
        tokens = token_ids[self.offset :]
        batch = TokenBatch(tokens, torch.arange(tokens.shape[0], device=tokens.device))
        before = None if self.features is None else self.features[:-1]
        # Nothing is written to the cache, which tells its heads and dtype alone.
        self.rows, self.child_features = model.forward(batch, before, model.new_kv(1), self.attention)
        """What `logits` takes, and what children take as features, of every row of the text."""

    def following(self, places: Tensor) -> Tensor:
        """The text's tokens at `places`, -1 behind its end."""
        last = self.token_ids.shape[0] - 1
        return torch.where(places <= last, self.token_ids[places.clamp(max=last)], -1)

    def logits(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """float32 logits of `rows`, some at a time, with their places."""
        size = max(1, CHUNK_LOGITS // self.model.vocab_size)
        for start in range(0, rows.shape[0], size):
            place = slice(start, min(start + size, rows.shape[0]))
            yield place, self.model.logits(rows[place])


class Branches:
    """What a draft model computes below some roots of a text, a level of nodes at a time."""

    def __init__(self, draft: TextDraft, roots: Tensor) -> None:
        """`roots` int64 [R], places in the text, at least `draft.offset`."""
        self._draft = draft
        self._bases = roots - draft.offset
        self._attention = BranchAttention(draft.attention)
        self._depth = 0

    @property
    def root_features(self) -> Tensor | None:
        """[R, feature_size], what the roots themselves are run with."""
        return None if self._draft.features is None else self._draft.features[self._bases]

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, owners: Tensor, features: Tensor | None, parents: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run N nodes of the next depth; the first call runs the roots.

        Args:
            tokens: int64 [N].
            owners: int64 [N], which of the roots each belongs to.
            features: [N, feature_size], of each node's parent.
            parents: int64 [N], place of each node's parent in the call before; not read in the first.

        Returns:
            rows for `logits`, and features for the nodes' children.
        """
        bases = self._bases[owners]
        batch = BranchBatch(tokens, bases + self._depth, bases, parents)
        self._depth += 1
        return self._draft.model.forward(batch, features, self._draft.model.new_kv(1), self._attention)
