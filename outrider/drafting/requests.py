"""The open requests of all sessions, the effect of each message on them, and their grammars on the draft's side.

Verify decides on tokens, and masks its samples. Here a grammar only filters guesses, and adds a token where no other
is allowed. While a grammar is not compiled, or if the target's tokenizer is missing, all guesses go out, and verify
drops the wrong ones.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue

import numpy as np
from numpy.typing import NDArray

from outrider.config.draft import DraftOptions
from outrider.drafting.base import ANY_TOKEN, AnyDrafter, CombinedDrafter, Needs, parts_of
from outrider.drafting.registry import build_growth, drafts_on_demand, named_drafters
from outrider.drafting.tree_growth import Refusal, Tree
from outrider.errors import OutriderError
from outrider.grammar.compiler import GrammarNode, GrammarState, GrammarVocabulary, compile_grammar
from outrider.logs import get_logger
from outrider.models.config import text_fields
from outrider.models.drafters.kinds import draft_name
from outrider.models.fields import get_eos_token_ids, read_json
from outrider.models.store import local_folder
from outrider.models.store_folder import hash_token_ids
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

_logger = get_logger(__name__)

_MAX_WAITING = 64
"""Most grammars that wait to be compiled; further requests are drafted without their grammar."""


class GrammarGuide:
    """Tells which children a request's grammar allows. The engine's thread asks; another thread sets `state`."""

    def __init__(self, author: TreeAuthor) -> None:
        self.state: GrammarState | None = None
        """None until the grammar is compiled; until then every token is allowed."""
        self._author = author
        self._root = (0, -1)
        self._known: dict[int, GrammarNode | None] = {}
        """States of the author's nodes, valid for the epoch and root in `_root`."""

    def allows(self, parent: int, token: int) -> bool:
        """See Guide."""
        if self.state is None or self.state.error is not None:
            return True
        node = self._find(self.state, parent)
        return node is not None and (node.mask is None or node.allows(token))

    def forced(self, parent: int) -> int | None:
        """See Guide."""
        node = None if self.state is None else self._find(self.state, parent)
        return None if node is None or node.mask is None else only_token(node.mask)

    def _find(self, state: GrammarState, parent: int) -> GrammarNode | None:
        """Return the state behind a node; None if the node is illegal or ends the answer, so that nothing follows."""
        author = self._author
        followed = author.prompt_len + state.num_committed
        if followed < author.committed_len:
            state.follow(author.tokens[followed:])
        if self._root != (author.epoch, author.root):
            self._root = (author.epoch, author.root)
            self._known = {}
        if parent not in self._known:
            path = self._path(parent)
            ends = path[-1:] and path[-1] in state.compiled.vocabulary.end_ids
            node = None if ends else state.find(path)
            if node is not None:
                state.mask(node, path)
            self._known[parent] = node
        return self._known[parent]

    def _path(self, node_id: int) -> tuple[int, ...]:
        path: list[int] = []
        while node_id != self._author.root:
            node = self._author.node(node_id)
            path.append(node.token)
            node_id = node.parent
        return tuple(path[::-1])


def only_token(mask: NDArray[np.int32]) -> int | None:
    """Return the token that a mask allows, if it allows just one."""
    words = mask.view(np.uint32).nonzero()[0]
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else int(words[0]) * 32 + bits.bit_length() - 1


