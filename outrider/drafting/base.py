"""The interface of a drafter, and the registry that finds one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from outrider.config.draft import AUTO, DraftOptions
from outrider.errors import ConfigError
from outrider.protocol.messages import Features
from outrider.sampling.params import SamplingParams
from outrider.tree.projection import Projection


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter takes from the target; zero or empty means "as the target has it" or "nothing"."""

    vocab_size: int = 0
    """Token ids that its own vocabulary has."""
    tokenizer_hash: str = ""
    """SHA-256 of its own tokenizer.json, hexadecimal."""
    hidden_size: int = 0
    """Width of the features that it takes."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states are its features, in order."""
    max_positions: int = 0
    """Longest sequence that it serves."""
    projection: Projection | None = None
    """What verify may multiply the features with before it sends them."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request as a drafter sees it."""

    handle: int
    """Names the request in all later calls; never used twice."""
    tokens: Sequence[int]
    """All committed tokens, prompt first."""
    prompt_len: int
    """Tokens of `tokens` that are prompt."""
    sampling: SamplingParams
    """How the target samples."""
    vocab_size: int
    """Ids at or past this are illegal."""
    tenant: str = ""
    """Whose text it is; a drafter that learns from text uses it for requests of the same tenant alone."""


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


class AnyDrafter(Protocol):
    """What guesses, in whatever way, as the service sees it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of where its nodes come from."""

    @property
    def needs(self) -> Needs:
        """Checked against the target before any request is opened."""

    def gauges(self) -> Mapping[str, int]:
        """Sizes worth watching, by name; called from any thread."""


class Drafter(ABC):
    """Guesses children of tree nodes. One thread calls it; state of nodes lives here, keyed by (handle, node id).

    `expand` takes nodes of many requests at once, because a model runs them as one batch. A handle is known from
    `open` until `close`; after a `commit` only the live nodes are asked about again.
    """

    sources: ClassVar[tuple[str, ...]]
    """Names of where candidates come from."""
    needs: Needs = Needs()
    """Checked against the target before any request is opened."""
    frontier_width: ClassVar[int] = 16
    """Nodes that one call of `expand` gets at most."""
    lookahead: ClassVar[float] = 0.0
    """How much less likely, in natural logarithm, than a tree's best unexpanded node its others may be and still share
    its call: 0 for a drafter without batches; a model, to which a node more costs little, wants more."""

    @abstractmethod
    def open(self, request: DraftRequest) -> None:
        """A request begins; node 0 is its root."""

    @abstractmethod
    def commit(
        self, request: int, tokens: Sequence[int], root: int, live: Collection[int], features: Any | None = None
    ) -> None:
        """The target committed `tokens` after those known. `root` is the new root's id, `live` all ids still alive.

        After a miss a new epoch begins: `root` is 0 and `live` holds nothing else. `features` [len(tokens), ...] are
        the target's hidden states, for a drafter that needs them.
        """

    def take_features(self, request: int, features: Features) -> None:  # noqa: B027
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

    def gauges(self) -> Mapping[str, int]:
        """Sizes worth watching, by name; called from any thread."""
        return {}


DrafterFactory = Callable[[DraftOptions], AnyDrafter]

_ALONE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Drafters with a model: one of them at most."""


def _ngram(options: DraftOptions) -> AnyDrafter:
    from outrider.drafting.ngram.drafter import NgramDrafter

    return NgramDrafter(options)


def _model(options: DraftOptions) -> AnyDrafter:
    from outrider.drafting.model.drafter import load_model_drafter

    return load_model_drafter(options)


_FACTORIES: dict[str, DrafterFactory] = {"NGRAM": _ngram, **dict.fromkeys(_ALONE, _model)}


def register(name: str, factory: DrafterFactory) -> None:
    """Make a drafter known by `name`. The factory imports what it needs when it is called."""
    _FACTORIES[name] = factory


def build_drafter(options: DraftOptions) -> AnyDrafter:
    """Return what `options.speculative_algorithm` names; several grow one tree. Raises ConfigError."""
    names = named_drafters(options)
    _check(options)
    made = [_FACTORIES[name](options) for name in names]
    if len(made) == 1:
        return made[0]
    from outrider.drafting.several import SeveralDrafters

    return SeveralDrafters(made)


def named_drafters(options: DraftOptions) -> tuple[str, ...]:
    """The drafters that the options name: n-grams where that was left open and nobody has chosen."""
    return ("NGRAM",) if options.speculative_algorithm == AUTO else options.speculative_algorithm


def model_algorithm(options: DraftOptions) -> str:
    """The one drafter with a model that the options name; empty if they name none."""
    return next((name for name in options.speculative_algorithm if name in _ALONE), "")


def _check(options: DraftOptions) -> None:
    names = named_drafters(options)
    for name in names:
        if name not in _FACTORIES:
            known = ", ".join(sorted(_FACTORIES))
            raise ConfigError(f"--speculative-algorithm: {name!r} is not known; use one of {known}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--speculative-algorithm: {','.join(names)!r} must name each drafter once, and one at least")
    models = [name for name in names if name in _ALONE]
    if len(models) > 1:
        raise ConfigError(
            f"--speculative-algorithm: {','.join(models)} are models and do not run together; use one of them, with or "
            "without NGRAM"
        )
    if options.lockstep and not models:
        raise ConfigError(f"--lockstep: {','.join(names)} has no model; use it with one of {', '.join(_ALONE)}")
    if models == ["NEXTN"]:
        if not (options.speculative_draft_model_path or options.target_model_path):
            raise ConfigError("--speculative-draft-model-path: NEXTN needs it, or --target-model-path for its modules")
    elif models and not options.speculative_draft_model_path:
        raise ConfigError(f"--speculative-draft-model-path: {models[0]} needs a draft model; name its folder or hub id")
