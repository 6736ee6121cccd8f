"""Grammars of the engine's requests: compiled on a thread, cached, and a mask for every root and node of a round."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from outrider.errors import InternalError, InvalidRequestError, OutriderError
from outrider.grammar.compiler import (
    CompiledGrammar,
    GrammarNode,
    GrammarState,
    GrammarVocabulary,
    TokenPath,
    compile_grammar,
)
from outrider.grammar.spec import Grammar
from outrider.logs import get_logger
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Nodes
from verify_service.speculation.budget import Forest
from verify_service.speculation.drafts import Drafts

log = get_logger(__name__)

POLL_SECONDS = 0.001
"""How often an idle engine checks whether a grammar is compiled."""
_MAX_CACHED_GRAMMARS = 32
"""Most compiled grammars that are kept; each takes a few megabytes, 40 at the very most."""
_MAX_AHEAD_NODES = 32
"""Best nodes of a request's tree whose masks are computed while a round runs."""
_MAX_MASK_SECONDS = 0.001
"""Time for masks of nodes between two rounds; a node without a mask by then is left to a later round."""


class _CompileJob(NamedTuple):
    """A job for the thread that compiles."""

    grammar: Grammar
    worn: CompiledGrammar | None = None
    """The automaton to replace, if the grammar was compiled before."""


class _JobTurns:
    """A queue of jobs in which API keys take turns, so that many grammars of one key delay another's by only one."""

    def __init__(self) -> None:
        self._turns: dict[str, deque[_CompileJob | None]] = {}
        """Jobs by key; the first key has the next turn."""
        self._filled = threading.Condition()

    def put(self, job: _CompileJob | None, key: str = "") -> None:
        """Queue a job."""
        with self._filled:
            self._turns.setdefault(key, deque()).append(job)
            self._filled.notify()

    def get(self) -> _CompileJob | None:
        """Wait for a job, and take it."""
        with self._filled:
            self._filled.wait_for(lambda: self._turns)
            key = next(iter(self._turns))
            jobs = self._turns.pop(key)
            job = jobs.popleft()
            if jobs:
                self._turns[key] = jobs
            return job


Begin = Callable[[Request], None]
Fail = Callable[[Request, OutriderError], None]


