"""Runs bursts with plain torch operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import exp, inf
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.head_step import Links, Stepped
from kernels.cpu.products import torch_alone
from outrider.attention.base import AttentionBackend, ForwardBatch, Segment, TokenBatch
from outrider.attention.paged import PromptChunk
from outrider.attention.torch_backend import RegionAttention, RowSteps, StepBatch
from outrider.drafting.model.burst import FORCED, Burst, BurstResult, BurstShape
from outrider.drafting.model.runner import BurstRunner, PendingBurst, RunnerOptions
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.proposer import HostProposer


class TorchRunner(BurstRunner):
    """See BurstRunner. A burst runs when someone waits for it, or when something is about to change that it depends on.

    Steps have few nodes, so the host's work counts as much as the model's. Nodes are chosen in plain Python, and the
    keys and values that they attend to are gathered once per burst.
    """

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        sizes = (shape.num_rows, model.vocab_size, model.target_vocab_size)
        self._proposer: HostProposer = HostProposer(*sizes, model.target_ids, options.rank_by_noise, model.edge_scale)
        self._masks = [[0] * shape.region for _ in range(shape.num_rows)]
        self._injected = [0] * shape.num_rows  # for a block head: tree slots with KV of the target's features, as bits
        self._interrupted: Callable[[], bool] = _never
        self._ended_at = -inf
        self._seconds_a_step = self._round_seconds = 0.0
        """Mean times, lately, of a step, and from a burst's end to the next: a round, if verify waits for bursts."""

    def run_until(self, interrupted: Callable[[], bool]) -> None:
        """See BurstRunner."""
        self._interrupted = interrupted
        try:
            self._run_launched()
        finally:
            self._interrupted = _never

    def _run_launched(self) -> None:
        with self.at_work():
            for pending in self._launched:
                if not pending.ran:
                    try:
                        with torch_alone():
                            pending.brought = self._run(pending)
                    except Exception as error:
                        # Raised by `finish`, not by the call that happens to run the burst.
                        pending.error = error

    def _queue(self, pending: PendingBurst) -> None:
        """Leave the burst to `_run_launched`, so that the host can first send the nodes of the burst before."""

    def _read(self, pending: PendingBurst) -> BurstResult:
        if pending.brought is None:
            raise RuntimeError("a burst that has not run")
        return pending.brought

    def _run(self, pending: PendingBurst) -> BurstResult:
        pending.ran = True
        began = perf_counter()
        self._round_seconds = _moving_mean(self._round_seconds, began - self._ended_at)
        least_gain = self._least_gain(pending.burst)
        burst, width, branching = pending.burst, pending.bucket.width, pending.bucket.branching
        self.memory.flush()
        self.memory.take_features(burst.features)
        result = BurstResult.empty(self.shape.max_seeds, burst.num_steps, width, branching)
        frontier = HostFrontier(burst, width, self._masks, (self.shape.max_seeds, branching), self.shape.lag)
        head = self._model if isinstance(self._model, BlockHead) else None
        places = [] if head is not None else self._places(burst)
        attention = RegionAttention(self.memory.kv, places, self.shape.region)
        ends = burst.rows.live.shape[1] - burst.rows.live[:, ::-1].argmax(1)
        used = np.where(burst.rows.live.any(1), ends, 0).tolist()
        num_run = 0
        for number in range(burst.num_steps):
            if number and not step_pays(frontier.chances, burst.min_chance, least_gain):
                break
            pending.cut = pending.cut or (number > 0 and self._interrupted())
            nodes = [] if pending.cut else frontier.take()
            if not nodes:
                break
            rows = [int(burst.rows.rows[node.row]) for node in nodes]
            if head is not None:
                logits = self._run_block(head, burst, frontier, nodes, rows)
                tokens, scores = self._propose_for(nodes, rows, logits, branching)
            else:
                batch = self._step_batch(places, frontier, nodes, rows, used)
                tokens, scores = self._run_nodes(nodes, rows, batch, attention, branching)
            count, found = len(nodes), tokens.numpy()
            frontier.add(nodes, number * width, found.tolist(), scores.tolist())
            result.picked[number, :count] = [node.place for node in nodes]
            result.slots[number, :count] = [node.slot for node in nodes]
            result.tokens[number, :count] = found
            result.scores[number, :count] = scores.numpy()
            num_run = number + 1
        self._ended_at = perf_counter()
        if num_run:
            self._seconds_a_step = _moving_mean(self._seconds_a_step, (self._ended_at - began) / num_run)
        result.cut = pending.cut
        return result

    def _least_gain(self, burst: Burst) -> float:
        """Return the expected accepted tokens that a step must bring if verify waits for the burst: what rounds commit
        in the time of the step and of verifying its nodes."""
        if not burst.min_chance or not self._round_seconds:
            return 0.0
        return min(_STEP_COST * self._seconds_a_step / self._round_seconds, _MOST_GAIN)

    def _run_nodes(
        self, nodes: list[StepNode], rows: list[int], batch: StepBatch, attention: AttentionBackend, branching: int
    ) -> tuple[Tensor, Tensor]:
        """Run nodes of these rows of the runner; returns the same as `_propose_for`."""
        store, kv = self.memory.features, self.memory.kv
        if store is None:
            hidden, _ = self._model.forward(batch, None, kv, attention)
            return self._propose_for(nodes, rows, self._model.logits(hidden), branching)
        first = self.memory.first_given
        taken = [
            first + node.feature if node.feature >= 0 else self._place(row, node.parent)
            for row, node in zip(rows, nodes, strict=True)
        ]
        left = [self._place(row, node.slot) for row, node in zip(rows, nodes, strict=True)]
        links = Links(store, torch.tensor(taken), torch.tensor(left))
        found = self._model.step(batch, links, kv, self._proposer.ranking(rows, branching))
        if found is None:
            given = store.index_select(0, links.taken)
            hidden, features = self._model.forward(batch, given, kv, attention)
            if features is not None:
                store.index_copy_(0, links.left, features)
            found = Stepped(self._model.logits(hidden))
        if found.tokens is None or found.scores is None:
            return self._propose_for(nodes, rows, found.logits, branching)
        return found.tokens, found.scores

    def _place(self, row: int, slot: int) -> int:
        """Return the row of the feature store for a tree slot; the row of zeros for slot -1."""
        return row * self.shape.region + slot if slot >= 0 else self.memory.first_given - 1

    def _run_block(
        self, head: BlockHead, burst: Burst, frontier: HostFrontier, nodes: list[StepNode], rows: list[int]
    ) -> Tensor:
        """Inject features that have come, run the blocks of roots among their tokens, and read the blocks of all nodes.

        Returns logits [M, vocab_size], -inf where there are no guesses.
        """
        store = self.memory.features
        if store is None:
            raise ValueError("a block head needs features")
        tokens = torch.tensor([node.token for node in nodes])
        sources = [self._place(row, node.parent) for row, node in zip(rows, nodes, strict=True)]
        for row, node in zip(rows, nodes, strict=True):
            self._injected[row] &= ~(1 << node.slot)
        fresh = [place for place, node in enumerate(nodes) if node.feature >= 0]
        if fresh:
            found = [nodes[place] for place in fresh]
            given = store.index_select(0, torch.tensor([self.memory.first_given + node.feature for node in found]))
            positions = torch.tensor([node.position - self.shape.lag for node in found])
            slots = self._kv_slots([rows[place] for place in fresh], found)
            batch = TokenBatch(tokens[fresh], positions)
            head.extend(batch, given[:, : self.shape.feature_size], slots, self.memory.kv, self._attention)
            for place in fresh:
                self._injected[rows[place]] |= 1 << nodes[place].slot
            # Only candidates of roots count; other forced tokens have base -inf.
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
        targets = [self._place(row, node.slot) for row, node in zip(rows, nodes, strict=True)]
        store[:, :size].index_copy_(0, torch.tensor(targets), left)
        return logits

    def _block_segment(self, head: BlockHead, burst: Burst, node: StepNode, row: int, seen: int) -> Segment:
        """Return what a root's block sees: the checkpoint's window of the context, the tree slots of later tokens that
        have KV of features, and the block itself in the row's scratch."""
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
        self, nodes: list[StepNode], rows: list[int], logits: Tensor, branching: int
    ) -> tuple[Tensor, Tensor]:
        """Return the nodes' candidates int32 [M, k] and edge scores float32 [M, k]."""
        tokens = torch.empty(len(nodes), branching, dtype=torch.int32)
        scores = torch.empty(len(nodes), branching)
        positions = torch.tensor([node.position for node in nodes])
        self._proposer(logits, torch.tensor(rows), positions, tokens, scores)
        return tokens, scores

    def _step_batch(
        self, places: Sequence[Tensor], frontier: HostFrontier, nodes: list[StepNode], rows: list[int], used: list[int]
    ) -> StepBatch:
        for node in nodes:
            used[node.row] = max(used[node.row], node.slot + 1)
        seen = torch.from_numpy(frontier.sees(nodes, self.shape.region))
        bounds = [index for index, node in enumerate(nodes) if not index or nodes[index - 1].row != node.row]
        steps = []
        for first, end in zip(bounds, [*bounds[1:], len(nodes)], strict=True):
            row = nodes[first].row
            own = torch.tensor([node.slot for node in nodes[first:end]])
            length = len(places[row]) - self.shape.region
            steps.append(RowSteps(row, own, places[row][: length + used[row]], seen[first:end, : used[row]]))
        return StepBatch(
            token_ids=torch.tensor([node.token for node in nodes]),
            positions=torch.tensor([max(node.position - self.shape.lag, 0) for node in nodes]),
            kv_slots=self._kv_slots(rows, nodes),
            rows=steps,
        )

    def _places(self, burst: Burst) -> list[Tensor]:
        """Return the KV slots of each row's context and, behind them, of its tree region."""
        memory, region = self.memory, self.shape.region
        return [
            torch.from_numpy(
                np.concatenate((memory.context_slots(row, 0, length), memory.region_start(row) + np.arange(region)))
            ).long()
            for row, length in zip(burst.rows.rows.tolist(), burst.rows.context_lens.tolist(), strict=True)
        ]

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


