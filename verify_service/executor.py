"""Runs rounds on torch: the CPU reference for every executor to come."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.errors import OutriderError
from outrider.models.base import CausalLM
from outrider.tokens import TokenLogprobs
from verify_service.round import Entry, Result


def entry_mask(entry: Entry) -> torch.Tensor | None:
    """Who attends to whom among an entry's own tokens: bool [num_tokens, num_tokens]; None where causal."""
    extend, nodes = entry.num_extend, entry.nodes
    if not len(nodes):
        return None
    mask = torch.zeros(entry.num_tokens, entry.num_tokens, dtype=torch.bool)
    mask[:extend, :extend] = torch.ones(extend, extend, dtype=torch.bool).tril()
    mask[extend:, :extend] = True
    for index, parent in enumerate(nodes.parents):
        row = mask[extend + index]
        if parent >= 0:
            row.copy_(mask[extend + parent])
        row[extend + index] = True
    return mask


class TorchExecutor:
    """Forward, sampling walk and KV compaction with plain torch operations.

    Rows of a forward may round differently with its width, so tokens of two runs are equal bitwise in fp32 up to
    ties in the logits, which real text does not have.
    """

    def __init__(self, model: CausalLM, num_slots: int) -> None:
        self._model = model
        self._kv = model.new_kv(num_slots)
        self._attention = TorchAttention()

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry]) -> list[Result]:
        """One forward over all entries. Page tables must cover every token; cached KV is compacted in place."""
        hidden = self._model.forward(self._batch(entries), self._kv, self._attention)
        rows: list[int] = []
        first = 0
        for entry in entries:
            if entry.samples:
                rows.extend(range(first + entry.num_extend - 1, first + entry.num_tokens))
            first += entry.num_tokens
        logits = self._model.logits(hidden if len(rows) == first else hidden[rows]) if rows else hidden
        results: list[Result] = []
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        row = 0
        for entry in entries:
            if not entry.samples:
                results.append(Result())
                continue
            result, accepted = self._walk(entry, logits[row : row + len(entry.nodes) + 1])
            results.append(result)
            moves.append(self._moves(entry, accepted))
            row += len(entry.nodes) + 1
        self._compact(moves)
        return results

    @torch.inference_mode()
    def measure(self, width: int, context: int = 192, repeats: int = 3) -> float:
        """Seconds of the fastest forward of `width` tokens over `context` cached ones. Trashes the KV cache."""
        slots = torch.arange(context + width)
        batch = ForwardBatch(
            token_ids=torch.arange(width) % self._model.config.vocab_size,
            positions=context + torch.arange(width),
            segments=[Segment(width, slots, torch.ones(width, width, dtype=torch.bool).tril())],
        )
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._model.logits(self._model.forward(batch, self._kv, self._attention)).argmax(-1)
            times.append(time.perf_counter() - start)
        return min(times)

    def _batch(self, entries: Sequence[Entry]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        segments = []
        for entry in entries:
            request, end = entry.request, entry.request.cached_len + entry.num_extend
            token_ids += request.tokens[request.cached_len : end]
            token_ids += entry.nodes.token_ids
            positions += range(request.cached_len, end)
            positions += [end - 1 + depth for depth in entry.nodes.depths]
            slots = request.slots[: end + len(entry.nodes)]
            segments.append(Segment(entry.num_tokens, slots, entry_mask(entry)))
        return ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), segments)

    def _walk(self, entry: Entry, logits: torch.Tensor) -> tuple[Result, list[int]]:
        """Sample at the root and go on to the child that holds the token, as long as there is one."""
        request, nodes = entry.request, entry.nodes
        below = {
            (parent, token): i for i, (parent, token) in enumerate(zip(nodes.parents, nodes.token_ids, strict=True))
        }
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        accepted: list[int] = []
        node: int | None = -1
        try:
            while node is not None:
                row = logits[node + 1]
                token = request.sampler.sample(row, tokens, request.committed_len + len(tokens))
                if request.sampling.num_logprobs is not None:
                    logprobs.append(TokenLogprobs(*request.sampler.logprobs(row, token, request.sampling.num_logprobs)))
                tokens.append(token)
                node = below.get((node, token))
                if node is not None:
                    accepted.append(node)
        except OutriderError as error:
            return Result(error=error), []
        return Result(tokens, logprobs), accepted

    def _moves(self, entry: Entry, accepted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of accepted nodes, and where the committed order wants them."""
        first = entry.request.cached_len + entry.num_extend
        slots = entry.request.slots
        moved = [(first + node, first + place) for place, node in enumerate(accepted) if node != place]
        sources, targets = [source for source, _ in moved], [target for _, target in moved]
        return slots[sources], slots[targets]

    def _compact(self, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        sources = torch.cat([source for source, _ in moves]) if moves else torch.empty(0)
        if len(sources):
            self._kv.move(sources, torch.cat([target for _, target in moves]))
