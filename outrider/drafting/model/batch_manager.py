"""The requests of the growth with bursts: their rows, and the work to do for each before the next burst."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from outrider.drafting.model.context import WHOLE, DraftContext, cut_context
from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.model.features import PendingFeatures
from outrider.drafting.model.forest import DraftForest, RerootStep, has_path, reroot
from outrider.drafting.model.kv import ContextKVManager, DeclinedError
from outrider.drafting.tree_growth import Grower, Refusal, Tree
from outrider.errors import raise_device_failure
from outrider.logs import get_logger
from outrider.protocol.speculation import DeclineReason, Features

if TYPE_CHECKING:
    from outrider.drafting.model.runner import BurstRunner

_logger = get_logger(__name__)

_RUN_PER_CREDIT = 2
"""Nodes that may be run for each node that may be sent: a wide burst also runs some that are not among the best."""
_FAILED = Refusal(DeclineReason.UNSPECIFIED, "the draft model failed")


class BatchManager:
    """The requests of the growth with bursts: their rows of the runner, and the work to do for each.

    Requests may be opened, changed and closed at any time, and their features may come at any time. Rows, pages and the
    forest follow while no burst is running. While one is, `follow_ahead` follows as far as possible.
    """

    def __init__(self, runner: BurstRunner, forest: DraftForest, grower: Grower, options: GrowthOptions) -> None:
        """`grower`: the grower on whose behalf trees are refused."""
        self.rows: dict[int, DraftContext] = {}
        """Requests by row of the runner; a closed request keeps its row until `release_closed`."""
        self.kv_manager = ContextKVManager(runner, forest.slots, options)
        self._runner = runner
        self._shape = runner.shape
        self._forest = forest
        self._grower = grower
        self._options = options
        self._free_rows = list(range(self._shape.num_rows - 1, -1, -1))
        self._contexts: dict[int, DraftContext] = {}  # by handle
        self._opening: dict[int, tuple[Tree, PendingFeatures]] = {}
        self._closing: list[DraftContext] = []
        self._closed_rows: list[int] = []  # rows of `_closing` that `take_closed_rows` has not returned yet
        self._changed: dict[int, DraftContext] = {}  # by handle, like the next two
        self._deferred: dict[int, DraftContext] = {}  # changed requests for which no burst has to end
        self._incomplete: dict[int, DraftContext] = {}  # requests whose root or context may have to be run

    def has_updates(self, excluded: Container[DraftContext] = ()) -> bool:
        """Whether the burst should end for a request, not among the `excluded`, that waits for `admit` or `follow`."""
        return bool(self._opening) or any(context not in excluded for context in self._changed.values())

    @property
    def has_closed(self) -> bool:
        """Whether closed requests still have rows."""
        return bool(self._closing)

    @property
    def is_behind(self) -> bool:
        """Whether `admit` or `extend` has something to do."""
        return bool(self._opening) or any(
            self._is_granted(context) and self.kv_manager.num_extendable(context) for context in self._contexts.values()
        )

    def take_closed_rows(self) -> list[int]:
        """Return the rows of requests that were closed since the last call and are not released yet."""
        rows, self._closed_rows = self._closed_rows, []
        return rows

    @property
    def has_changes(self) -> bool:
        """Whether `follow` has something to do."""
        return bool(self._changed or self._deferred)

    @property
    def num_incomplete(self) -> int:
        """Number of requests whose root or context may have to be run."""
        return len(self._incomplete)

    def find(self, handle: int) -> DraftContext | None:
        """Return the request of a tree, if it has a row and is not closed."""
        return self._contexts.get(handle)

    def expects(self, handle: int) -> bool:
        """Whether the running burst runs this tree's root, or the forest will follow a commit when the burst ends."""
        context = self._contexts.get(handle)
        if context is None or not (context.root_in_burst or context.known < context.tree.author.committed_len):
            return False
        return self._is_granted(context)

    def owes_block(self, handle: int) -> bool:
        """Whether this is a lone request whose tree gets its nodes once its root is run with the target's features."""
        context = self._contexts.get(handle)
        if context is None or not self.is_lone or not (context.kv_len or context.num_with_features):
            return False  # verify sends features only after an answer
        if self._is_at_end(context) or not self._is_granted(context):
            return False
        return not context.root_final or context.known < context.tree.author.committed_len

    @property
    def is_lone(self) -> bool:
        """Whether there is only one request, which gets one answer per commit; see GrowthOptions.lone_nodes."""
        return self._options.lone_nodes > 0 and len(self.rows) == 1

    def open(self, tree: Tree) -> None:
        """Begin a request. `admit` gives it a row."""
        self._opening[tree.handle] = tree, PendingFeatures(self._runner.join)

    def change(self, tree: Tree) -> None:
        """Note that a tree, its credit or its pause changed, so that `follow` and `follow_ahead` look at it."""
        context = self._contexts.get(tree.handle)
        if context is not None:
            self._changed[tree.handle] = context

    def close(self, tree: Tree) -> None:
        """End a request, also after a refusal. `release_closed` frees its row and pages."""
        self._opening.pop(tree.handle, None)
        for waiting in (self._changed, self._deferred, self._incomplete):
            waiting.pop(tree.handle, None)
        context = self._contexts.pop(tree.handle, None)
        if context is not None:
            # Keeps the publisher from appending more of its nodes.
            context.known = -1
            self._forest.quotas[context.row] = 0
            self._closing.append(context)
            self._closed_rows.append(context.row)

    def take_features(self, tree: Tree, features: Features) -> None:
        """Keep the target's features until the tokens behind them are run with them."""
        context, opening = self._contexts.get(tree.handle), self._opening.get(tree.handle)
        if not self._shape.lag or (context is None and opening is None):
            return
        if features.start + features.count > self._options.max_positions:  # nothing else bounds them
            return
        start, values = features.start, self._runner.project(features)
        if opening is not None:
            opening[1].add(start, values, since=self._shape.lag - 1)
        elif context is not None:
            context.take_features(start, values)
            # Do not cut a burst short if nothing waits for the features.
            waits = not (context.root_run or context.root_in_burst) or self.kv_manager.num_extendable(context)
            waits = waits or context.is_root_stale
            (self._changed if waits else self._deferred)[tree.handle] = context

    def release_closed(self) -> None:
        """Free rows and pages of closed requests."""
        for context in self._closing:
            del self.rows[context.row]
            self._forest.close(context.row)
            self._free_rows.append(context.row)
            with suppress(Exception):
                self.kv_manager.close(context)
        self._closing.clear()
        self._closed_rows.clear()

    def admit(self) -> None:
        """Free the rows of closed requests, and give rows to opened ones."""
        self.release_closed()
        opening, self._opening = self._opening, {}
        for tree, features in opening.values():
            self._assign_row(tree, features)

    def follow(self) -> None:
        """Re-root the forest along new committed tokens, and bring the changed requests up to date."""
        changed = list((self._deferred | self._changed).values())
        self._changed.clear()
        self._deferred.clear()
        behind: list[DraftContext] = []
        for context in changed:
            fresh = context.tree.author.tokens[context.known :]
            if refusal := self._refusal(context.tree, fresh):
                self._refuse(context.tree, refusal)
            elif fresh:
                behind.append(context)
        self._reroot(behind, discards=self._options.lockstep_steps > 0 or self.is_lone)
        self.update(changed)
        self._forest.tidy()

    def follow_ahead(self, excluded: Container[DraftContext], *, misses: bool) -> list[DraftContext]:
        """Re-root the forest while a burst is running; returns the requests whose trees or features changed.

        Entries keep their numbers, and candidates that the burst brings below dead nodes are dead. Everything but trees
        and their bounds waits for `follow`. So do the `excluded` requests, whose committed tokens the burst runs.
        Without `misses`, only commits whose path is in the forest are followed.
        """
        behind: list[DraftContext] = []
        others: list[DraftContext] = []
        for context in self._changed.values():
            tokens = context.tree.author.tokens[context.known :]
            if context in excluded or self._refusal(context.tree, tokens):
                continue
            if not tokens:
                if misses and context.lag and self._is_granted(context):
                    others.append(context)
            elif misses or has_path(self._forest, context.row, tokens):
                behind.append(context)
        self._reroot(behind)
        for context in behind:
            context.root_in_burst = not context.root_run  # this burst will run it, or the next
        for context in (*behind, *others):
            self._set_bounds(context)
            handle = context.tree.handle
            self._deferred[handle] = self._changed.pop(handle)
        return behind + others

    def mark_incomplete(self, context: DraftContext) -> None:
        """Note that a request's root or context may have to be run."""
        self._incomplete[context.tree.handle] = context

    def note_root_runs(self) -> None:
        """Note which new roots the running burst has run."""
        for context in self._deferred.values():
            self._note_root_run(context)

    def update(self, contexts: Iterable[DraftContext]) -> None:
        """Update requests whose root, tree, credit or features may have changed."""
        changed = list(contexts)
        is_full = self._options.most_steps > 0 and any(self.kv_manager.is_full(context) for context in changed)
        for context in changed:
            self._update(context)
        if is_full:
            for context in list(self._contexts.values()):
                if context.root_run:
                    self._move_final(context, along=True)
        self.kv_manager.free_slots()

    def extend(self) -> bool:
        """Compute up to a chunk of context tokens in one forward; returns whether there were any."""
        kv_manager, waiting = self.kv_manager, self._incomplete.values()
        behind = (one for one in waiting if self._is_granted(one) and kv_manager.num_extendable(one))
        served, failed = self.kv_manager.extend(behind, self._options.prompt_chunk)
        for context in served:  # they come last next time
            self._incomplete[context.tree.handle] = self._incomplete.pop(context.tree.handle)
        for context, error in failed:
            self.fail(context, error)
        return bool(served or failed)

    def to_run(self, needs_run: Callable[[DraftContext], bool]) -> list[DraftContext]:
        """Return the requests of which a burst must run something now; those that lack nothing are forgotten here."""
        return [context for context in list(self._incomplete.values()) if self._is_to_run(context, needs_run)]

    def mark_scheduled(self, context: DraftContext) -> None:
        """Note that the running burst, or the one launched next, runs what a request lacks."""
        context.root_in_burst = not context.root_run
        self._incomplete.pop(context.tree.handle, None)

    def spend(self, rows: Iterable[int], num_steps: int) -> None:
        """Lockstep: count the steps that a burst ran of the trees in these rows."""
        for row in rows:
            context = self.rows[row]
            context.steps_left = max(0, context.steps_left - num_steps)
            self._set_bounds(context)

    def complete(self, growing: Sequence[int]) -> None:
        """Lockstep: mark trees with nothing more to run as complete, which those in rows `growing` are not."""
        for row, context in self.rows.items():
            if context.root_run and context.steps_left and row not in growing:
                context.steps_left = 0

    def fail_rows(self, rows: Iterable[int]) -> None:
        """Decline the requests of a failed burst, since the state of their KV is unknown."""
        for row in rows:
            context = self.rows[row]
            if context.tree.handle in self._contexts:
                self._refuse(context.tree, _FAILED)

    def fail(self, context: DraftContext, error: Exception) -> None:
        """Decline one request; raises the error again if the device failed."""
        raise_device_failure(error)
        if isinstance(error, DeclinedError):
            self._refuse(context.tree, error.refusal)
        else:
            _logger.error("request %d: the draft model failed", context.tree.author.request, exc_info=error)
            self._refuse(context.tree, _FAILED)

    def _assign_row(self, tree: Tree, features: PendingFeatures) -> None:
        author = tree.author
        if refusal := self._refusal(tree, author.tokens):
            self._refuse(tree, refusal)
            return
        if not self._free_rows:
            self._refuse(tree, Refusal(DeclineReason.OVERLOADED, f"{self._shape.num_rows} requests are open"))
            return
        row = self._free_rows.pop()
        context = self._begin(tree, row, features)
        self._contexts[tree.handle] = self.rows[row] = context
        self._forest.set_root(row, author.tokens[-1], context.root, author.root)
        try:
            self.kv_manager.open(context)
        except Exception as error:
            self.fail(context, error)
            return
        self._changed[tree.handle] = context

    def _begin(self, tree: Tree, row: int, features: PendingFeatures) -> DraftContext:
        """Return the context of an opened request, cut if it is long. `features` that came already are of all of it."""
        shape, options = self._shape, self._options
        cut = cut_context(WHOLE, tree.author.committed_len - 1 - shape.lag, shape.window, shape.page_size)
        sinks = None
        if cut.gap:
            sinks = PendingFeatures(self._runner.join)
            for first, part in features.cut(0, cut.sinks):
                sinks.add(first, part, since=0)
        context = DraftContext(
            tree, row, shape.lag, features, options.lockstep_steps, options.renews_roots, cut=cut, sinks=sinks
        )
        if cut.gap:
            features.forget(context.end - 1)
        return context

    def _refusal(self, tree: Tree, fresh: Sequence[int]) -> Refusal | None:
        """Return why the model cannot go on with a request, whose `fresh` tokens are new; None if it can."""
        length, options = tree.author.committed_len, self._options
        if length > options.max_positions:
            return Refusal(DeclineReason.TOO_LONG, f"{length} tokens, at most {options.max_positions}")
        if max(fresh, default=0) >= options.vocab_size:
            detail = f"a token id is outside the draft's vocabulary of {options.vocab_size}"
            return Refusal(DeclineReason.INVALID, detail)
        return None

    def _reroot(self, contexts: Sequence[DraftContext], *, discards: bool = False) -> None:
        """Let the forest and the contexts follow the commits to these requests."""
        if not contexts:
            return
        steps: list[RerootStep] = []
        for context in contexts:
            author = context.tree.author
            tokens, restarted = author.tokens[context.known :], author.epoch != context.epoch
            steps.append(RerootStep(context.row, tokens, author.root, restarted, discards))
        for context, step, result in zip(contexts, steps, reroot(self._forest, steps), strict=True):
            context.follow(result.slots, len(step.tokens), root_run=self._has_run_root(context))
            context.epoch = context.tree.author.epoch
            context.steps_left = self._options.lockstep_steps
            if step.restarted or not result.found:
                context.seen = 1

    def _has_run_root(self, context: DraftContext) -> bool:
        return bool(self._forest.entries.slots[self._forest.roots[context.row]] >= 0)

    def _note_root_run(self, context: DraftContext) -> None:
        if not context.root_run and self._has_run_root(context):
            context.root_run, context.root_final, context.root_in_burst = True, not context.lag, False

    def _update(self, context: DraftContext) -> None:
        if context.tree.handle not in self._contexts:
            return
        self._note_root_run(context)
        # Verify has no tree after a miss, so the root runs first and KV is moved after that.
        if (context.root_run or len(context.uncached) > self.kv_manager.max_forced) and not self._move_final(context):
            return
        if self._options.adopts_foreign_nodes and context.seen < context.tree.author.next_id:
            self._forest.adopt(context.row, context.tree.author, context.seen)
            context.seen = context.tree.author.next_id
        self._set_bounds(context)
        self._incomplete[context.tree.handle] = context

    def _move_final(self, context: DraftContext, *, along: bool = False) -> bool:
        """Move KV of committed tokens to the context, if it is worth it. On failure, call `fail` and return False."""
        try:
            self.kv_manager.move_final(context, along=along)
        except Exception as error:
            self.fail(context, error)
            self.kv_manager.free_slots()
            self.release_closed()  # its pages may be enough for the others
            return False
        return True

    def _set_bounds(self, context: DraftContext) -> None:
        options, forest, row = self._options, self._forest, context.row
        region, limits = self._shape.region, self._grower.limits
        wanted = _RUN_PER_CREDIT * self._grower.growth.granted(context.tree, limits)
        quota = min(wanted, region - region // 4 - 8)
        is_done = options.lockstep_steps > 0 and not context.steps_left
        if self.is_lone:
            is_done = context.root_final or context.num_with_features <= len(context.uncached)
        forest.quotas[row] = 0 if is_done or self._is_at_end(context) or quota <= 0 else quota + 1
        forest.last_positions[row] = min(context.root + limits.depth, options.max_positions - self._reach) - 1

    def _is_at_end(self, context: DraftContext) -> bool:
        """Whether a burst below the root could pass the longest sequence."""
        return context.root + self._reach >= self._options.max_positions

    @property
    def _reach(self) -> int:
        """Most levels that a burst adds."""
        return max(self._options.fresh_steps, self._options.most_steps)

    def _is_to_run(self, context: DraftContext, needs_run: Callable[[DraftContext], bool]) -> bool:
        if self.kv_manager.num_extendable(context):
            return False
        if self._forest.quotas[context.row] > 0 and needs_run(context):
            return True
        del self._incomplete[context.tree.handle]
        context.root_in_burst = False
        return False

    def _is_granted(self, context: DraftContext) -> bool:
        """Whether verify lets the tree have nodes."""
        return self._grower.growth.granted(context.tree, self._grower.limits) > 0

    def _refuse(self, tree: Tree, refusal: Refusal) -> None:
        """Refuse a request, and close it here."""
        self._grower.growth.refuse(self._grower, tree, refusal)
        self.close(tree)