class DraftGrammars:
    """Gives authors of requests with a grammar their guides. The engine's thread calls; another thread compiles."""

    def __init__(self, options: DraftOptions) -> None:
        self._options = options
        self._token_ids_hash = ""
        self._orders: Queue[Callable[[], None]] = Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._vocabularies: dict[tuple[str, int], GrammarVocabulary | None] = {}
        """By hash of token ids and size; None where the tokenizer was not found, so that it is looked for only once."""

    def serve(self, token_ids_hash: str, vocabulary: GrammarVocabulary | None = None) -> None:
        """Set the target's tokenizer from now on; `token_ids_hash` is empty if verify does not say.

        `vocabulary`: the vocabulary of that tokenizer, if it was read already.
        """
        self._token_ids_hash = token_ids_hash
        if vocabulary is not None:
            self._vocabularies[token_ids_hash, vocabulary.size] = vocabulary

    def open(self, author: TreeAuthor, vocab_size: int) -> None:
        """Give a new request's author its guide, if the request has a grammar."""
        if author.sampling.grammar is None:
            return
        guide = GrammarGuide(author)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(partial(self._compile, guide, author, vocab_size, self._token_ids_hash))
        except Full:
            return
        author.guide = guide

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                order()
            except OutriderError as error:
                _logger.info("a request is drafted without its grammar: %s", error.message)
            except Exception:
                _logger.exception("a grammar could not be compiled")
            finally:
                self._orders.task_done()

    def _compile(self, guide: GrammarGuide, author: TreeAuthor, vocab_size: int, token_ids_hash: str) -> None:
        grammar = author.sampling.grammar
        vocabulary = self._vocabulary(token_ids_hash, vocab_size)
        if vocabulary is None or grammar is None:
            return
        # A grammar is not compiled anew in mid-answer just for guesses: the rest is then drafted without it.
        guide.state = GrammarState(compile_grammar(grammar, vocabulary))

    def _vocabulary(self, token_ids_hash: str, vocab_size: int) -> GrammarVocabulary | None:
        """Return the target's vocabulary, if its tokenizer is here. Raises ConfigError, once, if it cannot be read."""
        key = (token_ids_hash, vocab_size)
        if key not in self._vocabularies:
            self._vocabularies[key] = None
            folder = find_tokenizer(self._options, token_ids_hash)
            if folder is not None:
                self._vocabularies[key] = GrammarVocabulary.from_folder(folder, vocab_size, _end_ids(folder))
            else:
                _logger.warning(
                    "requests with a grammar are drafted without it: the target's tokenizer is not here; name its "
                    "folder with --target-model-path"
                )
        return self._vocabularies[key]


