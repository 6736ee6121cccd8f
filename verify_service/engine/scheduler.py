"""Decides which requests take part in a round, with how many tokens and which tree nodes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from outrider.tree.handshake import Terms
from outrider.tree.mirror import TreeMirror
from verify_service.engine.grammars import Grammars
from verify_service.engine.memory import Memory
from verify_service.engine.request import FairQueue, PromptTurns, Request
from verify_service.engine.round import Entry, node_sources
from verify_service.speculation.budget import Budget, Choice, Forest
from verify_service.speculation.draft_wait import DraftWaitState
from verify_service.speculation.drafts import Drafts

_UNLIMITED = 1 << 30

_MIN_LED_PAGES = 4
"""A request waits, a round or more, for another one to compute their common prefix only if that saves so many pages."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of requests and rounds. Those from max_round_tokens on say which rounds the executor can run."""

    vocab_size: int
    context_length: int
    max_running: int = 64
    max_waiting: int = 1024
    chunk_size: int = 256
    """Most prompt tokens computed in one round, over all requests."""
    max_nodes: int = 64
    """Most tree nodes in one round, over all requests."""
    max_hold_seconds: float = 0.02
    lockstep: bool = False
    """Every round waits for the drafts' answers to the last commits and takes their best nodes, whatever they cost."""
    spin: bool = False
    """A device waits for the host between rounds: while requests run, the engine never sleeps, and does other work in
    small pieces, so that it sees the end of a round at once. Costs a core."""
    shares_cores: bool = False
    """Drafts share cores with rounds, and grow between them: the answer to every commit may be worth a wait."""
    max_round_tokens: int = _UNLIMITED
    """Most tokens of a round, chunks of prefill aside; if there are more requests than that, they take turns."""
    max_depth: int = _UNLIMITED
    """Nodes deeper than this below the root are not taken."""
    root_apart: bool = False
    """Chunks of prefill stop before the root, which is always run beside the others' roots and nodes."""
    deterministic: bool = False
    """One shape for all rounds and one for all prefill, so that results depend on neither. Needs `root_apart`.

    After a preemption generated tokens are computed again as they were at first, beside roots and not in chunks. So is
    the prompt's last token, which was the first root.
    """
    max_extend: int = 32
    """Most tokens of one request that a round computes again in that way."""
    steady_rows: int = 0
    """See LanguageModel: chunks of a prompt with more rows are computed apart from all others."""

    def unserved_by(self, terms: Terms) -> str:
        """Say which of these limits a draft service with `terms` cannot serve; empty if it can serve all of them."""
        left = []
        if 0 < terms.vocab_size < self.vocab_size:
            left.append(f"texts with token ids from {terms.vocab_size} on, of {self.vocab_size}")
        if 0 < terms.max_positions < self.context_length:
            left.append(f"sequences of more than {terms.max_positions} tokens, of {self.context_length}")
        return " and ".join(left)

    def recomputes(self, request: Request) -> bool:
        """Whether chunks of prefill must not compute the request's next token.

        The prompt's last token, and those behind it, were first computed by decoding.
        """
        return self.deterministic and request.cached_len >= request.prompt_len - 1

    def is_apart(self, entry: Entry) -> bool:
        """Whether an entry is a chunk of prefill that is computed apart from roots and nodes."""
        if self.root_apart:
            return not entry.samples and not self.recomputes(entry.request)
        return entry.is_long(self.steady_rows)


