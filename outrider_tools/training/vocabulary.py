"""The reduced vocabulary of a drafter: the tokens that the target's own text is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider_tools.training.texts import Texts


def choose_vocabulary(
    texts: Texts, vocab_size: int, draft_vocab_size: int, always: Sequence[int] = ()
) -> NDArray[np.int64]:
    """The most frequent tokens of the answers, as ascending target ids [draft_vocab_size]; those `always` are in.

    Tokens that do not occur follow in the order of their ids: byte-level vocabularies list the common ones first.

    Raises:
        ConfigError: more are wanted than there are.
    """
    if not len(set(always)) <= draft_vocab_size <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {draft_vocab_size} of the target's {vocab_size} tokens is impossible")
    counts = np.bincount(texts.answer_tokens(), minlength=vocab_size)
    counts[list(always)] = np.iinfo(np.int64).max
    chosen = np.argsort(-counts, kind="stable")[:draft_vocab_size]
    return np.sort(chosen)


def coverage(texts: Texts, chosen: NDArray[np.int64], vocab_size: int) -> float:
    """Share of the answers' tokens that a vocabulary holds."""
    known = np.zeros(vocab_size, np.bool_)
    known[chosen] = True
    return int(known[texts.answer_tokens()].sum()) / max(1, texts.num_answer_tokens)
