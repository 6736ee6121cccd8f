"""A round: what goes into one forward, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import OutriderError
from outrider.grammar.compiler import Mask
from outrider.protocol.generation import PromptLogprobs, TokenLogprobs
from outrider.tree.mirror import TreeMirror
from verify_service.engine.request import Request

if TYPE_CHECKING:
    import torch


@dataclass(eq=False, slots=True)
class Nodes:
    """Tree nodes of one request in a round, parents first.

    Entry i hangs below entry `parents[i]`, or below the root if that is -1. Depths count from the root, so a
    child of the root has depth 1.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: Sequence[int] = ()
    slots: Sequence[int] = ()
    """Slots of the nodes in the tree's mirror, until it takes another message. Nodes that only grew on the device come
    behind those of the mirror, and have none."""
    scores: Sequence[float] = ()
    """Path scores of nodes that grew on the device, once the round has ended; 1 for those that only the mirror has."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def only(self, keep: Sequence[bool]) -> Nodes:
        """Return the nodes to keep; a node whose parent is dropped must be dropped, too."""
        kept = [index for index, is_kept in enumerate(keep) if is_kept]
        if len(kept) == len(self):
            return self
        places = {old: new for new, old in enumerate(kept)}
        parents = [places[parent] if (parent := self.parents[old]) >= 0 else -1 for old in kept]
        token_ids, depths = [self.token_ids[old] for old in kept], [self.depths[old] for old in kept]
        slots = [self.slots[old] for old in kept if old < len(self.slots)]
        return Nodes(token_ids, parents, depths, slots, [self.scores[old] for old in kept] if self.scores else ())


_NO_NODES = Nodes()


@dataclass(eq=False, slots=True)
class Entry:
    """One request's part of a round.

    `num_extend` committed tokens from `start` on are computed. When they reach the root (`samples`), the nodes
    below it are verified and tokens are sampled.
    """

    request: Request
    num_extend: int
    nodes: Nodes = _NO_NODES
    """Nodes that grew on the device are added when the round has ended (`Pending.take_nodes`)."""
    max_grown: int = 0
    """Most nodes to take, beside `nodes`, from the tree that grew on the device; their pages are reserved."""
    is_ahead: bool = False
    """Whether the round before is still running: the root is the one token that that round commits."""
    start: int = field(init=False)
    """Position of the first token that is computed: where the request's valid KV ends when the round begins."""
    samples: bool = field(init=False)
    """Whether the chunk reaches the root."""
    node_sources: NodeSources | None = None
    """Where the nodes come from, for a request that is traced."""
    masks: Sequence[Mask] = ()
    """Tokens that may follow the root and each node, in their order; empty without a grammar or bad words."""
    error: OutriderError | None = None
    """Why the request fails; what is sampled for it does not count then."""

    def __post_init__(self) -> None:
        request = self.request
        self.start = request.cached_len + self.is_ahead
        self.samples = self.start + self.num_extend == len(request.tokens) + self.is_ahead

    @property
    def prefills(self) -> bool:
        """Whether more is computed than a root and its nodes."""
        return self.num_extend > 1 or not self.samples

    def is_long(self, steady_rows: int) -> bool:
        """Whether the entry computes more tokens of a prompt than a forward may have rows that do not depend on each
        other (LanguageModel.steady_rows); with 0 none is long."""
        return 0 < steady_rows < self.num_extend and self.start < self.request.prompt_len

    @property
    def scored(self) -> range:
        """Prompt positions of the chunk whose logits are asked for, each for the token after it."""
        request = self.request
        if request.params.num_prompt_logprobs is None:
            return range(0)
        first, end = self.start, self.start + self.num_extend
        return range(max(first, request.num_scored), min(end, request.prompt_len - 1))

    @property
    def num_tokens(self) -> int:
        """Token slots that the entry takes in the forward."""
        return self.num_extend + len(self.nodes.token_ids)