def step_pays(chances: Sequence[float], min_chance: float, least_gain: float) -> bool:
    """Whether to run nodes with these chances: they must add up to `min_chance`, and bring `least_gain` tokens if a
    node's best child is about as likely as the node itself."""
    return sum(chances) >= min_chance and sum(chance * chance for chance in chances) >= least_gain


_STEP_COST = 2.0
"""Tokens that are committed in the time of a round."""
_MOST_GAIN = 0.4
"""Most tokens required of a step, however long the first steps took: in copied text each step brings 0.6 to 0.9."""
_LEARN_RATE = 0.1


def _moving_mean(known: float, seconds: float) -> float:
    """Return a moving mean of a time. Limits outliers, since pauses between requests are no rounds."""
    if not known:
        return min(seconds, 1.0)
    return known + _LEARN_RATE * (min(seconds, 4 * known) - known)


def _never() -> bool:
    return False


_Entry = tuple[float, int, int, int, int, int, int, int, float]
"""Negated score, pool index, row of the burst, parent's slot, token, position, slot or -1, feature or -1, base."""


class StepNode(NamedTuple):
    """A node of a step on a CPU."""

    place: int
    """Index in the pool."""
    row: int
    """Row of the burst."""
    parent: int
    """Tree slot of the parent; -1 if everything before the token is context."""
    token: int
    position: int
    slot: int
    feature: int
    """Row of `Burst.features`; -1 for the feature computed at the parent."""
    base: float
    """Path score that the edge scores of the node's candidates are added to."""


