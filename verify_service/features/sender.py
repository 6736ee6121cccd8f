"""The target's features for drafts that take them: decides when they are stored, and which are sent to which draft."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from outrider.cache.pages import page_slots
from outrider.errors import OutriderError
from outrider.logs import get_logger
from outrider.protocol.speculation import FEATURE_ITEM_BYTES, MAX_FEATURE_BYTES, Features, FeaturesBegin
from outrider.tree.handshake import PROJECTED, Projection
from verify_service.engine.memory import Memory
from verify_service.engine.round import Pending
from verify_service.executors.base import Executor
from verify_service.features.staging import STAGE_BYTES, FeatureChannel, FeaturePlan, StagedRows
from verify_service.speculation.drafts import DraftReplica, Drafts, SpeculativeRequest
from verify_service.speculation.replica import DraftConnection

log = get_logger(__name__)

MAX_STORED_LAYERS = 16
"""Most layers that are stored, for all drafts together."""

WINDOW_BYTES = 2 << 20
"""Most bytes of features that a draft may have been sent without having released them."""

_PAUSE_FACTOR = 4
"""While requests run, preparing to store features pauses this many times as long as each piece of it takes."""


class _Piece(NamedTuple):
    """Consecutive positions of a request."""

    spec: SpeculativeRequest
    start: int
    size: int


class _Sending(NamedTuple):
    """Pieces for one draft whose rows are on their way from the store."""

    replica: DraftReplica
    channel: FeatureChannel
    rows: StagedRows
    messages: list[Features]
    """Messages without their bytes, which lie in `rows` one after the other."""


class FeatureSender:
    """Has features stored when a draft asks for them, and sends those of committed positions while rounds run.

    A request is opened with a draft that needs features only if those of all its positions are stored: its KV must have
    been computed since the store was begun (`Memory.feature_epoch`). Only the engine's thread uses this object.
    """

    def __init__(self, drafts: Drafts, memory: Memory, executor: Executor, piecewise: bool) -> None:
        """`piecewise`: `work` is called again and again while a round runs, and each time does little."""
        self._piecewise = piecewise
        self._drafts = drafts
        self._memory = memory
        self._executor = executor
        self._plan = FeaturePlan()
        self._wanted = FeaturePlan()
        self._begun: FeaturePlan | None = None
        """The plan that the executor prepares for."""
        self._began_at = self._next_work_at = 0.0
        self._num_left = 0
        self._last_round: Pending | None = None
        self._sending: deque[_Sending] = deque()
        self._has_room = False
        """Whether some draft has released features since the last look at what drafts miss."""

    @property
    def busy(self) -> bool:
        """Whether `work` may have something to do."""
        return bool(self._sending) or self._has_room

    @property
    def preparing(self) -> bool:
        """Whether drafts need features that rounds do not store yet."""
        return self._wanted != self._plan

    @property
    def num_pending(self) -> int:
        """Pieces left of the preparation to store features, as far as known: graphs of rounds, as a rule."""
        return self._num_left if self.preparing else 0

    @property
    def num_waiting(self) -> int:
        """Number of connected drafts that are to get features but do not get any yet."""
        replicas = self._drafts.replicas.values()
        return sum(
            bool(replica.feature_parts) and (replica.channel is None or not replica.channel.open)
            for replica in replicas
        )

    def connected(self, connection: DraftConnection) -> None:
        """Prepare the features for a draft whose session began; `Drafts.connected` must know it already."""
        replica = self._drafts.replicas[connection]
        layers = replica.terms.feature_layers
        if not layers:
            return
        if not self._executor.lends_features:
            log.warning(
                "draft %s takes features, which verify does not send when it drafts inside its rounds; %s",
                connection.address,
                _without(replica),
            )
            return
        projected = self._may_project(replica)
        takes = (PROJECTED,) if projected else layers
        is_wanted = self._wanted.holds(takes, replica.terms.projection_hash)
        # A new plan begins a new store, without features that no draft takes any more.
        wanted = self._wanted if is_wanted else self._needed()
        if not projected:
            wanted = replace(wanted, layers=tuple(sorted({*wanted.layers, *layers})))
        width, dtype = self._row_format(replica, projected)
        row_bytes = width * FEATURE_ITEM_BYTES[dtype]
        if len({*wanted.inputs, *layers}) > MAX_STORED_LAYERS or row_bytes > MAX_FEATURE_BYTES:
            log.error(
                "draft %s takes layers %s, %d bytes a token, which with those of other drafts is more than %d layers, "
                "or more than %d bytes; %s",
                *(connection.address, layers, row_bytes, MAX_STORED_LAYERS, MAX_FEATURE_BYTES, _without(replica)),
            )
            return
        replica.feature_parts = takes
        if projected and not is_wanted:
            # The draft gives its projection first.
            self._dial(replica, wants_projection=True)
            return
        self._wanted = wanted
        if not self.preparing:
            self._begin(replica)

    def disconnected(self, connection: DraftConnection) -> None:
        """Take back the ring of a draft whose session ended; `Drafts` must still know it."""
        replica = self._drafts.replicas.get(connection)
        if replica is not None and replica.channel is not None:
            self._take_back_ring(replica.channel)

    def opened(
        self, connection: DraftConnection, window: int, uses_ring: bool = False, projection: Projection | None = None
    ) -> None:
        """Note that a session's features stream is open; `window` bytes may be in flight on it, 0 for any number.

        `projection`: the draft's, if it was wanted.
        """
        replica = self._drafts.replicas.get(connection)
        if replica is None or replica.channel is None:
            return
        channel = replica.channel
        channel.window = min(window or WINDOW_BYTES, WINDOW_BYTES)
        channel.accepted = True
        if not uses_ring:
            self._take_back_ring(channel)
        if projection is not None:
            self._wanted = replace(self._needed(), projection=projection)
        if not self.preparing:
            self._begin(replica)

    def released(self, connection: DraftConnection, through: int) -> None:
        """Note that a draft is done with message `through` and all before it."""
        replica = self._drafts.replicas.get(connection)
        if replica is not None and replica.channel is not None:
            replica.channel.release(through)
            self._has_room = True

    def advance(self) -> None:
        """Prepare between two rounds to store what drafts need, in a small part of the time."""
        if not self.preparing or (self._begun != self._wanted and not self._prepare()):
            return
        if time.monotonic() >= self._next_work_at:
            self._work_ahead()

    def refresh(self) -> bool:
        """Do a piece of what `advance` does, while there is no round to run. Returns whether more of it is left."""
        if self.preparing and self._begun == self._wanted:
            self._work_ahead()
        return self.preparing

    def collect(self, after: Pending | None) -> None:
        """Begin to copy features that drafts do not have yet. `after`: the round that computed the last of them."""
        if self._drafts.feature_epoch:
            self._last_round = after
            self._collect()
            if not self._piecewise:
                self.work()

    def work(self) -> None:
        """Send features that have been copied, and begin to copy more, up to the last round given to `collect`."""
        if self._has_room:
            self._has_room = False
            if self._drafts.feature_epoch:
                self._collect()
        while self._sending and self._ship() and not self._piecewise:
            pass

    def _take_back_ring(self, channel: FeatureChannel) -> None:
        if channel.ring is not None:
            self._executor.take_back_ring(channel.ring)
            channel.ring = None

    def _prepare(self) -> bool:
        """Begin to prepare for the wanted plan. Returns whether that is possible."""
        try:
            self._executor.begin_features(self._wanted)
        except OutriderError as error:
            log.error("drafts that need features of layers %s are not used: %s", self._wanted.inputs, error.message)
            self._give_up(self._begun or self._plan)
            for replica in self._drafts.replicas.values():
                self._begin(replica)
            return False
        self._begun = self._wanted
        self._began_at = self._next_work_at = time.monotonic()
        return True

    def _work_ahead(self) -> None:
        """Do a piece of the preparation; after the last one, the wanted features are stored."""
        start = time.monotonic()
        self._num_left = self._executor.refresh_features()
        end = time.monotonic()
        self._next_work_at = end + _PAUSE_FACTOR * (end - start)
        if self._num_left:
            return
        if (waited := end - self._began_at) >= 0.05:
            log.info("the target's features are stored %.1f s after they were asked for", waited)
        self._plan, self._begun = self._wanted, None
        # Rows stored until now may lack some of the layers.
        self._memory.new_feature_epoch()
        self._drafts.renew_features(self._memory.feature_epoch)
        for replica in self._drafts.replicas.values():
            self._begin(replica)

    def _needed(self) -> FeaturePlan:
        """Return the part of the wanted plan that the connected drafts take."""
        parts = {part for replica in self._drafts.replicas.values() for part in replica.feature_parts}
        projection = self._wanted.projection if PROJECTED in parts else None
        return FeaturePlan(tuple(sorted(parts - {PROJECTED})), projection)

    def _give_up(self, kept: FeaturePlan) -> None:
        """Return to `kept`, the plan that is stored or prepared; drafts that it does not serve get no features."""
        self._wanted = kept
        for replica in self._drafts.replicas.values():
            # A draft that has yet to give its projection had no part in the plan that failed.
            is_asked = replica.channel is not None and not replica.channel.accepted
            if not is_asked and not kept.holds(replica.feature_parts, replica.terms.projection_hash):
                replica.feature_parts = ()

    def _may_project(self, replica: DraftReplica) -> bool:
        """Whether a draft gets products. One projection is in use at a time; drafts with others get raw features."""
        users = [
            other
            for other in self._drafts.replicas.values()
            if PROJECTED in other.feature_parts and other is not replica
        ]
        name = replica.terms.projection_hash
        return bool(name) and all(other.terms.projection_hash == name for other in users)

    def _begin(self, replica: DraftReplica) -> None:
        """Ask for a draft's features stream, or use it if it is open, provided that what the draft takes is stored."""
        if not replica.feature_parts or not self._plan.holds(replica.feature_parts, replica.terms.projection_hash):
            return
        if replica.channel is None:
            self._dial(replica, wants_projection=False)
        elif replica.channel.accepted:
            replica.channel.open = True

    def _dial(self, replica: DraftReplica, wants_projection: bool) -> None:
        layers, projected = replica.terms.feature_layers, PROJECTED in replica.feature_parts
        width, dtype = self._row_format(replica, projected)
        ring = self._executor.lend_ring()
        replica.channel = FeatureChannel(width * FEATURE_ITEM_BYTES[dtype], dtype, ring)
        described = None if ring is None else ring.description
        begin = FeaturesBegin("", layers, width, dtype, described, projected, wants_projection)
        replica.connection.begin_features(begin)

    def _row_format(self, replica: DraftReplica, projected: bool) -> tuple[int, str]:
        """Return the number of values that a draft takes of each position, and their dtype."""
        hidden_size, dtype = self._executor.feature_format
        terms = replica.terms
        return terms.projection_columns if projected else len(terms.feature_layers) * hidden_size, dtype

    def _collect(self) -> None:
        page_size = self._memory.page_size
        for replica in self._drafts.replicas.values():
            channel = replica.channel
            while channel is not None and channel.open and (pieces := self._pieces(replica, channel)):
                slots = np.concatenate(
                    [page_slots(spec.request.pages, page_size, at, at + size) for spec, at, size in pieces]
                )
                rows = self._executor.read_features(slots, replica.feature_parts, self._last_round, channel.ring)
                if rows is None:
                    break
                messages = [self._message(channel, piece) for piece in pieces]
                self._sending.append(_Sending(replica, channel, rows, messages))

    def _pieces(self, replica: DraftReplica, channel: FeatureChannel) -> list[_Piece]:
        """Return what to copy next for a draft: requests that miss least come first, so that no prompt delays decoding.

        Until the draft has answered for a request, it may not know it: the request is opened on another stream.
        """
        room = min(channel.room, STAGE_BYTES) // channel.row_bytes
        if room <= 0:
            return []
        behind = [
            (spec.feature_end - spec.num_features_sent, number, spec)
            for number, spec in replica.requests.items()
            if spec.feature_end > spec.num_features_sent
            and not spec.request.finished
            and spec.mirror.epoch
            and self._drafts.has_features(spec.request)
        ]
        pieces: list[_Piece] = []
        for missing, _, spec in sorted(behind, key=lambda one: one[:2]):
            start, end = spec.num_features_sent, spec.num_features_sent + min(missing, room)
            room -= end - start
            most = max(MAX_FEATURE_BYTES // channel.row_bytes, 1)
            pieces += [_Piece(spec, at, min(most, end - at)) for at in range(start, end, most)]
            if not room:
                break
        return pieces

    def _message(self, channel: FeatureChannel, piece: _Piece) -> Features:
        """Return a numbered message for a piece, and count the piece as sent."""
        spec, end = piece.spec, piece.start + piece.size
        spec.num_features_sent = end
        final = end == spec.feature_end
        sequence = channel.take(piece.size * channel.row_bytes)
        return Features(spec.number, piece.start, piece.size, final, memoryview(b""), channel.dtype, sequence)

    def _ship(self) -> bool:
        """Send one batch of rows, if it was copied and the connection has room. Returns whether it is dealt with."""
        sending = self._sending[0]
        connection = sending.replica.connection
        if not sending.rows.done():
            return False
        alive = self._drafts.replicas.get(connection) is sending.replica
        if alive and not connection.has_room:
            return False
        self._sending.popleft()
        if alive:
            connection.send_features(_filled(sending.messages, sending.rows, sending.channel.row_bytes))
        if alive and sending.rows.offset is not None:
            # The draft reads the rows where they are, in the ring.
            sending.channel.lent.append((sending.messages[-1].sequence, sending.rows))
        else:
            sending.rows.free()
        return True


def _filled(messages: Sequence[Features], rows: StagedRows, row_bytes: int) -> list[Features]:
    """Return the messages with their bytes, which are not copied, or with their place in the ring."""
    filled, start, data = [], 0, rows.data()
    for message in messages:
        end = start + message.count * row_bytes
        if rows.offset is None:
            filled.append(structs.replace(message, data=data[start:end]))
        else:
            filled.append(structs.replace(message, ring_offset=rows.offset + start))
        start = end
    return filled


def _without(replica: DraftReplica) -> str:
    """Return text that says what becomes of a draft without features."""
    return "it drafts with what needs none" if replica.terms.features_optional else "it is not used"
