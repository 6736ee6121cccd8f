"""Runs bursts with plain torch operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import exp, inf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionPlan,
    ForwardBatch,
    LayerRules,
    Segment,
    TokenBatch,
)
from outrider.attention.prompts import PromptChunk
from outrider.attention.torch_backend import HeadSplit, folded_attention
from outrider.cache.kv import KVCache
from outrider.drafting.model.burst import FORCED, Burst, BurstResult, BurstShape
from outrider.drafting.model.runner import BurstRunner, PendingBurst, RunnerOptions, on_device
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.block import BlockHead
from outrider.sampling.proposer import HostProposer


class TorchRunner(BurstRunner):
    """See BurstRunner. A burst runs when it is waited for, or when something changes that it depends on.

    Steps have few nodes, so that the host's work counts as much as the model's: nodes are chosen in plain Python, and
    keys and values that they attend to are gathered once a burst.
    """

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        self._masks = [[0] * shape.region for _ in range(shape.num_rows)]
        self._injected = [0] * shape.num_rows  # tree slots with KV of the target's features, as bits; of a block head
        self._interrupted: Callable[[], bool] = _never

    def run_until(self, interrupted: Callable[[], bool]) -> None:
        """See BurstRunner."""
        self._interrupted = interrupted
        try:
            self._run_launched()
        finally:
            self._interrupted = _never

    def finish(self, pending: PendingBurst) -> BurstResult:
        """See BurstRunner."""
        result = super().finish(pending)
        result.cut = pending.cut
        return result

    @on_device
    def _run_launched(self) -> None:
        for pending in self._launched:
            if not pending.ran:
                try:
                    self._run(pending)
                except Exception as error:
                    # Raised by `finish`, not by the call that happens to run the burst.
                    pending.error = error

    def _make_proposer(self) -> HostProposer:
        model, options = self._model, self.options
        sizes = (self.shape.num_rows, model.vocab_size, model.target_vocab_size)
        return HostProposer(*sizes, model.target_ids, options.rank_by_noise, model.edge_scale)

    def _queue(self, pending: PendingBurst) -> None:
        """Left to `_run_launched`, so that the host can first send what the burst before brought."""

    def _run(self, pending: PendingBurst) -> None:
        """Run the steps of a burst, and write their results where `finish` reads them."""
        pending.ran = True
        burst, width, branching = pending.burst, pending.bucket.width, pending.bucket.branching
        self.memory.flush()
        self.memory.take_features(burst.features)
        lines = self._output.host_steps(pending.copy, pending.bucket, burst.num_steps)
        lines[:, : (2 + branching) * width] = -1
        lines[:, (2 + branching) * width :].view(np.float32)[:] = -np.inf
        frontier = HostFrontier(burst, width, self._masks, (self.shape.max_seeds, branching), self.shape.lag)
        head = self._model if isinstance(self._model, BlockHead) else None
        attention = None if head is not None else self._region_attention(burst)
        ends = burst.rows.live.shape[1] - burst.rows.live[:, ::-1].argmax(1)
        used = np.where(burst.rows.live.any(1), ends, 0).tolist()
        for number, line in enumerate(lines):
            if number and burst.min_chance and frontier.chance < burst.min_chance:
                break
            pending.cut = pending.cut or (number > 0 and self._interrupted())
            nodes = [] if pending.cut else frontier.take()
            if not nodes:
                break
            if head is not None:
                logits = self._run_block(head, burst, frontier, nodes)
            elif attention is not None:
                logits = self._model.logits(self._run_nodes(burst, frontier, nodes, used, attention))
            tokens, scores = self._propose_for(burst, nodes, logits, branching)
            count, found = len(nodes), tokens.numpy()
            frontier.add(nodes, number * width, found.tolist(), scores.tolist())
            line[:count] = [node.place for node in nodes]
            line[width : width + count] = [node.slot for node in nodes]
            size = count * branching
            line[2 * width : 2 * width + size] = found.reshape(-1)
            line[(2 + branching) * width :].view(np.float32)[:size] = scores.numpy().reshape(-1)

    def _run_nodes(
        self, burst: Burst, frontier: HostFrontier, nodes: list[StepNode], used: list[int], attention: AttentionBackend
    ) -> Tensor:
        """Run nodes; returns rows for `logits`."""
        region, lag, rows = self.shape.region, self.shape.lag, burst.rows.rows
        for node in nodes:
            used[node.row] = max(used[node.row], node.slot + 1)
        table_rows = [int(rows[node.row]) for node in nodes]
        batch = StepBatch(
            token_ids=torch.tensor([node.token for node in nodes]),
            positions=torch.tensor([max(node.position - lag, 0) for node in nodes]),
            kv_slots=self._kv_slots(table_rows, nodes),
            rows=self._row_steps(burst, frontier, nodes, used),
        )
        store, given = self.memory.features, None
        zero_row = (self.shape.num_rows + 1) * region
        if store is not None:
            sources = [
                zero_row + 1 + node.feature
                if node.feature >= 0
                else row * region + node.parent
                if node.parent >= 0
                else zero_row
                for row, node in zip(table_rows, nodes, strict=True)
            ]
            given = store.index_select(0, torch.tensor(sources))
        hidden, features = self._model.forward(batch, given, self.memory.kv, attention)
        if store is not None and features is not None:
            targets = [row * region + node.slot for row, node in zip(table_rows, nodes, strict=True)]
            store.index_copy_(0, torch.tensor(targets), features)
        return hidden

    def _run_block(self, head: BlockHead, burst: Burst, frontier: HostFrontier, nodes: list[StepNode]) -> Tensor:
        """Inject features that came, run the blocks of roots among their tokens, and read what blocks say of all nodes.

        Returns logits [M, vocab_size], -inf where there are no guesses.
        """
        region, store = self.shape.region, self.memory.features
        if store is None:
            raise ValueError("a block head needs features")
        rows = [int(burst.rows.rows[node.row]) for node in nodes]
        tokens = torch.tensor([node.token for node in nodes])
        zero_row = (self.shape.num_rows + 1) * region
        sources = [
            row * region + node.parent if node.parent >= 0 else zero_row for row, node in zip(rows, nodes, strict=True)
        ]
        for row, node in zip(rows, nodes, strict=True):
            self._injected[row] &= ~(1 << node.slot)
        fresh = [place for place, node in enumerate(nodes) if node.feature >= 0]
        if fresh:
            found = [nodes[place] for place in fresh]
            given = store.index_select(0, torch.tensor([zero_row + 1 + node.feature for node in found]))
            positions = torch.tensor([node.position - self.shape.lag for node in found])
            slots = self._kv_slots([rows[place] for place in fresh], found)
            batch = TokenBatch(tokens[fresh], positions)
            head.extend(batch, given[:, : self.shape.feature_size], slots, self.memory.kv, self._attention)
            for place in fresh:
                self._injected[rows[place]] |= 1 << nodes[place].slot
            # Candidates of other tokens than a root do not count.
            roots = [place for place in fresh if nodes[place].base > -inf]
            if roots:
                segments = [
                    self._block_segment(head, burst, nodes[place], rows[place], frontier.mask(nodes[place]))
                    for place in roots
                ]
                begins = torch.tensor([nodes[place].position for place in roots])
                batch = ForwardBatch(*head.block_tokens(tokens[roots], begins), segments)
                where = torch.tensor([rows[place] for place in roots])
                found_rows = head.forward_blocks(batch, self.memory.kv, self._attention)
                head.keep_blocks(self.memory.room_for_blocks, where, begins, found_rows)
        positions, size = torch.tensor([node.position for node in nodes]), head.state_size
        given = store[:, :size].index_select(0, torch.tensor(sources))
        logits, left = head.read_blocks(self.memory.room_for_blocks, torch.tensor(rows), tokens, positions, given)
        targets = [row * region + node.slot for row, node in zip(rows, nodes, strict=True)]
        store[:, :size].index_copy_(0, torch.tensor(targets), left)
        return logits

    def _block_segment(self, head: BlockHead, burst: Burst, node: StepNode, row: int, seen: int) -> Segment:
        """What a root's block sees: of the context the checkpoint's window, the tree slots of tokens behind it that
        have KV of features, and itself in the row's scratch."""
        size, start = head.block.size, self.memory.region_start(row)
        seen &= self._injected[row]
        tree = [start + slot for slot in range(self.shape.region) if seen >> slot & 1]
        length = int(burst.rows.context_lens[node.row])
        kept = self.memory.context_slots(row, 0, length)
        if head.block.window:
            kept = kept[max(length - max(head.block.window - len(tree), 0), 0) :]
        scratch = range(start + self.shape.region, start + self.shape.region + size)
        slots = torch.from_numpy(np.concatenate((kept, [*tree, *scratch])).astype(np.int64))
        return Segment(size, slots, torch.ones(size, size, dtype=torch.bool))

    def _kv_slots(self, rows: list[int], nodes: list[StepNode]) -> Tensor:
        starts = zip(rows, nodes, strict=True)
        return torch.tensor([self.memory.region_start(row) + node.slot for row, node in starts])

    def _propose_for(
        self, burst: Burst, nodes: list[StepNode], logits: Tensor, branching: int
    ) -> tuple[Tensor, Tensor]:
        """Candidates of nodes int32 [M, k] and edge scores float32 [M, k]."""
        tokens = torch.empty(len(nodes), branching, dtype=torch.int32)
        scores = torch.empty(len(nodes), branching)
        rows = torch.tensor([int(burst.rows.rows[node.row]) for node in nodes])
        positions = torch.tensor([node.position for node in nodes])
        self._proposer(logits, rows, positions, tokens, scores)
        return tokens, scores.masked_fill_(scores > 0, -torch.inf)

    def _row_steps(
        self, burst: Burst, frontier: HostFrontier, nodes: list[StepNode], used: list[int]
    ) -> list[RowSteps]:
        seen = torch.from_numpy(frontier.sees(nodes, self.shape.region))
        bounds = [index for index, node in enumerate(nodes) if not index or nodes[index - 1].row != node.row]
        steps = []
        for first, end in zip(bounds, [*bounds[1:], len(nodes)], strict=True):
            row = nodes[first].row
            length, count = int(burst.rows.context_lens[row]), end - first
            mask = torch.zeros(count, length + used[row], dtype=self._model.dtype)
            mask[:, length:].masked_fill_(~seen[first:end, : used[row]], -torch.inf)
            steps.append(RowSteps(row, count, torch.tensor([node.slot for node in nodes[first:end]]), mask))
        return steps

    def _region_attention(self, burst: Burst) -> RegionAttention:
        rows, memory = burst.rows.rows.tolist(), self.memory
        lengths = burst.rows.context_lens.tolist()
        contexts = [
            torch.from_numpy(memory.context_slots(row, 0, length).astype(np.int64))
            for row, length in zip(rows, lengths, strict=True)
        ]
        starts = [memory.region_start(row) for row in rows]
        return RegionAttention(memory.kv, contexts, [slice(start, start + self.shape.region) for start in starts])

    def _run_context(self, chunks: Sequence[PromptChunk], features: Tensor | None) -> None:
        segments = []
        positions: list[int] = []
        for row, tokens, start, _, offset in chunks:
            slots = self.memory.context_slots(row, 0, start + len(tokens))
            segments.append(Segment(len(tokens), torch.from_numpy(slots.astype(np.int64))))
            positions += range(start + offset, start + offset + len(tokens))
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        batch = ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), segments)
        own = torch.cat([segment.kv_slots[-segment.num_queries :] for segment in segments])
        self._model.extend(batch, features, own, self.memory.kv, self._attention)


