"""Frames between door and engine: the engine's life, its rounds and its state. Torch-free."""

from __future__ import annotations

import msgspec

from outrider.config.verify import VerifyOptions
from verify_service.engine.figures import RoundFigures
from verify_service.frames.requests import UpdatePart


class Start(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """door -> engine, first: load a model and serve it."""

    options: VerifyOptions


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """door -> engine: end after the round in progress."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """engine -> door, first: the model is loaded and warm."""

    model_path: str
    tokenizer_hash: str
    """SHA-256 of tokenizer.json, hex."""
    vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: list[int]
    max_running: int
    max_waiting: int
    hidden_size: int = 0
    num_layers: int = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """engine -> door, instead of Ready: the options, the model or the machine do not allow a start."""

    message: str


class RoundReport(msgspec.Struct, frozen=True, array_like=True):
    """One round in figures."""

    num_nodes: int
    """Tree nodes verified."""
    num_prefilled: int
    committed: list[int]
    """Tokens of each request that committed some."""
    accepted: list[int]
    """Draft tokens of each request that had some accepted."""
    num_failed: int
    figures: RoundFigures


class PeerPart(msgspec.Struct, frozen=True, array_like=True):
    """A connected draft service; `typical` is its usual time of an answer in seconds."""

    address: str
    good: bool
    typical: float


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state at one moment; counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_preemptions: int = 0
    dropped: dict[str, int] = {}
    """Draft tokens that brought nothing, by reason."""
    declined: dict[str, int] = {}
    """Requests that drafts declined, by reason."""
    peers: list[PeerPart] = []
    cost: dict[int, float] = {}
    """Seconds of a round by its tokens."""
    graphs_pending: int = 0
    """Graphs of rounds that are still to be captured before a draft gets features."""
    drafts_waiting: int = 0
    """Connected drafts that will get features and cannot yet."""


class Told(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: all that gathered since the last one; nearly always one round's."""

    updates: list[UpdatePart]
    ended: list[int]
    """Cancelled requests that have left the engine."""
    rounds: list[RoundReport]
    read: dict[int, int]
    """Weight of the messages taken, by draft session."""
    snapshot: Snapshot | None
