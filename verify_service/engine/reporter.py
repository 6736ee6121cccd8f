"""What the engine tells the door: updates, rounds and its state, gathered and sent together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from outrider.host.pipe import Pipe
from outrider.protocol.generation import GenerationUpdate
from verify_service.engine.engine import VerifyEngine
from verify_service.engine.round import Entry, count_given
from verify_service.frames import DraftStatus, EngineUpdates, FromDoor, RoundFigures, RoundReport, Snapshot

SNAPSHOT_SECONDS = 0.25
"""Least time between two snapshots of a busy engine."""


class VerifyReporter:
    """The engine's observer and the end of every request's updates. Nothing leaves before `flush`."""

    def __init__(self, pipe: Pipe[FromDoor], clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = pipe
        self._clock = clock
        self._engine: VerifyEngine | None = None
        self._updates: list[tuple[int, GenerationUpdate]] = []
        self._ended: list[int] = []
        self._rounds: list[RoundReport] = []
        self._read: Counter[int] = Counter()
        self._snapshot: Snapshot | None = None
        self._snapshot_at = float("-inf")

    def watch(self, engine: VerifyEngine) -> None:
        """Report this engine's state, too."""
        self._engine = engine

    def update(self, number: int, update: GenerationUpdate) -> None:
        """What became of request `number`."""
        self._updates.append((number, update))

    def ended(self, number: int) -> None:
        """The cancelled request `number` has left the engine."""
        self._ended.append(number)

    def read(self, session: int, weight: int) -> None:
        """Messages of a draft were taken."""
        self._read[session] += weight

    def round(self, entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> None:
        """See Observer."""
        self._rounds.append(report_round(entries, updates, figures))

    def flush(self) -> None:
        """Send what has gathered, and now and then the engine's state."""
        snapshot = self._new_snapshot()
        if self._updates or self._ended or self._rounds or self._read or snapshot is not None:
            self._pipe.send(EngineUpdates(self._updates, self._ended, self._rounds, self._read, snapshot))
            self._updates, self._ended, self._rounds = [], [], []
            self._read.clear()

    def _new_snapshot(self) -> Snapshot | None:
        """The engine's state, if it is time for it and has changed."""
        engine, last = self._engine, self._snapshot
        if engine is None:
            return None
        now = self._clock()
        idle = not engine.scheduler.running and not engine.scheduler.waiting
        was_idle = last is not None and not last.num_running and not last.num_waiting
        if now - self._snapshot_at < SNAPSHOT_SECONDS and idle == was_idle:
            return None
        drafts = engine.drafts
        self._snapshot_at = now
        self._snapshot = Snapshot(
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            num_pages=engine.memory.num_pages,
            num_pages_used=engine.memory.num_used,
            num_preemptions=engine.scheduler.num_preemptions,
            dropped=dict(drafts.dropped),
            declined=dict(drafts.declined),
            drafts=[
                DraftStatus(replica.connection.address, replica.health.good, replica.health.typical)
                for replica in drafts.replicas.values()
            ],
            cost={int(width): float(seconds) for width, seconds in engine.budget.cost.table().items()},
            graphs_pending=engine.features.num_pending,
            drafts_waiting=engine.features.num_waiting,
        )
        return self._snapshot if self._snapshot != last else None


def report_round(entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> RoundReport:
    """A round as it travels."""
    grown = [pair for pair in zip(entries, updates, strict=True) if pair[0].nodes.scores]
    return RoundReport(
        num_nodes=sum(len(entry.nodes) for entry in entries),
        num_prefilled=sum(entry.num_extend for entry in entries if entry.prefills),
        committed=[len(update.token_ids) for update in updates if update.token_ids],
        accepted=[update.num_accepted_tokens for update in updates if update.num_accepted_tokens],
        num_failed=sum(update.error is not None for update in updates),
        figures=figures,
        num_grown=sum(len(entry.nodes) - len(entry.nodes.slots) for entry, _ in grown),
        num_grown_accepted=sum(
            max(update.num_accepted_tokens - count_given(entry.nodes, update.token_ids), 0) for entry, update in grown
        ),
    )
