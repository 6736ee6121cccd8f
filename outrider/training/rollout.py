"""A draft model over one known text: once with the target's features, and then ahead of them from many roots at once.

Row b of the text is what the draft model runs at position b: token b, or for a head token b + 1 with the feature of
position b. A root is a token of the text; its row and the rows of its tree see the rows before it, and their own path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary, rotate
from outrider.models.drafters.base import DraftModel

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
        self.attention = _TextAttention()
        tokens = token_ids[self.offset :]
        batch = TokenBatch(tokens, torch.arange(tokens.shape[0], device=tokens.device))
        before = None if self.features is None else self.features[:-1]
        # Nothing is written to the cache, which tells its dtype alone.
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
        self._attention = _BranchAttention(draft.attention)
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
        batch = _BranchBatch(tokens, bases + self._depth, bases, parents)
        self._depth += 1
        return self._draft.model.forward(batch, features, self._draft.model.new_kv(1), self._attention)


class _TextAttention(AttentionBackend):
    """Causal attention over the text. Keeps keys and values of all layers, each [T, kv_heads, head_dim]."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        return _TextPlan(self, num_heads, rotary.angles(batch.positions, kv.k.dtype))


class _Plan(AttentionPlan):
    def __init__(self, num_heads: int, angles: tuple[Tensor, Tensor]) -> None:
        self._num_heads = num_heads
        self._angles = angles

    def _split(self, heads: Tensor, qk_norm: RMSNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v."""
        num_kv_heads = (heads.shape[1] - self._num_heads) // 2
        qk, v = heads.split((self._num_heads + num_kv_heads, num_kv_heads), 1)
        if qk_norm is not None:
            qk = qk_norm(qk)
        q, k = rotate(qk, *self._angles).split((self._num_heads, num_kv_heads), 1)
        return q, k, v


class _TextPlan(_Plan):
    def __init__(self, backend: _TextAttention, num_heads: int, angles: tuple[Tensor, Tensor]) -> None:
        super().__init__(num_heads, angles)
        self._backend = backend

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        self._backend.kept[layer] = (k.contiguous(), v.contiguous())
        q, k, v = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return output[0].transpose(0, 1).reshape(heads.shape[0], -1)


@dataclass(slots=True)
class _BranchBatch(TokenBatch):
    """`bases` int64 [N], how many rows of the text each node sees; `parents` as in `Branches.run`."""

    bases: Tensor
    parents: Tensor


class _BranchAttention(AttentionBackend):
    """Attention of nodes to the text before their root, and to the path from there to them."""

    def __init__(self, text: _TextAttention) -> None:
        self.text = text
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        """Of each layer, keys and values of the last nodes and those above them, [N, kv_heads, depth, head_dim]."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, _BranchBatch):
            raise ValueError("nodes below a text's roots need a batch that says where they stand")
        return _BranchPlan(self, batch, num_heads, rotary.angles(batch.positions, kv.k.dtype))


class _BranchPlan(_Plan):
    def __init__(
        self, backend: _BranchAttention, batch: _BranchBatch, num_heads: int, angles: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__(num_heads, angles)
        self._backend = backend
        self._batch = batch
        length = backend.text.kept[0][0].shape[0]
        self._hidden = torch.arange(length, device=batch.bases.device) >= batch.bases.unsqueeze(1)

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        text_k, text_v = self._backend.text.kept[layer]
        own_k, own_v = self._extend(layer, k, v)
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        scale = q.shape[-1] ** -0.5
        text = torch.einsum("nkgd,tkd->nkgt", q, text_k).float() * scale
        text = text.masked_fill_(self._hidden[:, None, None], float("-inf"))
        own = torch.einsum("nkgd,nkjd->nkgj", q, own_k).float() * scale
        weights = torch.cat([text, own], -1).softmax(-1).to(v.dtype)
        text, own = weights.split((text.shape[-1], own.shape[-1]), -1)
        found = torch.einsum("nkgt,tkd->nkgd", text, text_v) + torch.einsum("nkgj,nkjd->nkgd", own, own_v)
        return found.flatten(1)

    def _extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The nodes' own keys and values behind those of their parents."""
        before = self._backend.own.get(layer)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        if before is not None:
            k, v = (torch.cat([old[self._batch.parents], new], 2) for old, new in zip(before, (k, v), strict=True))
        self._backend.own[layer] = (k, v)
        return k, v
