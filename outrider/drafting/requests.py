"""The open requests of all sessions, and what each message does to them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter, CombinedDrafter, Needs, Refusal, Tree
from outrider.drafting.grammars import DraftGrammars
from outrider.drafting.registry import build_growth, named_drafters
from outrider.protocol.speculation import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    Features,
    Hello,
    Open,
    Pause,
    Resume,
    VerifyMessage,
)
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.author import Outcome, TreeAuthor

_MAX_NODES_PER_GROW = 256
_RETRYABLE = {DeclineReason.GAP, DeclineReason.UNKNOWN_REQUEST, DeclineReason.OVERLOADED, DeclineReason.DRAINING}


@dataclass(frozen=True, eq=False, slots=True)
class AnswerPort:
    """A session with a verify engine."""

    vocab_size: int
    """Token ids at or past this are illegal."""
    parts: frozenset[int] | None
    """Numbers of the drafters that guess for it; None for all."""
    send: Callable[[Sequence[DraftMessage]], None]
    """Queues answers."""


class Requests:
    """Applies messages. A message that makes no sense is declined, counted, and changes nothing."""

    def __init__(self, drafter: AnyDrafter, options: DraftOptions) -> None:
        self.growth = build_growth(drafter, options)
        self.draining = False
        """While set, no request is opened."""
        self.commits: Counter[Outcome] = Counter()
        self.declines: Counter[DeclineReason] = Counter()
        self.dropped: Counter[str] = Counter()
        self.grammars = DraftGrammars(options)
        self._options = options
        self._max_positions = longest_sequence(drafter.needs.max_positions, options)
        self._handles = itertools.count(1)
        self._trees: dict[tuple[AnswerPort, int], Tree] = {}
        self._ports: dict[int, AnswerPort] = {}

    def __len__(self) -> int:
        return len(self._trees)

    def handle(self, port: AnswerPort, message: VerifyMessage | Features) -> None:
        """Apply one message of a session."""
        if isinstance(message, Hello):
            self.dropped["unexpected"] += 1
        elif isinstance(message, Open):
            self._open(port, message)
        elif (tree := self._trees.get((port, message.request))) is not None:
            self._apply(port, tree, message)
        elif isinstance(message, Features):
            # Its request may have been closed meanwhile, which the other stream told first.
            self.dropped["late_features"] += 1
        elif not isinstance(message, Close):
            self.dropped["unknown_request"] += 1
            self._decline(port, message.request, DeclineReason.UNKNOWN_REQUEST, "open it first")

    def detach(self, port: AnswerPort) -> None:
        """A session ended: free all of its requests."""
        for tree in [tree for (owner, _), tree in self._trees.items() if owner is port]:
            self._close(port, tree)

    def fail(self, port: AnswerPort, message: VerifyMessage | Features) -> None:
        """A message could not be handled because of an error here: give its request up."""
        if isinstance(message, Hello):
            return
        tree = self._trees.get((port, message.request))
        if tree is not None:
            self._give_up(port, tree, Refusal(DeclineReason.UNSPECIFIED, "the drafter failed"))
        elif isinstance(message, Open):
            self._decline(port, message.request, DeclineReason.UNSPECIFIED, "the drafter failed")

    def send_nodes(self) -> None:
        """Send what has grown since the last call, and acknowledge commits."""
        for tree, refusal in self.growth.take_refused():
            self._give_up(self._ports[tree.handle], tree, refusal)
        answers: dict[AnswerPort, list[DraftMessage]] = {}
        for tree in self.growth.take_updates():
            while (grow := tree.author.take(_MAX_NODES_PER_GROW)) is not None:
                answers.setdefault(self._ports[tree.handle], []).append(grow)
            self.growth.answer_phases.end(tree.handle)
        for port, messages in answers.items():
            port.send(messages)

    def _apply(self, port: AnswerPort, tree: Tree, message: Commit | Pause | Resume | Close | Features) -> None:
        if isinstance(message, Commit):
            self._commit(port, tree, message)
        elif isinstance(message, Features):
            self.growth.take_features(tree, message)
        elif isinstance(message, Close):
            self._close(port, tree)
        elif isinstance(message, Pause):
            self.growth.pause(tree)
        else:
            self.growth.resume(tree, message.credit)

    def _open(self, port: AnswerPort, message: Open) -> None:
        tree = self._trees.get((port, message.request))
        if not self._acceptable(port, message.request, message.token_ids, len(message.token_ids)):
            return
        if tree is not None:
            epoch, known = tree.author.epoch, tree.author.committed_len
            tree.author.reopen(message)
            self.growth.follow(tree, known, missed=tree.author.epoch != epoch)
        elif self.draining:
            self._decline(port, message.request, DeclineReason.DRAINING, "the draft service is going away")
        elif len(self._trees) >= self._options.max_requests:
            limit = f"{self._options.max_requests} requests are open"
            self._decline(port, message.request, DeclineReason.OVERLOADED, limit)
        elif not self.growth.has_memory:
            limit = f"{self._options.max_nodes} nodes are live"
            self._decline(port, message.request, DeclineReason.OVERLOADED, limit)
        else:
            self._begin(port, message)

    def _begin(self, port: AnswerPort, message: Open) -> None:
        tree = Tree(next(self._handles), TreeAuthor(message, port.vocab_size), port.vocab_size, port.parts)
        self.grammars.open(tree.author, port.vocab_size)
        self.growth.open(tree)
        self._trees[port, message.request] = tree
        self._ports[tree.handle] = port

    def _commit(self, port: AnswerPort, tree: Tree, message: Commit) -> None:
        known = tree.author.committed_len
        # What does not join the known tokens is a gap, however far away it claims to be.
        joined = max(known, message.length_before + len(message.token_ids)) if message.length_before <= known else known
        if not self._acceptable(port, message.request, message.token_ids, joined):
            if joined > self._max_positions:
                self._close(port, tree)
            return
        outcome = tree.author.apply(message)
        self.commits[outcome] += 1
        if outcome is Outcome.GAP:
            detail = f"{known} tokens are known, the commit begins at {message.length_before}"
            self._decline(port, message.request, DeclineReason.GAP, detail)
        elif outcome is not Outcome.STALE:
            self.growth.follow(tree, known, missed=outcome is Outcome.MISS)

    def _close(self, port: AnswerPort, tree: Tree) -> None:
        del self._trees[port, tree.author.request]
        del self._ports[tree.handle]
        self.growth.close(tree)

    def _give_up(self, port: AnswerPort, tree: Tree, refusal: Refusal) -> None:
        self._close(port, tree)
        self._decline(port, tree.author.request, refusal.reason, refusal.detail)

    def _acceptable(self, port: AnswerPort, request: int, tokens: list[int], length: int) -> bool:
        if length > self._max_positions:
            detail = f"{length} tokens, at most {self._max_positions}"
            self._decline(port, request, DeclineReason.TOO_LONG, detail)
            return False
        if min(tokens) < 0 or max(tokens) >= port.vocab_size:
            self.dropped["malformed"] += 1
            detail = f"a token id is outside the vocabulary of {port.vocab_size}"
            self._decline(port, request, DeclineReason.INVALID, detail)
            return False
        return True

    def _decline(self, port: AnswerPort, request: int, reason: DeclineReason, detail: str) -> None:
        self.declines[reason] += 1
        port.send([Decline(request, reason, reason in _RETRYABLE, detail)])


def longest_sequence(max_positions: int, options: DraftOptions) -> int:
    """Tokens of the longest sequence that is served by a drafter that serves `max_positions`, 0 for any."""
    return min(max_positions or options.max_positions, options.max_positions)


def drafters_of_any_target(drafter: AnyDrafter) -> frozenset[int]:
    """Numbers of the parts of a combined drafter that take any target as it is."""
    parts = drafter.parts if isinstance(drafter, CombinedDrafter) else ()
    return frozenset(number for number, part in enumerate(parts) if part.needs == Needs())


def introduce(drafter: AnyDrafter, options: DraftOptions) -> Hello:
    """What a verify engine is told of the drafter that the options name."""
    needs = drafter.needs
    return Hello(
        PROTOCOL_VERSION,
        NOISE_VERSION,
        model="+".join(named_drafters(options)),
        tokenizer_hash=needs.tokenizer_hash,
        vocab_size=needs.vocab_size,
        hidden_size=needs.hidden_size,
        feature_layers=tuple(needs.feature_layers),
        max_positions=longest_sequence(needs.max_positions, options),
        sources=tuple(drafter.sources),
        projection_columns=needs.projection.num_columns if needs.projection is not None else 0,
        projection_hash=needs.projection.name if needs.projection is not None else "",
        # In lockstep nothing is said before a tree is complete, features and all.
        features_optional=bool(needs.feature_layers and drafters_of_any_target(drafter)) and not options.lockstep,
    )