def _never() -> bool:
    return False


_Entry = tuple[float, int, int, int, int, int, int, int, float]
"""Minus the score, pool index, row of the burst, parent's slot, token, position, slot or -1, feature or -1, base."""


class StepNode(NamedTuple):
    """A node of a step on a CPU."""

    place: int
    """Index in the pool."""
    row: int
    """Of the burst."""
    parent: int
    """Tree slot; -1 where all before the token is context."""
    token: int
    position: int
    slot: int
    feature: int
    """Row of the given features; -1 for what the parent's step returned."""
    base: float
    """Path score from which its candidates count."""


class HostFrontier:
    """The pool of one burst.

    `masks[row][slot]`, by row of the runner, are the tree slots that the node in a slot sees, itself included, as bits
    of an integer. They outlive the burst.
    """

    def __init__(self, burst: Burst, width: int, masks: list[list[int]], pool: tuple[int, int], lag: int) -> None:
        """`width`: nodes of a step. `pool`: index of the first candidate, and candidates of a node."""
        self._masks = masks
        self._rows = burst.rows.rows.tolist()
        self._floor, self._lag = burst.floor, lag
        self._width = width
        self._first, self.branching = pool
        self._free = [
            burst.rows.free[row, start:end].tolist()[::-1]
            for row, (start, end) in enumerate(zip(burst.rows.free_starts, burst.rows.free_ends, strict=True))
        ]
        for row, live in zip(self._rows, burst.rows.live, strict=True):
            bits = int.from_bytes(np.packbits(live, bitorder="little").tobytes(), "little")
            masks[row] = [mask & bits for mask in masks[row]]
        fields = burst.seeds.fields[:6].T.tolist()
        scores, bases = burst.seeds.fields[6:].view(np.float32).tolist()
        self._heap: list[_Entry] = [
            (-score, index, *seed, base)
            for index, (seed, score, base) in enumerate(zip(fields, scores, bases, strict=True))
        ]
        heapify(self._heap)

    def take(self) -> list[StepNode]:
        """The nodes of the next step, row by row, parents before children; they are in the pool no more."""
        heap = self._heap
        later: list[_Entry] = []
        taken: list[StepNode] = []
        own: set[tuple[int, int]] = set()
        late: set[tuple[int, int]] = set()
        while heap and len(taken) + len(later) < self._width and -heap[0][0] >= self._floor:
            entry = heappop(heap)
            _, index, row, parent, token, position, slot, feature, base = entry
            if (row, parent) in late or (self._lag and feature < 0 and (row, parent) in own):
                # It needs its parent's feature, which this step computes.
                if slot >= 0:
                    late.add((row, slot))
                later.append(entry)
                continue
            if slot < 0:
                if not self._free[row]:
                    continue
                slot = self._free[row].pop()
            own.add((row, slot))
            masks = self._masks[self._rows[row]]
            masks[slot] = (masks[parent] if parent >= 0 else 0) | 1 << slot
            taken.append(StepNode(index, row, parent, token, position, slot, feature, base))
        for entry in later:
            heappush(heap, entry)
        taken.sort(key=lambda node: node.row)
        return taken

    def add(self, nodes: list[StepNode], place: int, tokens: list[list[int]], edges: list[list[float]]) -> None:
        """Add candidates of nodes; `place`: nodes of the steps before, padding included."""
        for number, (node, children, scores) in enumerate(zip(nodes, tokens, edges, strict=True)):
            index = self._first + (place + number) * self.branching
            for child, (token, edge) in enumerate(zip(children, scores, strict=True)):
                score = node.base + edge
                if token >= 0 and score >= self._floor and score > -inf:
                    entry = (-score, index + child, node.row, node.slot, token, node.position + 1, -1, -1, score)
                    heappush(self._heap, entry)

    def mask(self, node: StepNode) -> int:
        """Which tree slots a node sees, as bits."""
        mask: int = self._masks[self._rows[node.row]][node.slot]
        return mask

    def sees(self, nodes: list[StepNode], region: int) -> NDArray[np.bool_]:
        """Which tree slots each node sees, bool [M, region]."""
        data = b"".join(self.mask(node).to_bytes(region // 8, "little") for node in nodes)
        bits = np.frombuffer(data, np.uint8).reshape(len(nodes), -1)
        return np.unpackbits(bits, axis=1, bitorder="little").astype(np.bool_)

    @property
    def chance(self) -> float:
        """Sum of the chances of the nodes that the next step would take; infinite while one must be run."""
        best = sorted(self._heap)[: self._width]
        if best and -best[0][0] >= FORCED:
            return inf
        return sum(exp(-entry[0]) for entry in best)


@dataclass(slots=True)
class RowSteps:
    """A request of a step.

    Attributes:
        row: of the burst.
        num_nodes: of the step.
        slots: int64 [num_nodes], their tree slots.
        mask: [num_nodes, context_len + slots up to the last one in use], 0 where a node sees, else -inf.
    """

    row: int
    num_nodes: int
    slots: Tensor
    mask: Tensor


@dataclass(slots=True)
class StepBatch(TokenBatch):
    """Nodes of a step, row by row; `kv_slots` int64 [M] is where their keys and values go."""

    kv_slots: Tensor
    rows: Sequence[RowSteps]


class RegionAttention(AttentionBackend):
    """Attention of draft steps on a CPU: keys and values of a burst's requests lie side by side, context first.

    What nodes write goes to the cache, too.
    """

    def __init__(self, kv: KVCache, contexts: Sequence[Tensor], regions: Sequence[slice]) -> None:
        """For each request of the burst: KV slots of its context int64 [L], and of its tree region."""
        self._lengths = [len(context) for context in contexts]
        self._held = [
            [_gather(kv, layer, context, region) for layer in range(len(kv.k_layers))]
            for context, region in zip(contexts, regions, strict=True)
        ]

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend. Raises TypeError for another batch than a step's."""
        if not isinstance(batch, StepBatch):
            raise TypeError(f"{type(batch).__name__} is no step of a burst")
        split = HeadSplit(batch, kv, num_heads, rotary)
        return _RegionPlan(batch, kv, split, num_heads // kv.k.shape[2], self._held, self._lengths)


class _RegionPlan(AttentionPlan):
    def __init__(
        self,
        batch: StepBatch,
        kv: KVCache,
        split: HeadSplit,
        per_kv_head: int,
        held: Sequence[Sequence[tuple[Tensor, Tensor]]],
        lengths: Sequence[int],
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._split = split
        self._held = held
        self._lengths = lengths
        self._places = [part.slots + lengths[part.row] for part in batch.rows]
        self._masks = [part.mask.repeat(per_kv_head, 1) for part in batch.rows]

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        q, k, v = self._split(heads, qk_norm, rules.rotary)
        self._kv.write(layer, self._batch.kv_slots, k, v)
        outputs, first = [], 0
        for part, places, mask in zip(self._batch.rows, self._places, self._masks, strict=True):
            end = first + part.num_nodes
            keys, values = self._held[part.row][layer]
            keys.index_copy_(1, places, k[first:end].transpose(0, 1))
            values.index_copy_(1, places, v[first:end].transpose(0, 1))
            seen_keys, seen_values = (held[:, : mask.shape[1]].unsqueeze(0) for held in (keys, values))
            if rules.scores.window:
                mask = _within(mask, self._batch.positions[first:end], self._lengths[part.row], rules.scores.window)
            outputs.append(folded_attention(q[first:end], seen_keys, seen_values, mask, rules))
            first = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _within(mask: Tensor, positions: Tensor, length: int, window: int) -> Tensor:
    """The mask of a row with what the window hides of its context of `length`; all of its tree counts as near."""
    far = torch.arange(length, device=mask.device) <= positions.unsqueeze(1) - window
    mask = mask.clone()
    mask[:, :length].masked_fill_(far.repeat(len(mask) // len(far), 1), float("-inf"))
    return mask


def _gather(kv: KVCache, layer: int, context: Tensor, region: slice) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, each [K, L + region, D]."""
    caches = (kv.k_layers[layer], kv.v_layers[layer])
    keys, values = (
        torch.cat((cache.index_select(0, context), cache[region])).transpose(0, 1).contiguous() for cache in caches
    )
    return keys, values
