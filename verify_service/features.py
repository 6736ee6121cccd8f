"""The target's features for drafts that take them: when they are stored, and what of them is sent to whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.logs import get_logger
from outrider.tree.messages import FEATURE_ITEM_BYTES, MAX_FEATURE_BYTES, Features
from verify_service.drafts import Drafts
from verify_service.link import DraftPort, FeatureLine, Link, Peer
from verify_service.memory import Memory
from verify_service.round import Executor, Pending

log = get_logger(__name__)

STAGE_BYTES = MAX_FEATURE_BYTES
"""Features that are copied to the host, and sent, in one go: more at once could hold up the end of a round."""

MAX_STORED_LAYERS = 16
"""Layers of all drafts together."""

WINDOW_BYTES = 2 << 20
"""Features that a draft may have been sent without having released them."""

Found = TypeVar("Found")


class Staged(Protocol):
    """Rows that are on their way from the store."""

    def done(self) -> bool:
        """Whether they are here. Never blocks."""

    def data(self) -> memoryview:
        """Their bytes, row by row, once they are here."""

    def free(self) -> None:
        """Their bytes are not needed any more."""


@runtime_checkable
class FeatureExecutor(Protocol):
    """An executor that can store features. Called between two rounds, but for `read_features`."""

    @property
    def feature_format(self) -> tuple[int, str]:
        """Values of a layer's hidden state, and their dtype."""

    def begin_features(self, layers: Sequence[int]) -> None:
        """From now on every round stores the features of `layers`, and no others, for every KV slot.

        Raises OutriderError, and nothing has changed, where there is no memory for them.
        """

    def refresh_features(self) -> bool:
        """Do a piece of what the first rounds that store features would have to do; whether there is more of it."""

    def read_features(self, slots: NDArray[np.int32], layers: tuple[int, ...], after: Pending | None) -> Staged | None:
        """Copy features at KV slots [N] once the round `after` has run; None if too much is being copied already.

        While a later round is under way, slots of committed positions alone may be asked for.
        """


@runtime_checkable
class FeaturePort(DraftPort, Protocol):
    """A session that can carry features. Methods must not block."""

    @property
    def has_room(self) -> bool:
        """Whether features should be sent now."""

    def begin_features(self, layers: tuple[int, ...], width: int, dtype: str) -> None:
        """Open the features stream; `FeatureSender.opened` hears when it is."""

    def send_features(self, messages: list[Features]) -> None:
        """Queue features, in order. Their bytes are good during the call alone."""


class _Piece(NamedTuple):
    """Consecutive positions of a request."""

    link: Link
    start: int
    size: int


@dataclass(slots=True)
class _Sending:
    """Pieces for one draft whose rows are on their way from the store."""

    peer: Peer
    rows: Staged
    messages: list[Features] = field(default_factory=list)
    """Without their bytes, which lie in `rows` one after the other."""


def require(value: Found | None) -> Found:
    """The value. Raises RuntimeError before features were begun."""
    if value is None:
        raise RuntimeError("features are not stored")
    return value


