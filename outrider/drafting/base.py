"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.drafting.tree_growth import Tree
from outrider.protocol.speculation import Features
from outrider.tree.handshake import Projection


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter requires of the target; zero or empty means "as the target has it" or "nothing"."""

    vocab_size: int = 0
    """Size of the drafter's own vocabulary."""
    token_ids_hash: str = ""
    """Hash of the drafter's own tokenizer.json: see outrider.models.store_folder.hash_token_ids."""
    hidden_size: int = 0
    """Width of the features that the drafter takes."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states are the drafter's features, in order."""
    max_positions: int = 0
    """Longest sequence that the drafter serves."""
    projection: Projection | None = None
    """Matrix that verify may multiply the features with before it sends them."""


ANY_TOKEN = 1 << 31
"""Above every token id."""


@dataclass(frozen=True, slots=True)
class FrontierNode:
    """A live node whose children are requested. Its parent was a frontier node before, unless the node is a root."""

    request: int
    """Handle of the request."""
    node: int
    """Id of the node in the request's epoch."""
    parent: int
    """Id of the node's parent; -1 for the root."""
    token: int
    """The node's token."""
    position: int
    """Absolute position of the node's children in the sequence."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A child that the target may commit after a frontier node."""

    token: int
    score: float
    """Estimated natural-log chance that the target commits `token` once it commits the parent; finite, at most 0."""
    source: int
    """Index into the drafter's `sources`."""


class AnyDrafter:
    """What the service knows of every kind of drafter."""

    sources: tuple[str, ...]
    """Names of the sources that the drafter's nodes come from."""
    needs: Needs = Needs()
    """Checked against the target before any request is opened."""

    def gauges(self) -> Mapping[str, int]:
        """Return sizes worth watching, by name."""
        return {}


class Drafter(AnyDrafter, ABC):
    """Guesses children of tree nodes. One thread calls the drafter, which keeps node state by (handle, node id).

    `expand` takes nodes of many requests at once, because a model runs them as one batch. A handle is valid from
    `open` until `close`; after a `commit`, `expand` gets only live nodes.
    """

    @abstractmethod
    def open(self, tree: Tree) -> None:
        """Begin a request, whose root is node 0. A drafter that learns from text uses it only for the same tenant."""

    @abstractmethod
    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        """Follow a commit of `tokens` after those known. `root` is the new root's id, `live` has all ids still alive.

        After a miss a new epoch begins: `root` is 0 and `live` holds nothing else.
        """

    def take_features(self, request: int, features: Features) -> None:
        """Take the target's true features of a request's positions: each position once and in order, unless resent.

        Features may come before or after the commit of their tokens. Their memory is free once this returns.
        """

    @abstractmethod
    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        """Return the candidate children of each node, best first; the chances of a node's add up to at most 1."""

    @abstractmethod
    def close(self, request: int) -> None:
        """End a request and free everything about it."""

    def work(self, deadline: float) -> list[int]:
        """Do work that can wait until `time.perf_counter()` reads `deadline`.

        Returns the handles of requests whose roots may have other candidates than when they were last expanded.
        """
        return []

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return False

    @abstractmethod
    def forget_target(self) -> None:
        """Forget what was learned from the target, since the next requests have another. No request is open."""


class CombinedDrafter(AnyDrafter):
    """Several drafters that grow one tree: at most one model, and n-grams, which need nothing and serve any token."""

    def __init__(self, parts: Sequence[AnyDrafter]) -> None:
        self.parts = tuple(parts)
        self.sources = tuple(source for part in parts for source in part.sources)
        needs = next((part.needs for part in parts if part.needs != Needs()), Needs())
        self.needs = replace(needs, max_positions=0)

    def gauges(self) -> Mapping[str, int]:
        """Return the sizes of all parts."""
        return {name: size for part in self.parts for name, size in part.gauges().items()}


def parts_of(drafter: AnyDrafter) -> tuple[AnyDrafter, ...]:
    """Return the parts of a combined drafter, or the drafter alone."""
    return drafter.parts if isinstance(drafter, CombinedDrafter) else (drafter,)
