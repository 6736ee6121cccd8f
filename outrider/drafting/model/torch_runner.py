"""Runs bursts with plain torch operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, ForwardBatch, Segment
from outrider.drafting.model.host_frontier import HostFrontier, Node
from outrider.drafting.model.plan import Burst, BurstResult, BurstShape
from outrider.drafting.model.region_attention import RegionAttention, RowSteps, StepBatch
from outrider.drafting.model.runner import Chunk, Pending, Runner, RunnerOptions, on_device
from outrider.models.drafters.base import DraftModel
from outrider.sampling.host_proposer import HostProposer


class TorchRunner(Runner):
    """See BurstRunner. Nothing works in the background: a burst runs when it is waited for or has to be over.

    Steps have few nodes, so that the host's work counts as much as the model's: the choice of nodes is made in plain
    Python, and what they attend to is laid side by side once a burst.
    """

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        self._masks = [[0] * shape.region for _ in range(shape.num_rows)]
        self._interrupted: Callable[[], bool] = _never

    def run_until(self, interrupted: Callable[[], bool]) -> None:
        """See Runner."""
        self._interrupted = interrupted
        try:
            self._settle()
        finally:
            self._interrupted = _never

    def finish(self, pending: Pending) -> BurstResult:
        """See Runner."""
        result = super().finish(pending)
        result.cut = pending.cut
        return result

    @on_device
    def _settle(self) -> None:
        for pending in self._launched:
            if not pending.ran:
                try:
                    self._run(pending)
                except Exception as error:
                    # It is the burst's failure, not that of the call that found it waiting.
                    pending.error = error

    def _make_proposer(self) -> HostProposer:
        model, options = self._model, self.options
        limits = (model.vocab_size, self._vocab_limit)
        return HostProposer(self.shape.num_rows, *limits, model.target_ids, options.rank_by_noise, model.edge_scale)

    def _queue(self, pending: Pending) -> None:
        """Left to `_settle`: the host may first pass on what the burst before brought."""

    def _run(self, pending: Pending) -> None:
        """Run a burst's steps, and write what they bring where `finish` reads it."""
        pending.ran = True
        burst, width, branching = pending.burst, pending.bucket.width, pending.bucket.branching
        self.memory.flush()
        self.memory.take_features(burst.features)
        lines = self._output.host_steps(pending.copy, pending.bucket, burst.num_steps)
        lines[:, : (2 + branching) * width] = -1
        lines[:, (2 + branching) * width :].view(np.float32)[:] = -np.inf
        frontier = HostFrontier(burst, width, self._masks, (self.shape.max_seeds, branching), self.shape.lag)
        attention = self._region_attention(burst)
        ends = burst.rows.live.shape[1] - burst.rows.live[:, ::-1].argmax(1)
        used = np.where(burst.rows.live.any(1), ends, 0).tolist()
        for number, line in enumerate(lines):
            if number and burst.least_chance and frontier.chance < burst.least_chance:
                break
            pending.cut = number > 0 and self._interrupted()
            nodes = [] if pending.cut else frontier.take()
            if not nodes:
                break
            tokens, scores = self._propose_for(burst, frontier, nodes, used, attention)
            count, found = len(nodes), tokens.numpy()
            frontier.add(nodes, number * width, found.tolist(), scores.tolist())
            line[:count] = [node.place for node in nodes]
            line[width : width + count] = [node.slot for node in nodes]
            size = count * branching
            line[2 * width : 2 * width + size] = found.reshape(-1)
            line[(2 + branching) * width :].view(np.float32)[:size] = scores.numpy().reshape(-1)

    def _propose_for(
        self, burst: Burst, frontier: HostFrontier, nodes: list[Node], used: list[int], attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Run nodes; their candidates int32 [M, k] and edge scores float32 [M, k]."""
        region, lag, rows = self.shape.region, self.shape.lag, burst.rows.rows
        for node in nodes:
            used[node.row] = max(used[node.row], node.slot + 1)
        table_rows = [int(rows[node.row]) for node in nodes]
        batch = StepBatch(
            token_ids=torch.tensor([node.token for node in nodes]),
            positions=torch.tensor([max(node.position - lag, 0) for node in nodes]),
            kv_slots=torch.tensor(
                [self.memory.region_start(row) + node.slot for row, node in zip(table_rows, nodes, strict=True)]
            ),
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
        tokens = torch.empty(len(nodes), frontier.branching, dtype=torch.int32)
        scores = torch.empty(len(nodes), frontier.branching)
        where = (torch.tensor(table_rows), torch.tensor([node.position for node in nodes]))
        self._proposer(self._model.logits(hidden), *where, tokens, scores)
        return tokens, scores.masked_fill_(scores > 0, -torch.inf)

    def _row_steps(self, burst: Burst, frontier: HostFrontier, nodes: list[Node], used: list[int]) -> list[RowSteps]:
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

    def _run_context(self, chunks: Sequence[Chunk], features: Tensor | None) -> None:
        segments = []
        positions: list[int] = []
        for row, tokens, position in chunks:
            slots = self.memory.context_slots(row, 0, position + len(tokens))
            segments.append(Segment(len(tokens), torch.from_numpy(slots.astype(np.int64))))
            positions += range(position, position + len(tokens))
        token_ids = [token for _, tokens, _ in chunks for token in tokens]
        batch = ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), segments)
        self._model.forward(batch, features, self.memory.kv, self._attention)


def _never() -> bool:
    return False
