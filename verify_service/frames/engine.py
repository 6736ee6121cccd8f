"""Frames between door and engine: the engine's life, its rounds and its state. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from verify_service.frames.requests import UpdatePart


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """The model that an engine serves, and its limits."""

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


class RoundFigures(NamedTuple):
    """How a round went; times in seconds."""

    seconds: float
    held: float
    """How long it was held for drafts before."""
    gap: float | None = None
    """How long the device had nothing to do before it, holding aside; None after a pause."""
    gpu: float | None = None
    """How long the device worked on it; None where nobody measures."""
    ready: int | None = None
    """Nodes that it would have taken without any hold; None if no draft serves its requests."""
    answers: Sequence[float] = ()
    """How long each of the drafts' answers took since the round before."""


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


class EngineUpdates(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: all that gathered since the last one; nearly always one round's."""

    updates: list[UpdatePart]
    ended: list[int]
    """Cancelled requests that have left the engine."""
    rounds: list[RoundReport]
    read: dict[int, int]
    """Weight of the messages taken, by draft session."""
    snapshot: Snapshot | None
