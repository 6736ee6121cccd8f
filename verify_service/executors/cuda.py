"""Runs rounds on a GPU: decoding as one CUDA graph, chunks of prefill behind it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial

import torch

from outrider.attention.base import AttentionBackend
from outrider.attention.paged import MAX_PATH, PATH_SPLITS, PromptShape, RoundTokens, TreeBuffers, choose_splits
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import FeatureStore
from outrider.device import num_processors, out_of_memory
from outrider.drafting.model.round_drafter import RoundResults, RoundShape, VerifiedTrees
from outrider.grammar.compiler import Mask
from outrider.graphs import GraphPool
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.drafters.base import DraftModel
from outrider.sampling.device import DeviceSampler, LogprobOutputs, failure, read_logprobs
from outrider.sampling.sampler import EXACT, AcceptRule
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result, varied_tokens
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.base import Executor, PromptScores, with_prompt
from verify_service.executors.prefill import Prefill, PrefillShapes
from verify_service.executors.ranks import CAPTURE, ROUND, ExecutorLink
from verify_service.executors.round_buffers import (
    NUM_COMMITTED,
    Bucket,
    Buckets,
    RequestRows,
    RoundAnswers,
    RoundInput,
    RoundOutput,
)
from verify_service.executors.round_drafts import DraftingOptions, RoundDrafts, feature_store
from verify_service.features.staging import FeaturePlan

log = get_logger(__name__)


MEASURED_CONTEXT = 1024
"""Cached tokens behind which rounds are timed."""


@dataclass(slots=True)
class _Renewal:
    """Features that rounds will store once all graphs have been captured again."""

    store: FeatureStore
    stale: list[Bucket | PromptShape]
    """Rounds, and forwards of prompts, whose graphs do not store these features yet; the next to capture is last."""


class CudaExecutor(Executor):
    """Executor on pages and tables in device memory. Runs on a CPU too, slowly and without graphs, for tests."""

    def __init__(
        self,
        model: LanguageModel,
        num_pages: int,
        page_size: int,
        limits: EngineLimits,
        attention: AttentionBackend,
        link: ExecutorLink | None = None,
        *,
        max_graph_rows: int = 64,
        use_graphs: bool = True,
        rule: AcceptRule = EXACT,
    ) -> None:
        """`link`: to the other ranks of the model. Rounds with more than `max_graph_rows` requests run kernel by
        kernel, and without `use_graphs` all do."""
        super().__init__(model, num_pages * page_size, attention)
        self._max_graph_rows = max_graph_rows
        self._use_graphs = use_graphs
        self.link = link or ExecutorLink()
        device = model.device
        self.limits = limits
        self.page_size = page_size
        self._on_gpu = device.type == "cuda"
        # A backend that plans on the host would overwrite a plan that is in use.
        self.launches_ahead = not attention.plans_on_host
        tokens, rows = limits.max_round_tokens, limits.max_running
        self.buckets = Buckets(tokens, rows, fixed=limits.deterministic)
        self._sampler = DeviceSampler(rows + 1, tokens, NUM_COMMITTED, limits.vocab_size, device, rule)
        self.rows = RequestRows(
            rows, -(-(limits.context_length + tokens) // page_size), self._sampler, device, self.link
        )
        self._input = RoundInput(tokens, rows, self.rows.spare, device)
        self._dry_run_input = RoundInput(tokens, rows, self.rows.spare, torch.device("cpu"))
        self._output = RoundOutput(rows, device)
        self._dry_run_answers = self._output.to_host(rows)
        self._trees = TreeBuffers(tokens, MAX_PATH, device)
        # Other backends plan prompts on the host, by their lengths: nothing can be captured, and padding gains nothing.
        padded = isinstance(attention, TritonAttention)
        shapes = PrefillShapes(limits.chunk_size, rows, limits.deterministic, padded)
        self.prefill = Prefill(
            model,
            lambda batch: self._forward(batch, batch.slots, self._features),
            self.rows,
            page_size,
            shapes,
            self.link,
        )
        self._num_processors = num_processors(device)
        self.graphs = GraphPool[Bucket]("rounds", self._body, self._prepare, self.link.compiling)
        self._last_end: int | None = None
        self._renewal: _Renewal | None = None
        self._uses: Counter[Bucket] = Counter()
        self.drafts: RoundDrafts | None = None

    def draft_inside(self, model: DraftModel, options: DraftingOptions) -> None:
        """Let trees grow behind rounds, on the same device. Call this before anything is captured."""
        # Rounds with a drafter of their own store features only for that one.
        self.lends_features = False
        self._features = feature_store(model, self._model, self._kv.num_slots)
        self.drafts = RoundDrafts(
            model,
            options,
            self,
            self._features,
            # Not the backend that rounds use: only this one knows tree regions.
            TritonAttention(),
            self.rows,
            limits=self.limits,
            num_pages=self._kv.num_slots // self.page_size,
            page_size=self.page_size,
            link=ExecutorLink() if model.exchange is None else self.link,
        )

    def results(self, shape: RoundShape) -> RoundResults:
        """See RoundExecutor."""
        bucket = Bucket(self.limits.max_round_tokens, shape.rows)
        num_tokens, _, committed, _ = self._output.fields(bucket)
        if self.drafts is None:
            raise RuntimeError("nothing is drafted behind rounds")
        trees = self.drafts.trees
        return RoundResults(trees.tokens(self._input.tokens(bucket)), num_tokens, committed, trees.drafted(shape.rows))

    def note_drafted(self) -> None:
        """See RoundExecutor."""
        self._output.stamp(2)

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture a graph for every bucket and for small chunks of prompts, and warm up what has none; on a CPU there
        is nothing to do. Trashes the cache."""
        if not self._on_gpu:
            return
        self.capture_prefill()
        if self._use_graphs:
            all_buckets = self.buckets.all()
            if self.drafts is not None:
                all_buckets += sorted({self.buckets.bare(bucket.rows) for bucket in all_buckets}, reverse=True)
            buckets = [bucket for bucket in all_buckets if bucket.only or bucket.rows <= self._max_graph_rows]
            self._input.clear()
            self.link.broadcast(CAPTURE, [number for bucket in buckets for number in bucket])
            self.graphs.capture(buckets, not self._attention.plans_on_host, progress)

    @torch.inference_mode()
    def capture_drafting(self, node_counts: Callable[[int], Sequence[int]]) -> None:
        """Capture and time what is drafted behind rounds; `node_counts`: see GrowthPolicy."""
        if self.drafts is not None and self._on_gpu and self._use_graphs:
            self._input.clear()
            self.drafts.capture([bucket for bucket in self.graphs.captured() if not bucket.is_bare], node_counts)

    @torch.inference_mode()
    def capture_prefill(self) -> None:
        """Capture small chunks of prompts, and warm up the others."""
        self.prefill.capture(self._use_graphs, min(self._kv.num_slots, self.limits.context_length))

    @torch.inference_mode()
    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> CudaRound:
        """Queue a round: decode entries as one graph, drafting, then prefill. Page tables must cover every token."""
        prefill = [entry for entry in entries if entry.prefills and self.limits.is_apart(entry)]
        decode = [entry for entry in entries if entry not in prefill] if prefill else list(entries)
        done: torch.cuda.Event | None = None
        answers: RoundAnswers | None = None
        listed: LogprobOutputs | None = None
        if self._staging is not None:
            self._staging.join()
        if decode:
            drafts = self.drafts
            if drafts and any(entry.masks for entry in decode):
                # Masks are placed by the host's order of tokens: nodes that grew on the device may only shift rows
                # behind the masked ones.
                decode.sort(key=lambda entry: not entry.masks)
            num_grown = min(drafts.num_grown, sum(entry.max_grown for entry in decode)) if drafts else 0
            bucket = self._bucket(decode, num_grown)
            if drafts and drafts.rests and not num_grown and bucket == self.buckets.fit(1, bucket.rows):
                bucket = self.buckets.bare(bucket.rows)
            self._uses[bucket] += 1
            self._input.fill(decode, self.rows, bucket)
            if drafts:
                drafts.lay_out(decode, growth)
                if bucket.is_bare:
                    drafts.note_bare(decode)
            self._sampler.set_masks(mask_runs(decode))
            self._run(bucket)
            answers = self._output.to_host(len(decode))
            wanted = any(entry.request.params.sampling.num_logprobs is not None for entry in decode)
            listed = self._sampler.copy_logprobs(len(decode)) if wanted else None
            done = self._mark()
            if drafts:
                drafts.draft(bucket, growth)
        scores: dict[Entry, PromptScores] = {}
        if prefill:
            scores = self.prefill.run(prefill)
            if not decode:
                self._last_end = None
            # With decoding going on, only the next round's graph waits for a chunk, and requests that want its logits.
            done = self._mark() if scores or done is None else done
        complete = self._mark() if self._features is not None and decode and prefill else done
        return CudaRound(self, entries, decode, answers, listed, done, scores, clean=not prefill, complete=complete)

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """See Executor: all but the copies and the graph."""
        decode = [entry for entry in entries if not self.limits.is_apart(entry)]
        if decode:
            self._dry_run_answers.read()
            self._dry_run_input.fill(decode, None, self._bucket(decode))

    def forget(self, request: Request) -> None:
        """Free the row of a request that ended or gave up its pages, for work queued from now on."""
        self.rows.forget(request)
        if self.drafts is not None:
            self.drafts.forget(request)

    @torch.inference_mode()
    def begin_features(self, plan: FeaturePlan) -> None:
        """See Executor."""
        with out_of_memory("the target's features", "lower --mem-fraction-static or --max-total-tokens"):
            self._stage()
            store = self._new_store(plan)
        self.graphs.discard_next()
        self.prefill.graphs.discard_next()
        # Chunks come after rounds, the large ones first: their memory serves the others, too.
        chunks = self.prefill.graphs.captured()[::-1]
        # The rounds that were run most come first, then small ones. The list is taken from its end.
        rounds = sorted(self.graphs.captured(), key=lambda bucket: (-self._uses[bucket], bucket), reverse=True)
        self._renewal = _Renewal(store, [*chunks, *rounds])

    def refresh_features(self) -> int:
        """See Executor. One graph at a time, the most used first."""
        renewal = self._renewal
        if renewal is None:
            return 0
        if renewal.stale:
            self._renew(renewal.stale.pop(), renewal.store)
        if not renewal.stale:
            self._stage().join()
            self.graphs.adopt()
            self.prefill.graphs.adopt()
            self._features, self._renewal = renewal.store, None
        return len(renewal.stale)

    @torch.inference_mode()
    def _renew(self, shape: Bucket | PromptShape, store: FeatureStore) -> None:
        """Capture a round, or a forward of prompts, that stores features; without memory for it, it gets no graph.

        Raises RankError if memory runs out amid a run, which the other ranks have run to its end.
        """
        self._last_end = None
        captured = False
        used, self._features = self._features, store
        try:
            with suppress(torch.OutOfMemoryError), self.link.in_step("a round with features"):
                captured = self._capture_next(shape)
        finally:
            self._features = used
        if not captured:
            log.warning("no memory for the graph of %d tokens in %d rows with features", shape.tokens, shape.rows)

    def _capture_next(self, shape: Bucket | PromptShape) -> bool:
        if isinstance(shape, PromptShape):
            return self.prefill.capture_next(shape)
        # The last round's results were read and the next round is not laid out, so an empty one does no harm.
        self._input.clear()
        return self.graphs.capture_next(shape, partial(self.link.broadcast, ROUND, shape))

    def read(self, round_: CudaRound, answers: RoundAnswers) -> list[Result]:
        """Return the results of a finished round's decode entries, and set the round's times on the device."""
        begin, end, drafted = answers.clock
        round_.gpu_seconds, last = (end - begin) * 1e-9, self._last_end
        if last is not None:
            round_.gap_seconds = (begin - max(last, drafted)) * 1e-9
            round_.drafting_seconds = (drafted - last) * 1e-9 if drafted > last else None
        self._last_end = end if round_.clean else None
        if self.drafts is not None and any(entry.max_grown for entry in round_.decode):
            round_.trees = self.drafts.trees.read(len(round_.decode))
        results, listed = [], round_.listed
        for row, answer in enumerate(answers.read()):
            num_tokens, error = answer[:2]
            result = Result(answer[2 : 2 + num_tokens], error=failure(error) if error else None)
            if listed is not None:
                wanted = round_.decode[row].request.params.sampling.num_logprobs
                if wanted is not None:
                    result = result._replace(logprobs=read_logprobs(listed, row, result.token_ids, wanted))
            results.append(result)
        return results

    def take_nodes(self, round_: CudaRound) -> None:
        """Give the entries of a finished round the nodes that it verified."""
        if self.drafts is not None and round_.trees is not None:
            self.drafts.take_verified(round_.decode, round_.trees)

    def _bucket(self, decode: Sequence[Entry], num_grown: int = 0) -> Bucket:
        return self.buckets.fit(sum(entry.num_tokens for entry in decode) + num_grown, len(decode))

    def _mark(self) -> torch.cuda.Event | None:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _run(self, bucket: Bucket) -> None:
        """Queue the round that was laid out, on all ranks."""
        self.link.broadcast(ROUND, bucket)
        self.graphs.run(bucket)

    def _prepare(self, bucket: Bucket) -> None:
        self._attention.prepare(bucket.tokens, self._input.lengths(bucket), self.rows.page_tables)

    def _body(self, bucket: Bucket) -> None:
        """Run a whole round on the device, between the copies of its input and its output."""
        self._output.stamp(0)
        tokens = self._input.tokens(bucket)
        drafts, store = (None, None) if bucket.is_bare else (self.drafts, self._features)
        if drafts is not None:
            tokens = drafts.merge(tokens)
        shared = [*(getattr(tokens, field.name) for field in fields(RoundTokens)), self._input.updates]
        self.link.share(shared if drafts is None else shared + drafts.shared(bucket))
        tables = self.rows.page_tables
        self.rows.update(self._input.updates)
        splits = self._num_splits(bucket)
        fixed = self.limits.deterministic
        batch = self._trees.batch(
            tokens, tables, self.page_size, bucket.max_row_tokens, splits, fixed, self._sampler.int_params
        )
        hidden = self._forward(batch, batch.slots, store)
        logits = self._model.logits(hidden)
        num_tokens, error, committed, accepted = self._output.fields(bucket)
        commit = partial(
            self._sampler.commit, logits, tokens, bucket.max_row_tokens, num_tokens, error, committed, accepted
        )
        follow = partial(self._sampler.note_last, tokens, num_tokens, committed)
        self.link.sample(commit, self._output.rows(bucket), follow)
        self._kv.compact(tokens, accepted, num_tokens, tables, self.page_size)
        if store is not None:
            store.compact(tokens, accepted, num_tokens, tables, self.page_size)
        self._output.stamp(1)
        if drafts is not None:
            drafts.trees.to_host()

    def _num_splits(self, bucket: Bucket) -> int:
        if self.limits.deterministic:
            return PATH_SPLITS
        config = self._model.config
        heads = (config.num_heads, config.num_kv_heads)
        return choose_splits(bucket.tokens, bucket.rows, bucket.max_row_tokens, *heads, self._num_processors)

    @torch.inference_mode()
    def measure(self, width: int, context: int = MEASURED_CONTEXT, repeats: int = 5) -> float:
        """Return the seconds of the fastest round of `width` tokens in one row over `context` cached ones.

        Trashes the cache.
        """
        context = max(min(context, self._kv.num_slots - width, self.limits.context_length), 0)
        num_pages = -(-(context + width) // self.page_size)
        self.rows.enter(self.rows.spare, 0, range(num_pages))
        width = min(width, self.buckets.tokens[-1])
        bucket = self.buckets.fit(width, 1)
        self._input.fill_chain(varied_tokens(width, self.limits.vocab_size), context, bucket)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._run(bucket)
            if self._on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)


