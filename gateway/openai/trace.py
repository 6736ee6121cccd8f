"""How an answer came about, as REST tells it: trees round by round, and where each token came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from gateway.core.answer import Token
from gateway.core.tokenizer import Tokenizer
from gateway.http.responses import Body
from outrider.protocol.generation import RoundTree


class TracedToken(Body):
    """A token of an answer, and where it came from."""

    id: int
    text: str
    origin: Literal["accepted", "bonus", "plain", "unspecified"]
    """A draft token that the target agreed with; the target's own in a round with drafts; in a round without."""
    depth: int
    """Place among the tokens that its round committed, from 1."""
    drafter: str | None
    """Who guessed it; null for the target's own."""


class TracedRound(Body):
    """The tree that a round verified, and what it accepted. Parents come first; all lists of nodes have one length."""

    position: int
    """Of the first token that it committed; the prompt begins at 0."""
    num_tokens: int
    """Tokens that it committed; a stop string may have cut some off."""
    parents: list[int]
    """Index of each node's parent; -1 below the root."""
    token_ids: list[int]
    texts: list[str]
    drafters: list[str]
    scores: list[float]
    """The drafter's natural-log chance that a node is committed given that its parent is."""
    accepted: list[int]
    """Indices of accepted nodes, the child of the root first."""


class TraceBody(Body):
    """Tokens and rounds of an answer, or of a piece of it."""

    tokens: list[TracedToken]
    rounds: list[TracedRound]


def trace_body(tokens: Sequence[Token], trees: Sequence[RoundTree], tokenizer: Tokenizer) -> TraceBody:
    """`trees` are those of the rounds that committed `tokens`; a stop string may have dropped the last ones."""
    traced = []
    for token, (depth, drafter) in zip(tokens, _places(trees), strict=False):
        origin: Any = token.origin.name.lower()
        traced.append(TracedToken(id=token.id, text=token.text, origin=origin, depth=depth, drafter=drafter))
    return TraceBody(tokens=traced, rounds=[_round(tree, tokenizer) for tree in trees])


def _places(trees: Sequence[RoundTree]) -> Iterator[tuple[int, str | None]]:
    """Depth and drafter of each token that rounds committed."""
    for tree in trees:
        for index in range(tree.num_tokens):
            known = index < len(tree.accepted)
            yield index + 1, tree.drafter_names[tree.drafters[tree.accepted[index]]] if known else None


def _round(tree: RoundTree, tokenizer: Tokenizer) -> TracedRound:
    return TracedRound(
        position=tree.position,
        num_tokens=tree.num_tokens,
        parents=list(tree.parents),
        token_ids=list(tree.token_ids),
        texts=[tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tree.token_ids],
        drafters=[tree.drafter_names[drafter] for drafter in tree.drafters],
        # A float32 has 7 digits, and nobody draws more than 4.
        scores=[round(score, 4) for score in tree.scores],
        accepted=list(tree.accepted),
    )
