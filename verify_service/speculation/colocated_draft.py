"""A drafter in the engine's own process: it grows trees where a round would wait for a draft service."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.drafter import workplace
from outrider.drafting.model.features import with_rows
from outrider.drafting.requests import AnswerPort, Requests
from outrider.errors import raise_device_failure
from outrider.grammar.compiler import GrammarVocabulary
from outrider.logs import get_logger
from outrider.protocol.speculation import DraftMessage, Features, FeaturesBegin, VerifyMessage
from outrider.tree.handshake import Terms
from verify_service.features.sender import FeatureSender
from verify_service.speculation.drafts import Drafts

log = get_logger(__name__)

_WORK_SECONDS = 0.001
"""How long work that no round waits for runs between two looks at the clock, and at messages."""


class ColocatedDraft:
    """A connection to a drafter in this process. The engine's thread alone calls it.

    Messages of verify are handled at once; trees grow, and nodes are sent, only in `grow` and `work`. An error
    switches the drafter off, and answers go on without it; an error that a grower catches costs one request its tree,
    as in a draft service.
    """

    address = "colocated"
    has_room = True

    def __init__(
        self,
        drafter: AnyDrafter,
        options: DraftOptions,
        terms: Terms,
        token_ids_hash: str = "",
        vocabulary: GrammarVocabulary | None = None,
    ) -> None:
        """`token_ids_hash`, `vocabulary`: of the target's tokenizer, as grammars see it."""
        self.terms = terms
        self.speculative_algorithm = options.speculative_algorithm
        self._drafter = drafter
        self._requests = Requests(drafter, options)
        self._requests.grammars.serve(token_ids_hash, vocabulary)
        self._answers: list[DraftMessage] = []
        self._port = AnswerPort(terms.vocab_size, None, self._answers.extend)
        self._stream: FeaturesBegin
        self._failed = False
        self._drafts: Drafts
        self._features: FeatureSender

    def join(self, drafts: Drafts, features: FeatureSender) -> None:
        """Serve an engine's requests from now on."""
        self._drafts, self._features = drafts, features
        drafts.connected(self, self.terms)
        features.connected(self)

    def send(self, messages: list[VerifyMessage]) -> None:
        """See DraftConnection."""
        self._guarded(partial(self._handle, messages))

    def begin_features(self, begin: FeaturesBegin) -> None:
        """See DraftConnection: the stream is accepted at once."""
        self._stream = begin
        projection = self._drafter.needs.projection if begin.wants_projection else None
        self._features.opened(self, 0, projection=projection)

    def send_features(self, messages: list[Features]) -> None:
        """See DraftConnection."""
        stream = self._stream
        pieces = [replace(message, projected=stream.projected) for message in messages]
        self._guarded(lambda: self._handle(with_rows(pieces, stream.row_bytes, None)))
        self._features.released(self, messages[-1].sequence)

    def reset(self) -> None:
        """See DraftConnection. Does nothing: no message to this draft can be lost."""

    def grow(self, seconds: float, interrupted: Callable[[], bool]) -> bool:
        """Grow until there are nodes to send, for about `seconds` at most or until `interrupted()`, and send them.

        Returns whether there was anything to grow. If not, no round waits for this draft until the next commit.
        """
        if self._has_left():
            return False
        growth = self._requests.growth
        if growth.idle and not growth.has_updates:
            self._drafts.on_silence(self)
            return False
        self._guarded(partial(self._grow, time.perf_counter() + seconds, interrupted))
        self._send_answers()
        return True

    def work(self, seconds: float, interrupted: Callable[[], bool], *, is_idle: bool = False) -> None:
        """Do work that no round waits for, for about `seconds`: compute prompts, learn texts, acknowledge commits.

        A draft in doubt grows, too, if it got a commit to be judged by. `is_idle`: there is no round, so all
        work is done that there is.
        """
        if not self._has_left():
            self._guarded(partial(self._work, time.perf_counter() + seconds, interrupted, is_idle))
            self._send_answers()

    def _handle(self, messages: list[VerifyMessage] | list[Features]) -> None:
        for message in messages:
            self._requests.handle(self._port, message)

    def _grow(self, end: float, interrupted: Callable[[], bool]) -> None:
        growth = self._requests.growth
        while not growth.idle:
            growth.grow(end, interrupted)
            if growth.has_updates or time.perf_counter() >= end or interrupted():
                return

    def _work(self, end: float, interrupted: Callable[[], bool], is_idle: bool) -> None:
        growth = self._requests.growth
        if self._drafts.awaits_probe_answer(self):
            self._grow(math.inf, interrupted)
        while growth.is_behind or (is_idle and not growth.idle):
            if interrupted() or time.perf_counter() >= end:
                return
            growth.grow(end, interrupted)
        while growth.has_work and not interrupted() and (now := time.perf_counter()) < end:
            growth.work(min(now + _WORK_SECONDS, end))

    def _send_answers(self) -> None:
        self._guarded(self._requests.send_nodes)
        if self._answers:
            self._drafts.receive(self, self._answers, time.monotonic())
            self._answers.clear()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action where the drafter works. An error switches the drafter off; a broken device is raised."""
        if self._failed:
            return
        try:
            with workplace(self._drafter):
                action()
        except Exception as error:
            raise_device_failure(error)
            self._failed = True
            log.error(
                "drafting in this process is switched off: it failed with %s: %s; answers go on without it",
                *(type(error).__name__, error),
            )

    def _has_left(self) -> bool:
        """Whether the drafter is switched off; if so, take it out of the engine."""
        if self._failed and self in self._drafts.replicas:
            self._features.disconnected(self)
            self._drafts.disconnected(self)
        return self._failed