class Grammars:
    """Grammars of all requests. The engine's thread uses this object; a thread of its own compiles.

    Masks of nodes are computed while a round runs (`work`). Between rounds only missing ones are computed: that of a
    root which no draft had foreseen, and a few others.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None, drafts: Drafts, patient: bool) -> None:
        """Without a vocabulary, requests with a grammar are refused.

        `patient`: no device waits between rounds, so there is time for all missing masks.
        """
        self._vocabulary = vocabulary
        self._drafts = drafts
        self._patient = patient
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._waiting: dict[str, list[tuple[Request, Begin, Fail]]] = {}
        """Requests by the digest of a grammar that is being compiled."""
        self._renewing: dict[CompiledGrammar, list[GrammarState]] = {}
        """States of answers that wait for their grammar to be compiled again."""
        self._jobs = _JobTurns()
        self._done: SimpleQueue[tuple[_CompileJob, CompiledGrammar | OutriderError]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = 0

    @property
    def compiling(self) -> bool:
        """Whether requests wait for their grammar."""
        return bool(self._waiting or self._renewing)

    def open(self, request: Request, begin: Begin, fail: Fail) -> None:
        """Compile a request's grammar, then `begin` or `fail` the request; at once if there is nothing to compile."""
        grammar = request.params.sampling.grammar
        if grammar is None:
            begin(request)
        elif self._vocabulary is None:
            problem = "cannot be used: the grammar library does not know the model's tokenizer"
            fail(request, InvalidRequestError(grammar.field, problem, "leave it out"))
        elif (known := self._cache.get(grammar.digest)) is not None and not known.worn:
            self._cache.move_to_end(grammar.digest)
            request.grammar = GrammarState(known)
            begin(request)
        else:
            waiting = self._waiting.setdefault(grammar.digest, [])
            waiting.append((request, begin, fail))
            if len(waiting) == 1:
                if self._thread is None:
                    arguments = (self._vocabulary,)
                    self._thread = threading.Thread(target=self._compile, args=arguments, name="grammars", daemon=True)
                    self._thread.start()
                self._jobs.put(_CompileJob(grammar), request.key)

    def poll(self) -> None:
        """Begin, or fail, the requests whose grammars were compiled."""
        while self.compiling and not self._done.empty():
            (grammar, worn), outcome = self._done.get()
            if worn is not None:
                self._renewed(worn, outcome)
                continue
            if isinstance(outcome, CompiledGrammar):
                outcome.renew = self._renew
                self._cache[grammar.digest] = outcome
                self._cache.move_to_end(grammar.digest)
                while len(self._cache) > _MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            for request, begin, fail in self._waiting.pop(grammar.digest, ()):
                if request.finished:
                    continue
                if isinstance(outcome, OutriderError):
                    fail(request, outcome)
                else:
                    request.grammar = GrammarState(outcome)
                    begin(request)

    def stop(self) -> None:
        """Tell the thread to end."""
        if self._thread is not None:
            self._jobs.put(None)

    def allowed(self, entries: Sequence[Entry], taken: Sequence[Nodes]) -> Sequence[Nodes]:
        """Return those nodes of each entry that its request's grammar allows and that have a mask.

        `taken`: the nodes of each entry. Missing masks are computed as long as there is time; forbidden nodes are
        counted.
        """
        if all(entry.request.grammar is None for entry in entries):
            return taken
        allowed: list[Nodes] = []
        deadline = None if self._patient else perf_counter() + _MAX_MASK_SECONDS
        for entry, nodes in zip(entries, taken, strict=True):
            state = entry.request.grammar
            if state is not None:
                follow(state, entry.request)
                nodes = nodes.only([node is not None for node in self._states(state, nodes, deadline)])
            allowed.append(nodes)
        return allowed

    def mask(self, entries: list[Entry]) -> list[Entry]:
        """Give entries their masks, one for the root and one for each node; return the entries that can be run.

        A root's mask is computed if it is missing. If the library gave up on it, the entry gets the error, and its
        samples are to be dropped. An entry whose grammar must first be compiled again is not returned. Bad words, which
        never come with a grammar, make masks as well.
        """
        ready = []
        for entry in entries:
            ready.append(entry)
            request = entry.request
            if request.bad_words is not None and entry.samples:
                nodes = entry.nodes
                entry.masks = request.bad_words.masks(
                    request.tokens, request.prompt_len, nodes.token_ids, nodes.parents
                )
            state = request.grammar
            if state is None or not entry.samples:
                continue
            follow(state, request)
            root = state.mask(state.root, ())
            if root is None and state.waits:
                ready.pop()
                continue
            if root is None:
                entry.error = state.error or InternalError("the grammar's state was lost")
                entry.nodes, entry.node_sources, entry.masks = Nodes(), None, [state.end_mask]
                continue
            states = self._states(state, entry.nodes, None)
            masks = [node.mask for node in states if node is not None and node.mask is not None]
            if len(masks) < len(entry.nodes):
                entry.nodes, entry.node_sources, masks = Nodes(), None, []
            entry.masks = [root, *masks]
        return ready

    def work(self, entries: Sequence[Entry]) -> bool:
        """Compute one mask ahead of the next round, if one is missing. Returns whether it did.

        Each call looks at another request: looking at many trees would take too long to notice the end of a round.
        """
        bound = [entry.request for entry in entries if entry.request.grammar is not None]
        if not bound:
            return False
        self._turn += 1
        request = bound[self._turn % len(bound)]
        state, spec = request.grammar, self._drafts.spec(request)
        if state is None or spec is None or not spec.mirror.has_nodes or request.finished:
            return False
        forest = Forest([spec.mirror], [_MAX_AHEAD_NODES])
        count = sum(1 for _ in islice(forest.best(), _MAX_AHEAD_NODES))
        follow(state, request)
        return self._prepare_one(state, forest.take(count)[0])

    def _prepare_one(self, state: GrammarState, nodes: Nodes) -> bool:
        if state.root.mask is None:
            return state.mask(state.root, ()) is not None
        found: list[GrammarNode | None] = []
        paths: list[TokenPath] = []
        for token, parent in zip(nodes.token_ids, nodes.parents, strict=True):
            above = state.root if parent < 0 else found[parent]
            node = None if above is None or above.mask is None else state.child(above, token)
            found.append(node)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            if node is not None and node.mask is None and not node.gave_up:
                return state.mask(node, paths[-1]) is not None
        return False

    def _states(self, state: GrammarState, nodes: Nodes, deadline: float | None) -> list[GrammarNode | None]:
        """Return the state of each node, with its mask; None if forbidden, or without a mask past the deadline."""
        if not len(nodes) or state.mask(state.root, ()) is None:
            return [None] * len(nodes)
        found: list[GrammarNode | None] = []
        paths: list[TokenPath] = []
        for token, parent in zip(nodes.token_ids, nodes.parents, strict=True):
            above = state.root if parent < 0 else found[parent]
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            if above is None:
                found.append(None)
                continue
            node = state.child(above, token)
            if node is None:
                self._drafts.dropped["grammar"] += 1
            elif node.mask is None:
                late = deadline is not None and perf_counter() > deadline
                node = None if late or state.mask(node, path) is None else node
            found.append(node)
        return found

    def _renew(self, state: GrammarState) -> None:
        """Queue a grammar to be compiled again, once for all answers that need it."""
        waiting = self._renewing.setdefault(state.compiled, [])
        waiting.append(state)
        if len(waiting) == 1:
            self._jobs.put(_CompileJob(state.compiled.grammar, state.compiled))

    def _renewed(self, worn: CompiledGrammar, outcome: CompiledGrammar | OutriderError) -> None:
        if isinstance(outcome, CompiledGrammar):
            worn.adopt(outcome)
        for state in self._renewing.pop(worn, ()):
            state.renewed(outcome if isinstance(outcome, OutriderError) else None)

    def _compile(self, vocabulary: GrammarVocabulary) -> None:
        while (job := self._jobs.get()) is not None:
            outcome: CompiledGrammar | OutriderError
            try:
                outcome = compile_grammar(job.grammar, vocabulary)
            except OutriderError as error:
                outcome = error
            except Exception:
                log.exception("a grammar could not be compiled")
                outcome = InternalError("the grammar could not be compiled")
            self._done.put((job, outcome))


def follow(state: GrammarState, request: Request) -> None:
    """Advance a state to its request's newest committed token."""
    known = request.prompt_len + state.num_committed
    if known < len(request.tokens):
        state.follow(request.tokens[known:])