def mask_runs(entries: Sequence[Entry]) -> list[tuple[int, Sequence[Mask]]]:
    """Return the masks of a round of these entries, with the places of their roots among its tokens."""
    runs: list[tuple[int, Sequence[Mask]]] = []
    if not any(entry.masks for entry in entries):
        return runs
    start = 0
    for entry in entries:
        if entry.masks:
            runs.append((start + entry.num_extend - 1, entry.masks))
        start += entry.num_tokens
    return runs


@dataclass(eq=False, repr=False)
class CudaRound(Pending):
    """A round that the device works on. The device's times are those of its decode part."""

    executor: CudaExecutor
    entries: Sequence[Entry]
    decode: Sequence[Entry]
    answers: RoundAnswers | None
    listed: LogprobOutputs | None
    event: torch.cuda.Event | None
    scores: Mapping[Entry, PromptScores]
    clean: bool
    """Whether no prefill lies between this round and the next."""
    complete: torch.cuda.Event | None = None
    trees: VerifiedTrees | None = None
    """The trees that the round verified, if it took any that grew on the device; known once `wait` has returned."""

    def done(self) -> bool:
        """See Pending."""
        self.executor.link.check()
        return self.event is None or self.event.query()

    def wait(self) -> list[Result]:
        """See Pending."""
        if self.event is not None:
            self.event.synchronize()
        self.executor.link.check()
        found: dict[Entry, Result] = {}
        if self.answers is not None:
            results = self.executor.read(self, self.answers)
            if self.decode == self.entries:
                return results
            found = dict(zip(self.decode, results, strict=True))
        found |= {entry: with_prompt(Result(), scores) for entry, scores in self.scores.items()}
        return [found.get(entry, Result()) for entry in self.entries]

    def take_nodes(self) -> None:
        """See Pending."""
        self.executor.take_nodes(self)