class Growth(NamedTuple):
    """How the trees of the next round grow on the device, behind this one."""

    num_steps: int
    """Most levels, at least 1."""
    num_nodes: int
    """Nodes over all requests."""


class TakenTrees(NamedTuple):
    """What a round takes from the trees that grew behind the round before."""

    growth: Growth
    num_rows: int
    """Requests of the round before, padding included."""
    num_nodes: int


class Batch(NamedTuple):
    """A round that is to be run."""

    entries: Sequence[Entry]
    wait_seconds: float
    """How long the round waited for drafts."""
    num_ready_nodes: int
    """Tree nodes that the round would have taken without a wait."""
    growth: Growth | None = None
    """Growth behind the round on the same device, if any."""
    taken: TakenTrees | None = None
    """What the round takes from trees that grew behind the round before."""
    resting: bool = False
    """Whether the round leaves out nodes of drafts because plain rounds are faster."""


class Result(NamedTuple):
    """The target's result for an entry: the accepted draft tokens and the bonus token, or no tokens after a chunk."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    error: OutriderError | None = None
    """Set if this request alone failed, behind these tokens."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt tokens behind the positions of `Entry.scored`."""

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return max(len(self.token_ids) - 1, 0)


class Pending:
    """A round that was launched. Times are known once `wait` has returned, and None if they are not measured."""

    gap_seconds: float | None = None
    """How long the device was idle before the round; also None if other work lay in between."""
    gpu_seconds: float | None = None
    """How long the device worked on the round."""
    drafting_seconds: float | None = None
    """How long the device drafted behind the round before; also None if it did not."""
    complete: torch.cuda.Event | None = None
    """Event after which the round's features are stored; None if they are stored once `wait` has returned."""

    def done(self) -> bool:
        """Whether `wait` has nothing left to wait for. Never blocks."""
        raise NotImplementedError

    def wait(self) -> list[Result]:
        """Wait for the round; return results in the order of the entries. An exception ends the engine."""
        raise NotImplementedError

    def take_nodes(self) -> None:
        """Add the nodes that grew on the device to the entries that took them; called once, when `wait` has returned.

        This is not a part of `wait`, because the next round can be launched before.
        """


class NodeSources(NamedTuple):
    """Which drafters found the nodes that a round takes of a tree, and how likely they thought them."""

    drafters: Sequence[int]
    scores: Sequence[float]
    drafter_names: Sequence[str]


NO_SOURCES = NodeSources((), (), ())


def node_sources(mirror: TreeMirror, slots: Sequence[int], sources: Sequence[str]) -> NodeSources:
    """Return the sources of the nodes in `slots` of a mirror. `sources`: the draft's names of its drafters."""
    found = [mirror.sources[slot] for slot in slots]
    used = sorted(set(found))
    # A draft may have given fewer names than it uses: nothing that it says is trusted.
    names = [sources[source] if source < len(sources) else f"source {source}" for source in used]
    places = {source: place for place, source in enumerate(used)}
    return NodeSources([places[source] for source in found], [mirror.scores[slot] for slot in slots], names)


def follow(parents: Sequence[int], token_ids: Sequence[int], committed: Sequence[int]) -> list[int]:
    """Return the indices of the nodes along committed tokens, from the root on, as far as there are any."""
    children = {pair: index for index, pair in enumerate(zip(parents, token_ids, strict=True))}
    path: list[int] = []
    for token in committed:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def count_given(nodes: Nodes, committed: Sequence[int]) -> int:
    """Return how many nodes along committed tokens a mirror has; those that only grew on the device follow them."""
    count = len(nodes.slots)
    return len(follow(nodes.parents[:count], nodes.token_ids[:count], committed)) if count else 0


def varied_tokens(count: int, vocab_size: int) -> list[int]:
    """Return random token ids to measure forwards with: copies of one token would use the same few experts."""
    return Random(0).choices(range(vocab_size), k=count)
