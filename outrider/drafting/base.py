"""What guesses: drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.drafting.tree_growth import Tree
from outrider.protocol.speculation import Features
from outrider.tree.handshake import Projection


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter takes from the target; zero or empty means "as the target has it" or "nothing"."""

    vocab_size: int = 0
    """Token ids that its own vocabulary has."""
    tokenizer_hash: str = ""
    """Of its own tokenizer.json: see outrider.models.store_folder.hash_token_ids."""
    hidden_size: int = 0
    """Width of the features that it takes."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states are its features, in order."""
    max_positions: int = 0
    """Longest sequence that it serves."""
    projection: Projection | None = None
    """What verify may multiply the features with before it sends them."""


ANY_TOKEN = 1 << 31
"""Above every token id."""


@dataclass(frozen=True, slots=True)
class FrontierNode:
    """A live node whose children are asked for. Its parent was a frontier node before, or it is a root."""

    request: int
    """Handle of the request."""
    node: int
    """Id of the node in the request's epoch."""
    parent: int
    """Id of its parent; -1 for the root."""
    token: int
    """The node's token."""
    position: int
    """Absolute position of its children in the sequence."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A child that the target may commit after a frontier node."""

    token: int
    score: float
    """Estimated natural-log chance that the target commits it, given that it commits the parent; finite, at most 0."""
    source: int
    """Index into the drafter's `sources`."""


class AnyDrafter:
    """What guesses, in whatever way, as the service sees it."""

    sources: tuple[str, ...]
    """Names of where its nodes come from."""
    needs: Needs = Needs()
    """Checked against the target before any request is opened."""

    def gauges(self) -> Mapping[str, int]:
        """Sizes worth watching, by name."""
        return {}


class Drafter(AnyDrafter, ABC):
    """Guesses children of tree nodes. One thread calls it; state of nodes lives here, keyed by (handle, node id).

    `expand` takes nodes of many requests at once, because a model runs them as one batch. A handle is known from
    `open` until `close`; after a `commit` only the live nodes are asked about again.
    """

    @abstractmethod
    def open(self, tree: Tree) -> None:
        """A request begins; node 0 is its root. A drafter that learns from text uses it for the same tenant alone."""

    @abstractmethod
    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        """The target committed `tokens` after those known. `root` is the new root's id, `live` all ids still alive.

        After a miss a new epoch begins: `root` is 0 and `live` holds nothing else.
        """

    def take_features(self, request: int, features: Features) -> None:
        """The target's true features of positions of a request, each position once; in order, but for what is resent.

        They may come before the commit of their tokens as well as behind it. The bytes are free afterwards.
        """

    @abstractmethod
    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        """Candidate children of each node, best first; their chances add up to at most 1."""

    @abstractmethod
    def close(self, request: int) -> None:
        """A request ended; everything about it is freed."""

    def work(self, deadline: float) -> list[int]:
        """Do work that can wait until `time.perf_counter()` reads `deadline`.

        Returns the handles whose roots may have other candidates now than when they were last expanded.
        """
        return []

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return False

    @abstractmethod
    def forget_target(self) -> None:
        """The next requests are of another target: forget what was learned from the old one. No request is open."""


class CombinedDrafter(AnyDrafter):
    """Several that grow one tree: one with a model at most, beside n-grams, which need nothing and serve any tokens."""

    def __init__(self, parts: Sequence[AnyDrafter]) -> None:
        self.parts = tuple(parts)
        self.sources = tuple(source for part in parts for source in part.sources)
        needs = next((part.needs for part in parts if part.needs != Needs()), Needs())
        self.needs = replace(needs, max_positions=0)

    def gauges(self) -> Mapping[str, int]:
        """Sizes of all."""
        return {name: size for part in self.parts for name, size in part.gauges().items()}


def parts_of(drafter: AnyDrafter) -> tuple[AnyDrafter, ...]:
    """The drafters that a combined one is made of, or the one."""
    return drafter.parts if isinstance(drafter, CombinedDrafter) else (drafter,)
