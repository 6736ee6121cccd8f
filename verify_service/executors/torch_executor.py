"""Runs rounds on torch, on a CPU: the reference of the executor for GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.errors import ConfigError, OutriderError
from outrider.grammar.compiler import unpack
from outrider.models.base import LanguageModel
from outrider.protocol.generation import TokenLogprobs
from outrider.sampling.sampler import EXACT, AcceptRule, walk_tree
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result, varied_tokens
from verify_service.executors.base import Executor, PromptScores, with_prompt
from verify_service.features.staging import FeaturePlan

MEASURED_CONTEXT = 192
"""Cached tokens behind which rounds are timed."""
_MEASURE_SECONDS = 0.1
"""A width is measured again until this much time has passed."""


def entry_mask(entry: Entry) -> torch.Tensor | None:
    """Return which of an entry's own tokens attend to which: bool [num_tokens, num_tokens]; None if causal."""
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


class TorchRound(Pending):
    """A round that runs when it is waited for."""

    def __init__(self, run: Callable[[], list[Result]]) -> None:
        self._run = run

    def done(self) -> bool:
        """See Pending."""
        return True

    def wait(self) -> list[Result]:
        """See Pending."""
        return self._run()


class _Part(NamedTuple):
    """An entry that was launched."""

    entry: Entry
    slots: torch.Tensor
    """KV slot of each position: the request may end and lose its pages before the entry is run."""
    first: int
    """Its first row among all rows of the round."""

    def segment(self, first: int, last: int, page_size: int) -> Segment:
        """Return its rows `first` up to `last`."""
        mask = entry_mask(self.entry) if last > self.entry.num_extend else None
        mask = None if mask is None else mask[first:last, :last]
        length = self.entry.start + last
        return Segment(last - first, self.slots[:length], mask, num_spare=-length % page_size)

    def moves(self, accepted: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return slots of accepted nodes, with the slots that they move to in committed order; empty if none moves."""
        end = self.entry.start + self.entry.num_extend
        moved = [(end + node, end + place) for place, node in enumerate(accepted) if node != place]
        return [(self.slots[[source for source, _ in moved]], self.slots[[to for _, to in moved]])] if moved else []


class _PartRows(NamedTuple):
    """Rows `first` up to `last` of a part, which run in one forward."""

    part: _Part
    first: int
    last: int


class _Forward(NamedTuple):
    """One of a round's forwards, of M rows."""

    batch: ForwardBatch
    rows: Sequence[int]
    """[M], where they stand among all rows of the round."""
    slots: torch.Tensor
    """int64 [M], their KV slots, at which features are stored, too."""


def cut_round(parts: Sequence[_Part], steady_rows: int) -> list[list[_PartRows]]:
    """Cut a round into forwards that run one after the other; only one if `steady_rows` is 0.

    In forwards of up to `steady_rows` rows no bit of a row depends on the rows beside it, so no draft or other request
    can change it. Longer chunks of prompts get a forward each, and all other rows as few forwards as they need.
    """
    if not steady_rows:
        return [[_PartRows(part, 0, part.entry.num_tokens) for part in parts]]
    long = [[_PartRows(part, 0, part.entry.num_extend)] for part in parts if part.entry.is_long(steady_rows)]
    forwards: list[list[_PartRows]] = []
    room = 0
    for part in parts:
        first, num_tokens = part.entry.num_extend if part.entry.is_long(steady_rows) else 0, part.entry.num_tokens
        while first < num_tokens:
            if not room:
                forwards.append([])
                room = steady_rows
            last = min(first + room, num_tokens)
            forwards[-1].append(_PartRows(part, first, last))
            first, room = last, room - (last - first)
    return long + forwards


class TorchExecutor(Executor):
    """Forward, sampling walk and KV compaction with plain torch operations.

    In fp32 a forward's width changes the rounding of its rows: log-probabilities differ by up to 1e-4 between two runs
    with other drafts or batches, and if two candidates are closer than that, the token may differ. In bf16, if the CPU
    has avx512_bf16, a root's row has the same bits at every width; a node's may not, as its keys may be in other lanes.
    If the model has steady rows, no row depends on what else the round has: see `cut_round`.
    """

    def __init__(self, model: LanguageModel, num_pages: int, page_size: int, rule: AcceptRule = EXACT) -> None:
        super().__init__(model, num_pages * page_size, TorchAttention())
        self._rule = rule
        self._page_size = page_size
        self._slots: dict[Request, torch.Tensor] = {}

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> TorchRound:
        """Return a round that `wait` will run: without a device to work on it meanwhile, starting it gains nothing."""
        firsts = accumulate((entry.num_tokens for entry in entries), initial=0)
        parts = [
            _Part(entry, self._slots_of(entry.request), first) for entry, first in zip(entries, firsts, strict=False)
        ]
        forwards = [self._laid_out(pieces) for pieces in cut_round(parts, self._model.steady_rows)]
        return TorchRound(lambda: self._run(parts, forwards))

    def forget(self, request: Request) -> None:
        """See Executor."""
        self._slots.pop(request, None)

    def begin_features(self, plan: FeaturePlan) -> None:
        """See Executor."""
        try:
            self._features = self._new_store(plan)
        except MemoryError as error:
            raise ConfigError(f"the machine has no memory for the target's features ({error})") from error

    @torch.inference_mode()
    def _run(self, parts: Sequence[_Part], forwards: Sequence[_Forward]) -> list[Result]:
        """Run all entries' rows; compact accepted KV in place."""
        hidden = self._hidden(forwards)
        rows: list[int] = []
        for part in parts:
            if part.entry.samples:
                rows.extend(range(part.first + part.entry.num_extend - 1, part.first + part.entry.num_tokens))
        logits = self._model.logits(hidden if len(rows) == len(hidden) else hidden[rows]) if rows else hidden
        results: list[Result] = []
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        row = 0
        for part in parts:
            entry, result = part.entry, Result()
            if entry.samples:
                num_rows = entry.num_tokens - entry.num_extend + 1
                result, accepted = self._walk(entry, logits[row : row + num_rows])
                moves += part.moves(accepted)
                row += num_rows
            if positions := entry.scored:
                start = part.first + positions.start - entry.start
                scores = PromptScores(entry, positions)
                scores.compute(self._model.logits, hidden[start : start + len(positions)])
                result = with_prompt(result, scores)
            results.append(result)
        self._compact(moves)
        return results

    def _hidden(self, forwards: Sequence[_Forward]) -> torch.Tensor:
        """Run the forwards; return the hidden states of all rows of the round, in their order."""
        found = [self._forward(one.batch, one.slots, self._features) for one in forwards]
        if len(found) == 1:
            return found[0]
        order = torch.tensor([row for one in forwards for row in one.rows])
        return torch.cat(found)[order.argsort()]

    @torch.inference_mode()
    def measure(self, width: int, context: int = MEASURED_CONTEXT, repeats: int = 3) -> float:
        """Return the seconds of the fastest forward of `width` tokens over `context` cached ones. Trashes the KV cache.

        Long forwards are not repeated: a moment's noise matters little to them, and the service is waiting to start.
        """
        slots = torch.arange(context + width)
        batch = ForwardBatch(
            token_ids=torch.tensor(varied_tokens(width, self._model.config.vocab_size)),
            positions=context + torch.arange(width),
            segments=[Segment(width, slots, torch.ones(width, width, dtype=torch.bool).tril())],
        )
        times: list[float] = []
        while len(times) < repeats and sum(times) < _MEASURE_SECONDS:
            start = time.perf_counter()
            self._model.logits(self._model.forward(batch, self._kv, self._attention)).argmax(-1)
            times.append(time.perf_counter() - start)
        return min(times)

    def _slots_of(self, request: Request) -> torch.Tensor:
        """Return the KV slot of each position that the request's pages cover."""
        known = self._slots.get(request)
        if known is None or len(known) < len(request.pages) * self._page_size:
            size = self._page_size
            num_filled = -(-request.cached_len // size) * size if known is None else len(known)
            known = (torch.tensor(request.pages)[:, None] * size + torch.arange(size)).reshape(-1)
            self._slots[request] = known
            # Attention also reads what lies behind a text, and masks it: no NaN of other requests may be there.
            self._kv.clear(known[num_filled:])
        return known

    def _laid_out(self, pieces: Sequence[_PartRows]) -> _Forward:
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for part, first, last in pieces:
            nodes, start = part.entry.nodes, part.entry.start
            end = start + part.entry.num_extend
            token_ids += [*part.entry.request.tokens[start:end], *nodes.token_ids][first:last]
            positions += [*range(start, end), *(end - 1 + depth for depth in nodes.depths)][first:last]
            rows += range(part.first + first, part.first + last)
        segments = [part.segment(first, last, self._page_size) for part, first, last in pieces]
        batch = ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), segments)
        slots = torch.cat(
            [part.slots[part.entry.start + first : part.entry.start + last] for part, first, last in pieces]
        )
        return _Forward(batch, rows, slots)

    def _walk(self, entry: Entry, logits: torch.Tensor) -> tuple[Result, list[int]]:
        """Sample along a path from the root. Returns a result with the committed tokens, and the accepted nodes."""
        request, nodes = entry.request, entry.nodes
        sampler, num_logprobs = request.sampler, request.params.sampling.num_logprobs
        logprobs: list[TokenLogprobs] = []
        error: OutriderError | None = None

        def sample(node: int, path: Sequence[int], children: Sequence[int]) -> int | None:
            nonlocal error
            row, position = logits[node + 1], request.committed_len + len(path)
            mask = unpack(entry.masks[node + 1], sampler.vocab_size) if entry.masks else None
            try:
                token = sampler.sample(row, path, position, mask, children, self._rule)
                if num_logprobs is not None:
                    logprobs.append(TokenLogprobs(*sampler.logprobs(row, token, num_logprobs)))
            except OutriderError as problem:
                error = problem
                return None
            return token

        tokens, accepted = walk_tree(nodes.parents, nodes.token_ids, sample)
        # If the engine commits fewer of them, the request ends there.
        request.sampler.commit(tokens)
        return Result(tokens, logprobs, error), accepted

    def _compact(self, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if moves:
            sources, targets = (torch.cat(slots) for slots in zip(*moves, strict=True))
            self._kv.move(sources, targets)
            if self._features is not None:
                self._features.move(sources, targets)
