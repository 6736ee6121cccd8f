"""Rounds on a CudaExecutor without an engine: requests keep their position, round after round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.protocol.generation import GenerationRequest
from outrider.sampling.params import SamplingParams
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Nodes
from verify_service.executors.cuda import CudaExecutor

MAX_DEPTH, SPINE = 12, 6


def tree_parents(num_nodes: int) -> list[int]:
    """Return parents of `num_nodes` nodes, -1 for children of the root: a chain of SPINE nodes and random branches.

    The result is the same every time, and no deeper than MAX_DEPTH.
    """
    rng = random.Random(num_nodes)
    parents: list[int] = []
    depths: list[int] = []
    while len(parents) < num_nodes:
        parent = len(parents) - 1 if len(parents) < SPINE else rng.randrange(-1, len(parents))
        depth = 1 if parent < 0 else depths[parent] + 1
        if depth <= MAX_DEPTH:
            parents.append(parent)
            depths.append(depth)
    return parents


def tree_below(likely: list[int], num_nodes: int, vocab_size: int) -> Nodes:
    """Return a tree whose first chain is `likely`, as far as it goes; the other tokens are arbitrary."""
    parents = tree_parents(num_nodes)
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    rng = random.Random(num_nodes)
    token_ids = [rng.randrange(vocab_size) for _ in parents]
    chain = min(len(likely), num_nodes, SPINE)
    token_ids[:chain] = likely[:chain]
    # Siblings must differ: a node that repeats the chain's token would make the walk's choice ambiguous.
    for index in range(chain, num_nodes):
        depth = depths[index]
        if depth <= chain and token_ids[index] == likely[depth - 1]:
            token_ids[index] = (token_ids[index] + 1) % vocab_size
    return Nodes(token_ids, parents, depths)


GREEDY = SamplingParams(temperature=0.0)
PROBE_TOKENS = 6


@dataclass(frozen=True)
class MeasuredTimes:
    """Medians over rounds of one kind, in milliseconds.

    `wall` runs from launch to launch, `gpu` is the device's own clock within the round, `gap` its idle time before the
    round, `launch` the host's time to queue it. `accepted` counts committed tokens of a request and round.
    """

    wall: float
    gpu: float
    gap: float
    launch: float
    accepted: float


class MeasuredRounds:
    """Measures rounds over requests with contexts of their own in the executor's pages."""

    def __init__(self, executor: CudaExecutor, vocab_size: int, num_pages: int, chunk_size: int) -> None:
        self.executor = executor
        self._vocab_size = vocab_size
        self._num_pages = num_pages
        self._chunk_size = chunk_size
        self._requests: list[Request] = []
        self._rng = random.Random(0)

    def prepare(
        self, num_requests: int, context: int, room: int, params: SamplingParams = GREEDY, computed: bool = True
    ) -> float:
        """Replace all requests by new ones with `context` cached tokens and a root each. Return the seconds of prefill.

        Their pages hold `room` tokens beyond the context. If the context is not `computed`, its KV is whatever the
        memory holds: it takes as long to read, but answers mean nothing.
        """
        for request in self._requests:
            self.executor.forget(request)
        page_size = self.executor.page_size
        pages = -(-(context + 1 + room) // page_size)
        if num_requests * pages > self._num_pages:
            raise ValueError(f"{num_requests} requests of {context} tokens need {num_requests * pages} pages")
        self._requests = [self._request(context + 1, params) for _ in range(num_requests)]
        for index, request in enumerate(self._requests):
            request.pages.extend(range(index * pages, (index + 1) * pages))
        start = time.perf_counter()
        for request in self._requests:
            if not computed:
                request.cached_len = context
            while request.cached_len < context:
                count = min(self._chunk_size, context - request.cached_len)
                self.executor.launch([Entry(request, count)]).wait()
                request.cached_len += count
        self._synchronize()
        return time.perf_counter() - start

    def cut(self, context: int) -> None:
        """Set the requests back to `context` cached tokens and a root."""
        for request in self._requests:
            del request.tokens[context + 1 :]
            request.cached_len = context

    def measure(self, num_tokens: int, repeats: int = 30) -> MeasuredTimes:
        """Measure the same round of `num_tokens` over all requests again and again, without commits.

        The trees hold the model's own continuation, so that a path of them is accepted.
        """
        per_request = num_tokens // len(self._requests)
        likely = self._probe(min(PROBE_TOKENS, per_request - 1))
        nodes = [tree_below(chain, per_request - 1, self._vocab_size) for chain in likely]
        entries = [Entry(request, 1, tree) for request, tree in zip(self._requests, nodes, strict=True)]
        return self._repeat(entries, repeats)

    def decode(self, num_rounds: int) -> float:
        """Decode plainly, with commits. Return the seconds a round."""
        seconds = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            self._commit_one()
            seconds.append(time.perf_counter() - start)
        return statistics.mean(seconds[len(seconds) // 8 :])

    def prefill_seconds(self, num_tokens: int, repeats: int = 5) -> float:
        """Measure a prompt chunk of `num_tokens` from position 0, in seconds from the launch to the device's end.

        The chunk may be longer than the context, if the pages hold it; otherwise raises ValueError.
        """
        request = self._requests[0]
        room = len(request.pages) * self.executor.page_size
        if num_tokens > room:
            raise ValueError(f"a chunk of {num_tokens} tokens for a request with pages for {room}")
        length = len(request.tokens)
        request.tokens.extend(self._rng.randrange(self._vocab_size) for _ in range(num_tokens + 1 - length))
        cached, seconds = request.cached_len, []
        for _ in range(repeats + 1):
            request.cached_len = 0
            self._synchronize()
            start = time.perf_counter()
            self.executor.launch([Entry(request, num_tokens)]).wait()
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        request.cached_len = cached
        del request.tokens[length:]
        return statistics.median(seconds[1:])

    def _repeat(self, entries: Sequence[Entry], repeats: int) -> MeasuredTimes:
        walls, launches, gpus, gaps, committed = [], [], [], [], 0
        before = time.perf_counter()
        for _ in range(repeats + 3):
            start = time.perf_counter()
            pending = self.executor.launch(entries)
            launches.append(time.perf_counter() - start)
            results = pending.wait()
            now = time.perf_counter()
            walls.append(now - before)
            before = now
            gpus.append(pending.gpu_seconds or 0.0)
            gaps.append(pending.gap_seconds or 0.0)
            committed = sum(len(result.token_ids) for result in results)
        medians = [statistics.median(values[3:]) * 1e3 for values in (walls, gpus, gaps, launches)]
        return MeasuredTimes(*medians, accepted=committed / len(entries))

    def _probe(self, num_tokens: int) -> list[list[int]]:
        """Return each request's continuation. The requests keep their position."""
        context = self._requests[0].cached_len
        for _ in range(num_tokens):
            self._commit_one()
        likely = [request.tokens[context + 1 :] for request in self._requests]
        self.cut(context)
        return likely

    def _commit_one(self) -> None:
        entries = [Entry(request, 1, Nodes()) for request in self._requests]
        for request, result in zip(self._requests, self.executor.launch(entries).wait(), strict=True):
            if result.error is not None:
                raise result.error
            request.cached_len += 1
            request.tokens.append(result.token_ids[0])

    def _request(self, num_tokens: int, params: SamplingParams) -> Request:
        tokens = [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]
        asked = GenerationRequest("benchmark", tokens, params, max_tokens=1 << 20)
        return Request.begin(asked, lambda update: None, self._vocab_size)

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
