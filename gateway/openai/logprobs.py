"""An answer's tokens over REST: their log-probabilities, and the trees and rounds that they came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from gateway.core.answer import Token
from gateway.core.tokenizer import Tokenizer
from gateway.http.responses import Body
from outrider.protocol.generation import PromptLogprobs, RoundTree

_IMPOSSIBLE = -9999.0
"""JSON has no minus infinity."""


class TopLogprob(Body):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    """Log-probabilities of a chat answer, one entry per token."""

    content: list[TokenLogprob]


class CompletionLogprobs(Body):
    """Log-probabilities of a completion, four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for a prompt's first token."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Body):
    """A token of the prompt, or a likely one in its place."""

    logprob: float
    rank: int
    """Rank among all tokens by probability; 1 is the most likely."""
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]
"""An entry for each token of the prompt, by token id; None for the first, which has no token before it."""


class TokenNames:
    """Names of tokens where log-probabilities are returned: their text, or `token_id:` and their id."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Return a token's name in a completion: its bytes if they are not whole characters."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:  # part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(self, token_id: int, logprob: float) -> dict[str, object]:
        """Return a token's fields in a chat answer, where its bytes have a field of their own."""
        data = self._tokenizer.token_bytes(token_id)
        name = self.name(token_id) if self._as_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(data)}


def chat_logprobs(tokens: Sequence[Token], names: TokenNames) -> ChatLogprobs | None:
    """Return log-probabilities of a chat answer's tokens, but not of the one that ends it; None if not asked for."""
    if all(token.logprobs is None for token in tokens):
        return None
    content = []
    for token in tokens:
        if token.logprobs is None or token.ends_answer:
            continue
        top = [TopLogprob(**names.entry(token_id, value)) for token_id, value in token.logprobs.top]
        content.append(TokenLogprob(**names.entry(token.id, token.logprobs.logprob), top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[Token],
    names: TokenNames,
    offset: int,
    *,
    with_end: bool = False,
    prompt: CompletionLogprobs | None = None,
) -> CompletionLogprobs | None:
    """Return log-probabilities of a completion's tokens, after those of its `prompt`; None if not asked for.

    `offset`: characters of text before these tokens. `with_end`: the token that ends an answer has an entry, too, since
    clients that read the entries of the prompt expect one for each token of the completion.
    """
    if not any(t.logprobs is not None for t in tokens):
        return prompt
    lists = prompt or CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        if token.logprobs is None or (token.ends_answer and not with_end):
            continue
        add_completion_logprob(lists, token.id, token.logprobs.logprob, token.logprobs.top, offset, names)
        offset += len(token.text)
    return lists


def add_completion_logprob(
    lists: CompletionLogprobs,
    token_id: int,
    logprob: float,
    top: Iterable[tuple[int, float]],
    offset: int,
    names: TokenNames,
) -> None:
    """Append a token to the four lists."""
    name = names.name(token_id)
    value = finite(logprob)
    lists.tokens.append(name)
    lists.token_logprobs.append(value)
    lists.text_offset.append(offset)
    if lists.top_logprobs is not None:
        named: dict[str, float] = {}
        for likely, likely_logprob in top:
            # Two ids may be spelled alike: keep the likelier one.
            named.setdefault(names.name(likely), finite(likely_logprob))
        lists.top_logprobs.append(named | {name: value})


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def prompt_positions(
    parts: Sequence[PromptLogprobs], num_top: int | None = None
) -> Iterator[tuple[int, float, int, Iterable[tuple[int, float]]]]:
    """Yield position, log-probability, rank and the `num_top` likeliest tokens for each prompt token but the first.

    The likeliest tokens are pairs of token id and log-probability; with None, all that there are.
    """
    for part in parts:
        values, ranks = part.logprobs.tolist(), part.ranks.tolist()
        top_ids, top_values = part.top_ids[:, :num_top].tolist(), part.top_logprobs[:, :num_top].tolist()
        for index, value in enumerate(values):
            yield part.start + index, value, ranks[index], zip(top_ids[index], top_values[index], strict=True)


def prompt_logprobs_body(
    token_ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobsBody:
    """Return vLLM's shape: for each position a mapping by token id, the prompt's own token included."""
    body: PromptLogprobsBody = [None]
    names = TokenNames(tokenizer)
    for position, own_value, own_rank, top in prompt_positions(parts, num_top):
        own = token_ids[position]
        likely = [(token, value, rank) for rank, (token, value) in enumerate(top, start=1) if token != own]
        body.append(
            {
                str(token): PromptLogprob(logprob=finite(value), rank=rank, decoded_token=names.name(token))
                for token, value, rank in [(own, own_value, own_rank), *likely]
            }
        )
    return body


class TracedToken(Body):
    """A token of an answer, and where it came from."""

    id: int
    text: str
    origin: Literal["accepted", "bonus", "plain", "unspecified"]
    """accepted: a draft token that the target accepted; bonus: the target's own token in a round with drafts; plain: a
    token of a round without drafts."""
    depth: int
    """Position among the tokens that its round committed, from 1."""
    drafter: str | None
    """The drafter that guessed it; null for the target's own tokens."""


class TracedRound(Body):
    """The tree that a round verified, and what it accepted. Parents come first; all lists of nodes have the same
    length."""

    position: int
    """Position of the first token that it committed; the prompt begins at 0."""
    num_tokens: int
    """Number of tokens that it committed; a stop string may have cut some off."""
    parents: list[int]
    """Index of each node's parent; -1 below the root."""
    token_ids: list[int]
    texts: list[str]
    drafters: list[str]
    scores: list[float]
    """The drafter's natural logarithm of the probability that a node is committed, given that its parent is."""
    accepted: list[int]
    """Indices of accepted nodes, the child of the root first."""


class TraceBody(Body):
    """Tokens and rounds of an answer, or of a piece of it."""

    tokens: list[TracedToken]
    rounds: list[TracedRound]


def trace_body(tokens: Sequence[Token], trees: Sequence[RoundTree], tokenizer: Tokenizer) -> TraceBody:
    """Return the trace of `tokens`; `trees` are those of the rounds that committed them.

    The rounds may have committed more: a stop string drops the last tokens.
    """
    traced = []
    for token, (depth, drafter) in zip(tokens, _places(trees), strict=False):
        origin: Any = token.origin.name.lower()
        traced.append(TracedToken(id=token.id, text=token.text, origin=origin, depth=depth, drafter=drafter))
    return TraceBody(tokens=traced, rounds=[_round(tree, tokenizer) for tree in trees])


def _places(trees: Sequence[RoundTree]) -> Iterator[tuple[int, str | None]]:
    """Yield depth and drafter of each token that the rounds committed."""
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
        # A float32 has 7 digits, but 4 decimals are enough to show.
        scores=[round(score, 4) for score in tree.scores],
        accepted=list(tree.accepted),
    )
