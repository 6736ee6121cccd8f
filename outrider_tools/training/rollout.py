"""A draft model over one known text: with the target's features, and ahead of them from many roots at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import gumbel as device_gumbel
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.attention.torch_backend import HeadSplit
from outrider.cache.kv import KVCache
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.drafters.base import DraftModel, required
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.noise import gumbel
from outrider_tools.training.attention import SpanAttention, Spans, check_plain
from outrider_tools.training.options import TreeShape


class CandidateRanker:
    """Edge scores of one answer's candidates, as `HostProposer` and `Proposer` compute them for one node at a time.

    A token's noise depends only on its position, so it is computed once for all nodes of all trees.
    """

    def __init__(self, model: DraftModel, temperature: float, seed: int, num_positions: int) -> None:
        """`num_positions` bounds the positions of candidates. The noise is drawn with `seed` and choice 0."""
        self._divisor, self._tau, noisy = model.edge_scale.columns(temperature, True)
        ids = torch.arange(model.vocab_size, device=model.device) if model.target_ids is None else model.target_ids
        self._target_ids = ids.long()
        self._whole = model.target_ids is None
        self._noise = self._draw(seed, num_positions) if noisy else None

    def edges(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return scores <= 0, float32 [N, V]. May overwrite `logits` [N, V]; `positions` [N] are the candidates'."""
        logits = logits.div_(self._divisor)
        if self._noise is not None:
            logits = logits.add_(self._noise[positions]).div_(self._tau)
        return logits.log_softmax(-1)

    def best(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the target's id of the best candidate, int64 [N]."""
        if self._noise is not None:
            logits = logits.div_(self._divisor).add_(self._noise[positions])
        return self._target_ids[logits.argmax(-1)]

    def target_id(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids, int64 of the same shape."""
        return self._target_ids[draft_ids]

    def _draw(self, seed: int, num_positions: int) -> Tensor:
        """Return the noise, float32 [num_positions, V]."""
        ids = self._target_ids
        if ids.device.type == "cuda":
            positions = torch.arange(num_positions, dtype=torch.int32, device=ids.device)
            keys = noise_keys([seed] * num_positions).to(ids.device)
            if self._whole:
                return device_gumbel(keys, positions, ids.shape[0])
            return device_gumbel(keys, positions, 0, ids.int().expand(num_positions, -1).contiguous())
        wanted = ids.numpy()
        rows = [gumbel(seed, 0, position, wanted) for position in range(num_positions)]
        return torch.from_numpy(np.stack(rows))


def noise_keys(seeds: list[int]) -> Tensor:
    """Return the keys of the device's noise, int32 [N, 3]: low and high word of the seed, and choice 0."""
    words = [[seed & 0xFFFFFFFF, seed >> 32, 0] for seed in seeds]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


# Most logits in memory at a time.
CHUNK_LOGITS = 2**27


class TextRollout:
    """A draft model run over a text with the target's features.

    Attributes:
        token_ids: int64 [T].
        offset: 1 for a head, whose first row is that of token 1; else 0.
    """

    @torch.inference_mode()
    def __init__(self, model: DraftModel, token_ids: Tensor, features: Tensor | None) -> None:
        """`features` are the target's [T, layers * hidden], None for a model without them."""
        self.model = model
        self.token_ids = token_ids
        self.offset = 0 if features is None else 1
        self.features = None if features is None else model.project(features)
        tokens = token_ids[self.offset :]
        spans = Spans.whole(tokens.shape[0], tokens.device)
        self.attention = SpanAttention(spans, keep=True)
        batch = TokenBatch(tokens, spans.positions)
        before = None if self.features is None else self.features[:-1]
        if isinstance(model, BlockHead) and before is not None:
            # The context is made of features alone, and rows come from blocks.
            k, v = model.context(before, spans.positions)
            self.attention.kept = dict(enumerate(zip(k, v, strict=True)))
            self.rows = before
            return
        # Nothing is written to the cache; it only gives heads and dtype.
        self.rows, _ = model.forward(batch, before, model.new_kv(1), self.attention)
        """Input of `logits`, for every row of the text."""

    def following(self, places: Tensor) -> Tensor:
        """Return the text's tokens at `places`, -1 beyond its end."""
        last = self.token_ids.shape[0] - 1
        return torch.where(places <= last, self.token_ids[places.clamp(max=last)], -1)

    def is_over(self, rows: Tensor) -> Tensor:
        """Return for which rows no guesses are made, bool [N]."""
        if isinstance(self.model, BlockHead):
            return ~rows.any(1)
        return torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)

    def logits(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield float32 logits of `rows`, some at a time, with their places."""
        size = max(1, CHUNK_LOGITS // self.model.vocab_size)
        for start in range(0, rows.shape[0], size):
            place = slice(start, min(start + size, rows.shape[0]))
            yield place, self.model.logits(rows[place])


class NodeRollout(AttentionBackend, AttentionPlan):
    """Runs a draft model below some roots of a text, one level of nodes at a time.

    Also the model's attention: a node attends to the text before its root, and to the path from the root to itself.
    """

    def __init__(self, draft: TextRollout, roots: Tensor) -> None:
        """`roots` int64 [R] are places in the text, at least `draft.offset`."""
        self._draft = draft
        self._bases = roots - draft.offset
        self._depth = 0
        self._block_size = 0
        self._blocks = roots.new_empty(0)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        """Each layer's keys and values of the last nodes and their ancestors, [N, kv_heads, depth, head_dim]."""

    @property
    def root_features(self) -> Tensor | None:
        """Features that the roots themselves are run with, [R, feature_size]."""
        return None if self._draft.features is None else self._draft.features[self._bases]

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, owners: Tensor, features: Tensor | None, parents: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run N nodes of the next depth; the first call runs the roots.

        Args:
            tokens: int64 [N].
            owners: int64 [N], the root that each node belongs to.
            features: [N, feature_size], of each node's parent; below a block head's root [N, state_size], the parent's
                state.
            parents: int64 [N], index of each node's parent in the previous call; ignored in the first call.

        Returns rows for `logits`, and features for the nodes' children.
        """
        model, bases = self._draft.model, self._bases[owners]
        if isinstance(model, BlockHead):
            if not self._depth:
                self._blocks = self._run_blocks(model, tokens, bases)
                features = self._blocks.new_zeros(tokens.shape[0], model.state_size)
            place, self._depth = self._depth, self._depth + 1
            if place < model.block.num_guesses:
                return model.advance(tokens, self._blocks[owners, place], required(features))
            return self._blocks.new_zeros(tokens.shape[0], self._blocks.shape[2]), features
        batch = TokenBatch(tokens, bases + self._depth)
        self._parents = parents
        self._masked = torch.arange(self._draft.rows.shape[0], device=bases.device) >= bases.unsqueeze(1)
        self._depth += 1
        return model.forward(batch, features, model.new_kv(1), self)

    def _run_blocks(self, model: BlockHead, tokens: Tensor, bases: Tensor) -> Tensor:
        """Return rows for the guesses of R roots' blocks [R, num_guesses, hidden]. Each block sees the text's features
        up to its root's."""
        size = model.block.size
        seen = torch.arange(self._draft.rows.shape[0], device=bases.device) <= bases.unsqueeze(1)
        self._masked = (~seen).repeat_interleave(size, 0)
        self._block_size = size
        batch = TokenBatch(*model.block_tokens(tokens, bases + 1))
        rows = model.forward_blocks(batch, model.new_kv(1), self)
        return rows.view(tokens.shape[0], model.block.num_guesses, -1)

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        self._split = HeadSplit(batch, kv, num_heads, rotary)
        return self

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        """See AttentionPlan."""
        check_plain(rules)
        q, k, v = self._split(heads, qk_norm)
        text_k, text_v = self._draft.attention.kept[layer]
        own_k, own_v = self._extend(layer, k, v)
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        scale = q.shape[-1] ** -0.5
        text = torch.einsum("nkgd,tkd->nkgt", q, text_k).float() * scale
        text = text.masked_fill_(self._masked[:, None, None], float("-inf"))
        own = torch.einsum("nkgd,nkjd->nkgj", q, own_k).float() * scale
        weights = torch.cat([text, own], -1).softmax(-1).to(v.dtype)
        text, own = weights.split((text.shape[-1], own.shape[-1]), -1)
        found = torch.einsum("nkgt,tkd->nkgd", text, text_v) + torch.einsum("nkgj,nkjd->nkgd", own, own_v)
        return found.flatten(1)

    def _extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the nodes' own keys and values to their parents'. In a block, return those of all its places."""
        if self._block_size:
            blocks = (part.unflatten(0, (-1, self._block_size)).transpose(1, 2) for part in (k, v))
            k, v = (part.repeat_interleave(self._block_size, 0) for part in blocks)
            return k, v
        before = self._own.get(layer)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        if before is not None:
            k, v = (torch.cat([old[self._parents], new], 2) for old, new in zip(before, (k, v), strict=True))
        self._own[layer] = (k, v)
        return k, v


# Most roots that are grown at a time.
CHUNK_ROOTS = 128


@dataclass(slots=True)
class _Level:
    """Nodes of one depth: R roots, W places each. Empty places have score -inf."""

    tokens: Tensor
    scores: Tensor
    on_text: Tensor
    parents: Tensor
    """int64 [R, W], index of the parent among the nodes that were run last."""


@torch.inference_mode()
def tree_accepts(
    draft: TextRollout, ranking: CandidateRanker, shape: TreeShape, first_root: int = 1, all_roots: bool = True
) -> Tensor:
    """Return the number of accepted nodes after each root from `first_root` on, int64 [T]; 0 for earlier ones.

    Without `all_roots`, only roots that decoding from `first_root` visits are run, one after the other: less work in
    all, and less at a time.

    A root's tree has the `shape.nodes` nodes with the best path scores, found level by level: scores only fall along a
    path, so a node that is not among the best so far cannot be in the end, and is not run.
    """
    token_ids = draft.token_ids
    accepted = torch.zeros_like(token_ids)
    if not all_roots:
        root = max(draft.offset, first_root)
        while root < token_ids.shape[0] - 1:
            accepted[root] = _grow(draft, ranking, torch.tensor([root], device=token_ids.device), shape)[0]
            root += int(accepted[root]) + 1
        return accepted
    for start in range(max(draft.offset, first_root), token_ids.shape[0] - 1, CHUNK_ROOTS):
        roots = torch.arange(start, min(start + CHUNK_ROOTS, token_ids.shape[0] - 1), device=token_ids.device)
        accepted[roots] = _grow(draft, ranking, roots, shape)
    return accepted


def _grow(draft: TextRollout, ranking: CandidateRanker, roots: Tensor, shape: TreeShape) -> Tensor:
    """Return the accepted nodes [R] of the trees of some roots."""
    num_roots = roots.shape[0]
    # The root itself is level 0: a single node that always exists, run with the feature of its own row.
    level = _Level(
        draft.token_ids[roots].unsqueeze(1),
        torch.zeros(num_roots, 1, device=roots.device),
        torch.ones(num_roots, 1, dtype=torch.bool, device=roots.device),
        torch.arange(num_roots, device=roots.device).unsqueeze(1),
    )
    branches = NodeRollout(draft, roots)
    features = branches.root_features
    scores = torch.empty(num_roots, 0, device=roots.device)
    on_text = torch.empty(num_roots, 0, dtype=torch.bool, device=roots.device)
    chosen = on_text
    for depth in range(shape.depth):
        places = level.scores.isfinite().flatten().nonzero()[:, 0]
        if not places.numel():
            break
        owners, parents = places // level.scores.shape[1], level.parents.flatten()[places]
        before = None if features is None else features[parents]
        rows, features = branches.run(level.tokens.flatten()[places], owners, before, parents)
        edges, ids = _candidates(draft, ranking, rows, roots[owners] + depth + 1, shape.branching)
        level = _children(level, places, edges, ids, draft.following(roots + depth + 1), shape.nodes)
        scores, on_text = torch.cat([scores, level.scores], 1), torch.cat([on_text, level.on_text], 1)
        best = scores.topk(min(shape.nodes, scores.shape[1]), 1)
        chosen = on_text.gather(1, best.indices) & best.values.isfinite()
        # Nodes that are no longer among the best are not run.
        level.scores = torch.where(level.scores >= best.values[:, -1:], level.scores, float("-inf"))
    return chosen.sum(1)


def _candidates(
    draft: TextRollout, ranking: CandidateRanker, rows: Tensor, positions: Tensor, branching: int
) -> tuple[Tensor, Tensor]:
    """Return edge scores and target ids of the best children of N nodes, [N, branching] both."""
    edges, ids = [], []
    for place, logits in draft.logits(rows):
        found = ranking.edges(logits, positions[place]).topk(min(branching, logits.shape[1]), 1)
        edges.append(found.values.masked_fill_(draft.is_over(rows[place]).unsqueeze(1), float("-inf")))
        ids.append(ranking.target_id(found.indices))
    return torch.cat(edges), torch.cat(ids)


def _children(level: _Level, places: Tensor, edges: Tensor, ids: Tensor, following: Tensor, most: int) -> _Level:
    """Return the next level: the best `most` children of all nodes of a level. Those at `places` were run."""
    num_roots, width = level.scores.shape
    count = edges.shape[1]
    all_edges = torch.full((num_roots * width, count), float("-inf"), device=edges.device)
    all_ids = torch.full((num_roots * width, count), -1, device=edges.device)
    runs = torch.zeros(num_roots * width, dtype=torch.int64, device=edges.device)
    all_edges[places], all_ids[places] = edges, ids
    runs[places] = torch.arange(places.shape[0], device=edges.device)
    scores = (level.scores.unsqueeze(2) + all_edges.view(num_roots, width, count)).flatten(1)
    best = scores.topk(min(most, scores.shape[1]), 1)
    parents = best.indices // count
    tokens = all_ids.view(num_roots, -1).gather(1, best.indices)
    on_text = level.on_text.gather(1, parents) & (tokens == following.unsqueeze(1)) & best.values.isfinite()
    return _Level(tokens, best.values, on_text, runs.view(num_roots, width).gather(1, parents))