class HostFrontier:
    """The pool of one burst.

    `masks[row][slot]`, by row of the runner, has the tree slots that the node in a slot sees, itself included, as bits
    of an integer. The masks outlive the burst.
    """

    def __init__(self, burst: Burst, width: int, masks: list[list[int]], pool: tuple[int, int], lag: int) -> None:
        """`width`: most nodes of a step. `pool`: index of the first candidate, and candidates of a node."""
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
        """Take the nodes of the next step out of the pool, row by row, parents before children."""
        heap = self._heap
        later: list[_Entry] = []
        taken: list[StepNode] = []
        own: set[tuple[int, int]] = set()
        late: set[tuple[int, int]] = set()
        while heap and len(taken) + len(later) < self._width and -heap[0][0] >= self._floor:
            entry = heappop(heap)
            _, index, row, parent, token, position, slot, feature, base = entry
            if (row, parent) in late or (self._lag and feature < 0 and (row, parent) in own):
                # The node needs its parent's feature, which this step computes.
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
        """Add candidates of nodes; `place`: number of nodes in earlier steps, padding included."""
        for number, (node, children, scores) in enumerate(zip(nodes, tokens, edges, strict=True)):
            index = self._first + (place + number) * self.branching
            for child, (token, edge) in enumerate(zip(children, scores, strict=True)):
                score = node.base + edge
                if token >= 0 and score >= self._floor and score > -inf:
                    entry = (-score, index + child, node.row, node.slot, token, node.position + 1, -1, -1, score)
                    heappush(self._heap, entry)

    def mask(self, node: StepNode) -> int:
        """Return which tree slots a node sees, as bits."""
        mask: int = self._masks[self._rows[node.row]][node.slot]
        return mask

    def sees(self, nodes: list[StepNode], region: int) -> NDArray[np.bool_]:
        """Return which tree slots each node sees, bool [M, region]."""
        data = b"".join(self.mask(node).to_bytes(region // 8, "little") for node in nodes)
        bits = np.frombuffer(data, np.uint8).reshape(len(nodes), -1)
        return np.unpackbits(bits, axis=1, bitorder="little").astype(np.bool_)

    @property
    def chances(self) -> list[float]:
        """Chances of the nodes that the next step would take; one infinite value while a node must be run."""
        best = sorted(self._heap)[: self._width]
        return [inf] if best and -best[0][0] >= FORCED else [exp(-entry[0]) for entry in best]
