"""How an answer came about, as REST tells it: trees round by round, and where each token came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from gateway.core.events import Token
from gateway.core.tokenizer import Tokenizer
from gateway.openai.responses import TraceBody, TracedRound, TracedToken
from outrider.protocol.tokens import RoundTree, TokenOrigin


def trace_body(tokens: Sequence[Token], trees: Sequence[RoundTree], tokenizer: Tokenizer) -> TraceBody:
    """`trees` are those of the rounds that committed `tokens`; a stop string may have dropped the last ones."""
    return TraceBody(
        tokens=[
            TracedToken(id=token.id, text=token.text, origin=_WORDS[token.origin], depth=depth, drafter=drafter)
            for token, (depth, drafter) in zip(tokens, _places(trees), strict=False)
        ],
        rounds=[_round(tree, tokenizer) for tree in trees],
    )


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


_WORDS: dict[TokenOrigin, Literal["accepted", "bonus", "plain", "unspecified"]] = {
    TokenOrigin.ACCEPTED: "accepted",
    TokenOrigin.BONUS: "bonus",
    TokenOrigin.PLAIN: "plain",
    TokenOrigin.UNSPECIFIED: "unspecified",
}