class NodePlan(NamedTuple):
    """The trees of a round, and which of their nodes pay."""

    entries: Sequence[Entry]
    """Entries whose requests have a tree, in the forest's order."""
    forest: Forest
    choice: Choice
    awaited: Sequence[DraftWaitState]
    """States of requests whose draft may soon bring nodes."""
    num_tokens: int
    """Tokens that the round computes beside chosen nodes: roots, prefill chunks and nodes that grew on the device."""
    prefill_seconds: float
    """Seconds of prefill that is computed apart."""

    def note_end_chances(self, max_nodes: int) -> None:
        """Set how likely each awaited request's committed path runs past the nodes that the round takes of its tree.

        A round of `max_nodes` nodes has no room for deeper ones, which are less likely, so its chances count as 0.
        """
        if any(state.num_parts for state in self.awaited):
            has_room = self.choice.num_nodes < max_nodes
            trees = {mirror: tree for tree, mirror in enumerate(self.forest.mirrors)} if has_room else {}
            for state in self.awaited:
                tree = trees.get(state.mirror)
                state.end_chance = 0.0 if tree is None else self.forest.end_chance(tree, self.choice.num_nodes)


@dataclass(eq=False, repr=False)
class Scheduler:
    """Continuous batching at round granularity, in the order of a FairQueue; the last in rank gives way.

    Requests move waiting -> running -> (preempted -> waiting ->) ended. A running request holds pages; a waiting one
    holds none. `plan`, `choose` and `take` run between two rounds and are short; `release_ended` and `admit` can be
    called while one runs.
    """

    memory: Memory
    drafts: Drafts
    budget: Budget
    limits: EngineLimits
    forget: Callable[[Request], None]
    """Called for every request that gives up its pages."""
    grammars: Grammars
    waiting: FairQueue = field(default_factory=FairQueue)
    running: list[Request] = field(default_factory=list)
    num_preemptions: int = 0
    """Preemptions for lack of pages."""
    num_displaced: int = 0
    """Preemptions for newcomers."""
    _prompt_turns: PromptTurns = field(default_factory=PromptTurns)
    _ended: list[Request] = field(default_factory=list)
    _has_left: bool = False
    """Whether a request has left `running` since places were counted."""
    _first_rank: tuple[float, int, int] = (-math.inf, 0, 0)
    """Rank of the request that comes first in the next round, if not all fit."""

    @property
    def stalled(self) -> bool:
        """Whether all running requests wait for their grammars."""
        return bool(self.running) and all(one.grammar is not None and one.grammar.waits for one in self.running)

    def end(self, request: Request) -> None:
        """Remove a request, wherever it is. It keeps its pages until `release_ended`, or until others need them."""
        if request in self.running:
            self.running.remove(request)
            self._ended.append(request)
            self._has_left = True
        elif request in self.waiting:
            self.waiting.remove(request)
            self._ended.append(request)

    def release_ended(self) -> None:
        """Free what ended requests hold."""
        while self._ended:
            request = self._ended.pop()
            self._release(request)
            self.drafts.close(request)

    def admit(self) -> None:
        """Let as many waiting requests run as fit, and make sure that the next round finds free pages."""
        self._refill()
        while self.waiting and self._has_room(self.waiting.head):
            self._run(self.waiting.pop())

    def _has_room(self, request: Request) -> bool:
        """Whether a waiting request may run."""
        if len(self.running) >= self.limits.max_running:
            return False
        if not self.running:
            return True
        # Running requests have yet to take pages for their tokens. If prompts were let in regardless, they would make
        # way for each other, and be computed again.
        page_size = self.memory.page_size
        owed = sum(max(one.committed_len // page_size + 1 - len(one.pages), 0) for one in self.running)
        return self.memory.fits(request, owed)

    def _run(self, request: Request) -> None:
        """Start to run a request that has left the queue."""
        self._attach(request)
        if request.num_cached_prompt_tokens is None:
            request.num_cached_prompt_tokens = request.cached_len
            request.queue_seconds = time.monotonic() - request.arrived_at
        self.running.append(request)
        self._sort_running()
        if self.drafts.spec(request) is None:
            self.drafts.admit(request)
        else:
            self.drafts.resume(request)

    def _attach(self, request: Request) -> None:
        """Give a request that has computed nothing the cached pages of its prompt. If a running request is
        about to compute more of it, that one becomes its leader."""
        self.memory.attach(request)
        request.leader, request.shared_len = None, 0
        least = _MIN_LED_PAGES * self.memory.page_size
        for one in self.running:
            # A request that has a leader does not become one, so no two wait for each other.
            if one is not request and one.leader is None and self._prefills(one):
                length = self.memory.num_shareable(request, one, least)
                if length > request.shared_len:
                    request.leader, request.shared_len = one, length

    def _prefills(self, request: Request) -> bool:
        """Whether rounds compute more of a running request than its root."""
        is_held = request.grammar is not None and request.grammar.waits
        return len(request.tokens) - request.cached_len > 1 and not is_held

    def _end_following(self) -> None:
        """Let followers compute for themselves if their leaders have computed all shared tokens, or compute no more."""
        for request in self.running:
            leader = request.leader
            if leader is None or (
                leader.cached_len < request.shared_len and leader in self.running and self._prefills(leader)
            ):
                continue
            known, cached_len = request.num_cached_prompt_tokens or 0, request.cached_len
            self._attach(request)
            # After a preemption a leader may bring tokens that are counted already, or that the request itself had
            # computed for its first token.
            if request.committed_len == request.prompt_len:
                request.num_cached_prompt_tokens = known + max(request.cached_len - max(cached_len, known), 0)

    def _sort_running(self) -> None:
        self._has_left = False
        places = Counter[str]()
        for request in sorted(self.running, key=attrgetter("priority", "arrival")):
            request.place = places[request.key]
            places[request.key] += 1
        self.running.sort(key=attrgetter("rank"))

    def _newcomer(self) -> Request | None:
        """Return the waiting request, if any, for which a running one makes way: its API key has none that runs, and
        another key has several."""
        if not self.waiting:
            return None
        request = self.waiting.newcomer({one.key for one in self.running})
        if request is None or not self.running:
            return None
        self._sort_running()
        last = self.running[-1]
        return request if last.place and last.priority >= request.priority else None

    def _let_newcomers_in(self) -> None:
        """Let newcomers run in the next round, so that none has to wait for the end of another key's long answers."""
        while (request := self._newcomer()) is not None:
            # Requests that ended in the last round still hold pages, and places in the executor, that it may need.
            self.release_ended()
            if not self._has_room(request):
                request.has_displaced = True
                self.num_displaced += 1
                self._preempt(self.running[-1])
            if self._has_room(request):
                self.waiting.remove(request)
                self._run(request)

    def plan(self) -> list[Entry]:
        """Lay out the next round, without tree nodes. Pages cover every token of it."""
        self._let_newcomers_in()
        return self._plain_round() or self._general_round()

    def _plain_round(self) -> list[Entry]:
        """Lay out a round of one root per running request, as nearly all are; empty if it is not. Changes nothing."""
        entries: list[Entry] = []
        page_size = self.memory.page_size
        for request in self.running:
            cached_len = request.cached_len
            if len(request.tokens) != cached_len + 1 or cached_len >= len(request.pages) * page_size:
                return []
            if request.grammar is not None and request.grammar.waits:
                return []
            entries.append(Entry(request, 1))
        return entries if len(entries) <= self.limits.max_round_tokens else []

    def plan_ahead(self, entries: Sequence[Entry]) -> list[Entry]:
        """Lay out the round after that of `entries`, which is running; empty if that one must be read first.

        This is possible if, as far as is known, every running request commits one token in that round and goes on.
        Requests at their limit are left out. One that ends with a stop token takes part in a round too many, whose
        tokens are dropped: the round writes only behind the KV of committed tokens, in pages that the cache has not
        taken and that no request uses before the round is over.
        """
        ahead: list[Entry] = []
        if any(entry.max_grown for entry in entries):
            # The description of the running round's trees would be overwritten, its requests cancelled or not.
            return ahead
        if self._newcomer() is not None:
            return ahead
        planned = {entry.request for entry in entries if entry.num_tokens == 1 and entry.samples}
        for request in self.running:
            if request not in planned or request.is_masked or self.drafts.may_have_nodes(request):
                return []
            if request.draft_room <= 0:
                continue
            if not self.memory.reserve(request, request.cached_len + 2):
                return []
            ahead.append(Entry(request, 1, is_ahead=True))
        return ahead if len(ahead) <= self.limits.max_round_tokens else []

    def _general_round(self) -> list[Entry]:
        """Lay out any round: with chunks of prefill, without requests that wait for grammars, preempting if need be."""
        entries: list[Entry] = []
        extends, prompts = self._extends()
        if self._has_left:
            most_pages = sum(extends.values()) // self.memory.page_size + len(self.running)
            if self.memory.num_available < most_pages:  # else none is preempted, and sorting would lengthen the gap
                self._sort_running()
        num_tokens = index = 0
        # Preemption shortens the list from its end.
        while index < len(self.running):
            request = self.running[index]
            extend = extends.get(request, 0)
            if extend and self._make_room(request, request.cached_len + extend):
                entries.append(Entry(request, extend))
                if request not in prompts:
                    num_tokens += extend
            index += 1
        return entries if num_tokens <= self.limits.max_round_tokens else self._take_turns(entries)

    def _extends(self) -> tuple[dict[Request, int], set[Request]]:
        """Return how many tokens of each running request the next round may compute, nodes aside, and the requests that
        have more than a root to compute, in chunks of prefill."""
        limits, extends = self.limits, {}
        prompts: list[Request] = []
        self._end_following()
        for request in self.running:
            if request.grammar is None or not request.grammar.waits:
                missing = len(request.tokens) - request.cached_len
                extends[request] = min(missing, limits.max_extend)
                if missing > 1 and not limits.recomputes(request):
                    prompts.append(request)
        chunk = limits.chunk_size
        # A follower's turn is its leader's.
        turns = [_first_leader(request) for request in self._prompt_turns.order(prompts)]
        extends.update(dict.fromkeys(prompts, 0))
        for request in dict.fromkeys(turns):
            extends[request] = extend = self._chunk(request, chunk)
            # A round has time for only one entry that is padded to a whole chunk.
            chunk -= chunk if extend and limits.deterministic else extend
        return extends, set(prompts)

    def choose(self, entries: Sequence[Entry], num_grown: int = 0) -> NodePlan:
        """Choose the tree nodes that pay, over all requests of a planned round.

        `num_grown`: nodes that have grown on the device; up to half of what a round may take is left to them.
        """
        growing: list[Entry] = []
        mirrors: list[TreeMirror] = []
        depths: list[int] = []
        awaited: list[DraftWaitState] = []
        num_tokens = num_roots = num_apart = 0
        spec_of, max_depth = self.drafts.spec, self.limits.max_depth
        has_no_trees = self.drafts.resting or not self.drafts.replicas
        for entry in entries:
            num_roots += entry.samples
            is_apart = entry.prefills and self.limits.is_apart(entry)
            if is_apart:
                num_apart += entry.num_extend
            else:
                num_tokens += entry.num_extend
            if has_no_trees or is_apart or not entry.samples:
                # Below a root that is computed apart, nodes are better taken when the token behind it is known.
                continue
            if entry.num_extend > 1 and entry.scored:
                # The width of a forward changes the rounding of its rows: a prompt's scores must not depend on a draft.
                continue
            spec = spec_of(entry.request)
            if spec is None or (room := entry.request.draft_room) <= 0:
                continue
            if (state := spec.wait).expects:
                awaited.append(state)
            if (mirror := spec.mirror).has_nodes:
                growing.append(entry)
                mirrors.append(mirror)
                depths.append(room if room < max_depth else max_depth)
        forest = Forest(mirrors, depths)
        max_nodes = self.budget.max_nodes
        num_kept = min(num_grown, max_nodes - max_nodes // 2)
        num_tokens += num_kept
        most = min(self.limits.max_round_tokens - num_tokens, max_nodes - num_kept)
        prefill_seconds = self.budget.cost.seconds(num_apart) if num_apart else 0.0
        choice = self.budget.choose(num_tokens, num_roots, forest.best(), most, prefill_seconds)
        plan = NodePlan(growing, forest, choice, awaited, num_tokens, prefill_seconds)
        if awaited:
            plan.note_end_chances(most)
        return plan

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """Plan and choose without effect while a round runs, to keep the code warm."""
        self._plain_round()
        plan = self.choose(entries)
        plan.forest.take(plan.choice.num_nodes)

    def take(self, plan: NodePlan) -> None:
        """Give a round the chosen nodes, except those that a grammar forbids."""
        self.budget.took(plan.choice)
        if not plan.choice.num_nodes:
            return
        taken = self.grammars.allowed(plan.entries, plan.forest.take(plan.choice.num_nodes))
        for entry, nodes in zip(plan.entries, taken, strict=True):
            # Nodes are worth no preemption: without pages the round goes without them.
            if nodes.token_ids and self.memory.reserve(
                entry.request, entry.request.cached_len + entry.num_extend + len(nodes)
            ):
                entry.nodes = nodes
                if entry.request.params.trace:
                    self._mark(entry)

    def _mark(self, entry: Entry) -> None:
        """Note where the nodes of a traced request come from, before its tree is re-rooted."""
        spec = self.drafts.spec(entry.request)
        if spec is not None:
            sources = spec.replica.terms.sources if spec.replica is not None else ()
            entry.node_sources = node_sources(spec.mirror, entry.nodes.slots, sources)

    def _chunk(self, request: Request, room: int) -> int:
        """Return how many tokens of a request's prompt the next round computes, at most `room`."""
        if self.limits.root_apart:
            end = request.prompt_len if self.limits.deterministic else request.committed_len
            return min(end - 1 - request.cached_len, room)
        # Rounding depends on the cuts between chunks, so these, one at the prompt's end, depend on the request alone.
        to_prompt_end = request.prompt_len - request.cached_len
        end = request.prompt_len if to_prompt_end > 0 else request.committed_len
        whole = min(end - request.cached_len, self.limits.chunk_size)
        return whole if whole <= room else 0

    def _take_turns(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries that fit into a round; those left out come first in the next one."""
        chunks = [entry for entry in entries if self.limits.is_apart(entry)]
        others = [entry for entry in entries if not self.limits.is_apart(entry)]
        others.sort(key=lambda entry: entry.request.rank < self._first_rank)
        room, taken = self.limits.max_round_tokens, []
        for entry in others:
            room -= entry.num_extend
            if room < 0:
                self._first_rank = entry.request.rank
                break
            taken.append(entry)
        return chunks + taken

    def _refill(self) -> None:
        """Free pages for the roots and nodes of a round, and some more, so that not every round evicts a few."""
        need = 2 * len(self.running) + self.limits.max_nodes // self.memory.page_size
        need = min(need, self.memory.num_pages // 16)
        if self.memory.pool.num_free < need:
            self.memory.refill(2 * need)

    def _make_room(self, request: Request, length: int) -> bool:
        """Reserve pages, preempting the last in rank until they suffice; False when the request itself gave way.

        Requests are planned by rank, so none that is in the round already is preempted.
        """
        if self.memory.reserve(request, length):
            return True
        self.release_ended()
        while not self.memory.reserve(request, length):
            last = self.running[-1]
            self.num_preemptions += 1
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.drafts.pause(request)
        self.waiting.put_back(request)

    def _release(self, request: Request) -> None:
        self._prompt_turns.leave(request)
        self.memory.release(request)
        self.forget(request)


def _first_leader(request: Request) -> Request:
    """Return the request that computes for this one; itself if it has no leader."""
    while request.leader is not None:
        request = request.leader
    return request