class FeatureSender:
    """Has features stored when a draft asks for them, and sends those of committed positions while rounds run.

    A request is opened with such a draft only if the features of all its positions are stored: its KV must have been
    computed since the store is filled (`Memory.feature_epoch`). The engine thread alone uses it.
    """

    def __init__(self, drafts: Drafts, memory: Memory, executor: Executor, piecewise: bool = False) -> None:
        """`piecewise`: `work` is called again and again while a round runs, and each time does little."""
        self._piecewise = piecewise
        self._drafts = drafts
        self._memory = memory
        self._executor = executor if isinstance(executor, FeatureExecutor) else None
        self._layers: tuple[int, ...] = ()
        self._wanted: tuple[int, ...] = ()
        self._after: Pending | None = None
        self._sending: deque[_Sending] = deque()
        self._has_room = False
        """Some draft has released features since the last look at what it misses."""

    @property
    def busy(self) -> bool:
        """Whether `work` may have something to do."""
        return bool(self._sending) or self._has_room

    @property
    def preparing(self) -> bool:
        """Whether `advance` has something to do."""
        return self._wanted != self._layers

    def connected(self, port: DraftPort) -> None:
        """A session began that `Drafts.connected` knows of."""
        peer = self._drafts.peers.get(port)
        layers = peer.terms.feature_layers if peer is not None else ()
        if peer is None or not layers:
            return
        if self._executor is None or not isinstance(port, FeaturePort):
            log.warning("draft %s takes features, which nothing here can store or send; it is not used", port.address)
            return
        wanted = tuple(sorted({*self._wanted, *layers}))
        hidden_size, dtype = self._executor.feature_format
        row_bytes = len(layers) * hidden_size * FEATURE_ITEM_BYTES[dtype]
        if len(wanted) > MAX_STORED_LAYERS or row_bytes > MAX_FEATURE_BYTES:
            log.error(
                "draft %s is not used: it takes layers %s, %d bytes a token, which with those of other drafts is more "
                "than %d layers, or more than %d bytes",
                *(port.address, layers, row_bytes, MAX_STORED_LAYERS, MAX_FEATURE_BYTES),
            )
            return
        self._wanted = wanted
        if not self.preparing:
            self._begin(peer)

    def opened(self, port: DraftPort, window: int) -> None:
        """The features stream of a session is open; `window` bytes may be under way on it, 0 for any number."""
        peer = self._drafts.peers.get(port)
        if peer is not None and peer.line is not None:
            peer.line.window = min(window or WINDOW_BYTES, WINDOW_BYTES)
            peer.line.open = True

    def released(self, port: DraftPort, through: int) -> None:
        """A draft is done with message `through` and all before it."""
        peer = self._drafts.peers.get(port)
        if peer is not None and peer.line is not None:
            peer.line.release(through)
            self._has_room = True

    def advance(self) -> None:
        """Between two rounds: have stored what drafts want. Those that follow may be slow once."""
        if not self.preparing or self._executor is None:
            return
        # What is stored until now is of no use for layers that are missing in it.
        self._drafts.suspend_features()
        try:
            self._executor.begin_features(self._wanted)
            self._layers = self._wanted
        except OutriderError as error:
            log.error("drafts that take features of layers %s are not used: %s", self._wanted, error.message)
            self._wanted = self._layers
        if self._layers:
            self._memory.new_feature_epoch()
            self._drafts.feature_epoch = self._memory.feature_epoch
            for peer in self._drafts.peers.values():
                self._begin(peer)

    def refresh(self) -> bool:
        """While no round is wanted: do what rounds would have to do first; whether there is more of it."""
        return bool(self._layers) and self._executor is not None and self._executor.refresh_features()

    def collect(self, after: Pending | None) -> None:
        """Have features copied that drafts do not have yet; `after` is the round that computed the last of them."""
        if self._drafts.feature_epoch:
            self._after = after
            self._collect()
            if not self._piecewise:
                self.work()

    def work(self) -> None:
        """Send what has been copied, and have more copied. `collect` was told of the last round that has ended."""
        if self._has_room:
            self._has_room = False
            if self._drafts.feature_epoch:
                self._collect()
        while self._sending and self._ship() and not self._piecewise:
            pass

    def _begin(self, peer: Peer) -> None:
        layers = peer.terms.feature_layers
        if peer.line is not None or not layers or not set(layers) <= set(self._layers):
            return
        if self._executor is not None and isinstance(peer.port, FeaturePort):
            hidden_size, dtype = self._executor.feature_format
            width = len(layers) * hidden_size
            peer.line = FeatureLine(width * FEATURE_ITEM_BYTES[dtype], dtype)
            peer.port.begin_features(layers, width, dtype)

    def _collect(self) -> None:
        if self._executor is None:
            return
        for peer in self._drafts.peers.values():
            while peer.line is not None and peer.line.open and (pieces := self._pieces(peer, peer.line)):
                slots = np.concatenate([self._slots(piece) for piece in pieces])
                rows = self._executor.read_features(slots, peer.terms.feature_layers, self._after)
                if rows is None:
                    return
                self._sending.append(_Sending(peer, rows, [self._message(peer.line, piece) for piece in pieces]))

    def _pieces(self, peer: Peer, line: FeatureLine) -> list[_Piece]:
        """What to copy next for a draft: those that miss least come first, so that no prompt holds up a decoder.

        A draft that has answered nothing yet may not have read of the request: its opening takes another way.
        """
        room = min(line.room, STAGE_BYTES) // line.row_bytes
        if room <= 0:
            return []
        behind = [
            (link.request.cached_len - link.features_sent, number, link)
            for number, link in peer.links.items()
            if link.request.cached_len > link.features_sent and not link.request.finished and link.mirror.epoch
        ]
        pieces: list[_Piece] = []
        for missing, _, link in sorted(behind, key=lambda one: one[:2]):
            start, end = link.features_sent, link.features_sent + min(missing, room)
            room -= end - start
            most = max(MAX_FEATURE_BYTES // line.row_bytes, 1)
            pieces += [_Piece(link, at, min(most, end - at)) for at in range(start, end, most)]
            if not room:
                break
        return pieces

    def _message(self, line: FeatureLine, piece: _Piece) -> Features:
        """Number a piece and count it as sent."""
        link, end = piece.link, piece.start + piece.size
        link.features_sent = end
        final = end == link.request.cached_len
        sequence = line.take(piece.size * line.row_bytes)
        return Features(link.number, piece.start, piece.size, final, b"", line.dtype, sequence)

    def _slots(self, piece: _Piece) -> NDArray[np.int32]:
        """KV slots of its positions."""
        size = self._memory.page_size
        first, last = piece.start // size, (piece.start + piece.size - 1) // size
        pages = np.array(piece.link.request.pages[first : last + 1], np.int32)
        slots: NDArray[np.int32] = np.add.outer(pages * size, np.arange(size, dtype=np.int32)).reshape(-1)
        begin = piece.start - first * size
        return slots[begin : begin + piece.size]

    def _ship(self) -> bool:
        """Send one batch of rows, if it is here and the port has room; whether it was."""
        sending = self._sending[0]
        port, line = sending.peer.port, sending.peer.line
        if not sending.rows.done() or not isinstance(port, FeaturePort) or line is None:
            return False
        alive = self._drafts.peers.get(port) is sending.peer
        if alive and not port.has_room:
            return False
        self._sending.popleft()
        if alive:
            port.send_features(_filled(sending.messages, sending.rows.data(), line.row_bytes))
        sending.rows.free()
        return True


def _filled(messages: Sequence[Features], data: memoryview, row_bytes: int) -> list[Features]:
    """The messages with their bytes, which stay where they are."""
    filled, start = [], 0
    for message in messages:
        end = start + message.count * row_bytes
        part = data[start:end]
        filled.append(
            Features(
                message.request, message.start, message.count, message.final, part, message.dtype, message.sequence
            )
        )
        start = end
    return filled
