"""Grammars as drafts see them: what the target will not commit is not worth sending.

Verify owns the truth, and masks what it samples. Here a grammar keeps guesses back, and adds those that it leaves no
choice about. Where it is not known (yet), or the target's tokenizer is missing, all guesses go out, and verify drops
the wrong ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Full, Queue

import numpy as np
from numpy.typing import NDArray

from outrider.config.draft import DraftOptions
from outrider.errors import OutriderError
from outrider.grammar.compiler import GrammarNode, GrammarState, GrammarVocabulary, compile_grammar
from outrider.logs import get_logger
from outrider.models.drafters.kinds import draft_name
from outrider.models.fields import get_token_ids, read_json
from outrider.models.store import local_folder
from outrider.models.store_folder import hash_tokenizer
from outrider.tree.author import TreeAuthor

_logger = get_logger(__name__)

_MAX_WAITING = 64
"""Grammars that may wait to be compiled; with more, requests are drafted without theirs."""


class GrammarGuide:
    """Which children a request's grammar allows. The engine's thread asks; another one brings the state."""

    def __init__(self, author: TreeAuthor) -> None:
        self.state: GrammarState | None = None
        """None until it is compiled; all is allowed then."""
        self._author = author
        self._root = (0, -1)
        self._known: dict[int, GrammarNode | None] = {}
        """States of the author's nodes, below the root of `_root`."""

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
        """The state behind a node; None where nothing is committed behind it: it is not legal, or ends the answer."""
        known = self._followed(state)
        if parent not in known:
            path = self._path(parent)
            ends = path[-1:] and path[-1] in state.compiled.vocabulary.end_ids
            node = None if ends else state.find(path)
            if node is not None:
                state.mask(node, path)
            known[parent] = node
        return known[parent]

    def _followed(self, state: GrammarState) -> dict[int, GrammarNode | None]:
        author = self._author
        known = author.prompt_len + state.num_committed
        if known < author.committed_len:
            state.follow(author.tokens[known:])
        if self._root != (author.epoch, author.root):
            self._root = (author.epoch, author.root)
            self._known = {}
        return self._known

    def _path(self, node_id: int) -> tuple[int, ...]:
        path: list[int] = []
        while node_id != self._author.root:
            node = self._author.node(node_id)
            path.append(node.token)
            node_id = node.parent
        return tuple(path[::-1])


def only_token(mask: NDArray[np.int32]) -> int | None:
    """The token that a mask allows, if it is one alone."""
    words = mask.view(np.uint32).nonzero()[0]
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else int(words[0]) * 32 + bits.bit_length() - 1


class DraftGrammars:
    """Gives authors of requests with a grammar their guides, compiled on a thread. The engine's thread uses it."""

    def __init__(self, options: DraftOptions) -> None:
        self._options = options
        self._tokenizer_hash = ""
        self._orders: Queue[Callable[[], None]] = Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._vocabularies: dict[tuple[str, int], GrammarVocabulary | None] = {}
        """By tokenizer and size; None where there is none, so that it is looked for once."""

    def serve(self, tokenizer_hash: str, vocabulary: GrammarVocabulary | None = None) -> None:
        """The target's tokenizer is this one from now on; empty if verify does not say.

        `vocabulary`: that tokenizer, where it was read already.
        """
        self._tokenizer_hash = tokenizer_hash
        if vocabulary is not None:
            self._vocabularies[tokenizer_hash, vocabulary.size] = vocabulary

    def open(self, author: TreeAuthor, vocab_size: int) -> None:
        """A request begins."""
        if author.sampling.grammar is None:
            return
        guide = GrammarGuide(author)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(partial(self._compile, guide, author, vocab_size, self._tokenizer_hash))
        except Full:
            return
        author.guide = guide

    def settle(self) -> None:
        """Wait until the grammars of all open requests are compiled."""
        self._orders.join()

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

    def _compile(self, guide: GrammarGuide, author: TreeAuthor, vocab_size: int, tokenizer_hash: str) -> None:
        grammar = author.sampling.grammar
        vocabulary = self._vocabulary(tokenizer_hash, vocab_size)
        if vocabulary is None or grammar is None:
            return
        # Guesses are not worth compiling it anew in mid-answer: from there on the answer is drafted without it.
        guide.state = GrammarState(compile_grammar(grammar, vocabulary))

    def _vocabulary(self, tokenizer_hash: str, vocab_size: int) -> GrammarVocabulary | None:
        """The target's, if its tokenizer is at hand. Raises ConfigError for one that cannot be read, once."""
        key = (tokenizer_hash, vocab_size)
        if key not in self._vocabularies:
            self._vocabularies[key] = None
            folder = find_tokenizer(self._options, tokenizer_hash)
            if folder is not None:
                self._vocabularies[key] = GrammarVocabulary.from_folder(folder, vocab_size, _end_ids(folder))
            else:
                _logger.warning(
                    "requests with a grammar are drafted without it: the target's tokenizer is not here; name its "
                    "folder with --target-model-path"
                )
        return self._vocabularies[key]


def _end_ids(folder: Path) -> list[int]:
    """Tokens that end an answer, as `outrider.models.config` has them."""
    names = [name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    return [token for name in names for token in get_token_ids(read_json(folder / name), "eos_token_id", name)]


def find_tokenizer(options: DraftOptions, wanted: str) -> Path | None:
    """A folder on this machine with the tokenizer of this SHA-256 (any, if that is empty), among the models named."""
    for name in filter(None, (options.target_model_path, draft_name(options))):
        folder = local_folder(name)
        found = hash_tokenizer(folder)
        if found and wanted in ("", found):
            return folder
    return None