def _end_ids(folder: Path) -> list[int]:
    """Return the tokens that end an answer, as in `outrider.models.config`."""
    names = [name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    return [token for name in names for token in get_eos_token_ids(text_fields(read_json(folder / name)), name)]


def find_tokenizer(options: DraftOptions, wanted: str) -> Path | None:
    """Return the folder of a named model on this machine whose `hash_token_ids` is `wanted` (empty: any)."""
    for name in filter(None, (options.target_model_path, draft_name(options))):
        folder = local_folder(name)
        found = hash_token_ids(folder)
        if found and wanted in ("", found):
            return folder
    return None


_MAX_NODES_PER_GROW = 256
_RETRYABLE = {DeclineReason.GAP, DeclineReason.UNKNOWN_REQUEST, DeclineReason.OVERLOADED, DeclineReason.DRAINING}


@dataclass(frozen=True, eq=False, slots=True)
class AnswerPort:
    """A session with a verify engine."""

    vocab_size: int
    """Token ids at or past this are illegal."""
    parts: frozenset[int] | None
    """Numbers of the drafters that guess for this session; None for all."""
    send: Callable[[Sequence[DraftMessage]], None]
    """Queues answers to verify."""


class Requests:
    """Applies messages. A message that makes no sense changes nothing: it is declined and counted."""

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
        self._takes_any_token = bool(drafters_of_any_target(drafter))
        """Whether token ids past a draft model's vocabulary are fine, since other drafters can serve the request."""
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
            # The request may be closed already: that message came first, on the other stream.
            self.dropped["late_features"] += 1
        elif not isinstance(message, Close):
            self.dropped["unknown_request"] += 1
            self._decline(port, message.request, DeclineReason.UNKNOWN_REQUEST, "open it first")

    def detach(self, port: AnswerPort) -> None:
        """End a session: free all of its requests."""
        for tree in [tree for (owner, _), tree in self._trees.items() if owner is port]:
            self._close(port, tree)

    def fail(self, port: AnswerPort, message: VerifyMessage | Features) -> None:
        """Give up the request of a message that could not be handled because of an error here."""
        if isinstance(message, Hello):
            return
        tree = self._trees.get((port, message.request))
        if tree is not None:
            self._give_up(port, tree, Refusal(DeclineReason.UNSPECIFIED, "the drafter failed"))
        elif isinstance(message, Open):
            self._decline(port, message.request, DeclineReason.UNSPECIFIED, "the drafter failed")

    def send_nodes(self) -> None:
        """Send nodes that have grown since the last call, and acknowledge commits."""
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
        tree = Tree(next(self._handles), TreeAuthor(message, port.vocab_size), port.parts)
        self.grammars.open(tree.author, port.vocab_size)
        self.growth.open(tree)
        self._trees[port, message.request] = tree
        self._ports[tree.handle] = port

    def _commit(self, port: AnswerPort, tree: Tree, message: Commit) -> None:
        known = tree.author.committed_len
        # Tokens that do not join the known ones are a gap, however far away they claim to be.
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
        tree.author.guide = None  # the cycle would keep all masks until the garbage collector runs

    def _give_up(self, port: AnswerPort, tree: Tree, refusal: Refusal) -> None:
        self._close(port, tree)
        self._decline(port, tree.author.request, refusal.reason, refusal.detail)

    def _acceptable(self, port: AnswerPort, request: int, tokens: list[int], length: int) -> bool:
        if length > self._max_positions:
            detail = f"{length} tokens, at most {self._max_positions}"
            self._decline(port, request, DeclineReason.TOO_LONG, detail)
            return False
        most = ANY_TOKEN if self._takes_any_token else port.vocab_size
        if min(tokens) < 0 or max(tokens) >= most:
            self.dropped["malformed"] += 1
            detail = f"a token id is outside the vocabulary of {most}"
            self._decline(port, request, DeclineReason.INVALID, detail)
            return False
        return True

    def _decline(self, port: AnswerPort, request: int, reason: DeclineReason, detail: str) -> None:
        self.declines[reason] += 1
        port.send([Decline(request, reason, reason in _RETRYABLE, detail)])


def longest_sequence(max_positions: int, options: DraftOptions) -> int:
    """Return the longest sequence, in tokens, that a drafter for `max_positions` serves; 0 there stands for any."""
    return min(max_positions or options.max_positions, options.max_positions)


def drafters_of_any_target(drafter: AnyDrafter) -> frozenset[int]:
    """Return the numbers of a combined drafter's parts that have no needs, and so serve any target."""
    parts = drafter.parts if isinstance(drafter, CombinedDrafter) else ()
    return frozenset(number for number, part in enumerate(parts) if part.needs == Needs())


def introduce(drafter: AnyDrafter, options: DraftOptions) -> Hello:
    """Return the hello that describes the drafter of the options to a verify engine."""
    needs = drafter.needs
    return Hello(
        PROTOCOL_VERSION,
        NOISE_VERSION,
        model="+".join(named_drafters(options)),
        token_ids_hash=needs.token_ids_hash,
        vocab_size=needs.vocab_size,
        hidden_size=needs.hidden_size,
        feature_layers=tuple(needs.feature_layers),
        max_positions=longest_sequence(needs.max_positions, options),
        sources=tuple(drafter.sources),
        projection_columns=needs.projection.num_columns if needs.projection is not None else 0,
        projection_hash=needs.projection.name if needs.projection is not None else "",
        # In lockstep nothing is sent before a tree is complete, and a model's part of it needs features.
        features_optional=bool(needs.feature_layers and drafters_of_any_target(drafter)) and not options.lockstep,
        drafts_on_demand=drafts_on_demand(parts_of(drafter), options),
    )
