"""Log-probabilities of answers and prompts in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from gateway.core.answer import Token
from gateway.core.tokenizer import Tokenizer
from gateway.http.responses import Body
from outrider.protocol.generation import PromptLogprobs

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
    """Log-probabilities of a chat answer, a token an entry."""

    content: list[TokenLogprob]


class CompletionLogprobs(Body):
    """Log-probabilities of a completion, four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for a prompt's first token, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Body):
    """A prompt's token, or a likely one in its place."""

    logprob: float
    rank: int
    """Place among all tokens by probability; 1 is the likeliest."""
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]
"""An entry for each of the prompt's tokens, by token id; None for the first, which nothing comes before."""


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> ChatLogprobs | None:
    """Those of a chat answer's tokens; None where none were asked for. The token that ends an answer is left out."""
    known = [t for t in tokens if t.logprobs is not None]
    if not known:
        return None
    content = []
    for token in known:
        if token.logprobs is None or token.ends_answer:
            continue
        top = [TopLogprob(**_named(token_id, value, tokenizer)) for token_id, value in token.logprobs.top]
        content.append(TokenLogprob(**_named(token.id, token.logprobs.logprob, tokenizer), top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[Token],
    tokenizer: Tokenizer,
    offset: int,
    *,
    with_end: bool = False,
    prompt: CompletionLogprobs | None = None,
) -> CompletionLogprobs | None:
    """Those of a completion's tokens, behind those of its `prompt`; None where none were asked for.

    `offset`: characters of text before them. `with_end`: the token that ends an answer has an entry, too, as clients
    expect that read the prompt's: they count one for each token of the completion.
    """
    if not any(t.logprobs is not None for t in tokens):
        return prompt
    lists = prompt or CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        if token.logprobs is None or (token.ends_answer and not with_end):
            continue
        add_completion_logprob(lists, token.id, token.logprobs.logprob, token.logprobs.top, offset, tokenizer)
        offset += len(token.text)
    return lists


def add_completion_logprob(
    lists: CompletionLogprobs,
    token_id: int,
    logprob: float,
    top: Iterable[tuple[int, float]],
    offset: int,
    tokenizer: Tokenizer,
) -> None:
    """Append a token to the four lists."""
    name = token_name(token_id, tokenizer)
    value = finite(logprob)
    lists.tokens.append(name)
    lists.token_logprobs.append(value)
    lists.text_offset.append(offset)
    if lists.top_logprobs is not None:
        named: dict[str, float] = {}
        for likely, likely_logprob in top:
            # Two ids may be spelled alike: the likelier one stands.
            named.setdefault(token_name(likely, tokenizer), finite(likely_logprob))
        lists.top_logprobs.append(named | {name: value})


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text, or as its bytes where they are part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:  # part of a character
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A log-probability as JSON can carry it."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def prompt_positions(
    parts: Sequence[PromptLogprobs], num_top: int | None = None
) -> Iterator[tuple[int, float, int, Iterable[tuple[int, float]]]]:
    """Of each prompt token but the first: position, log-probability, rank, and the `num_top` likeliest tokens there.

    The likeliest are pairs of token id and log-probability; None takes all that there are.
    """
    for part in parts:
        values, ranks = part.logprobs.tolist(), part.ranks.tolist()
        top_ids, top_values = part.top_ids[:, :num_top].tolist(), part.top_logprobs[:, :num_top].tolist()
        for index, value in enumerate(values):
            yield part.start + index, value, ranks[index], zip(top_ids[index], top_values[index], strict=True)


def prompt_logprobs_body(
    token_ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobsBody:
    """vLLM's shape: a mapping of token ids at each position, the prompt's own token included."""
    body: PromptLogprobsBody = [None]
    for position, own_value, own_rank, top in prompt_positions(parts, num_top):
        own = token_ids[position]
        likely = [(token, value, rank) for rank, (token, value) in enumerate(top, start=1) if token != own]
        body.append(
            {
                str(token): PromptLogprob(logprob=finite(value), rank=rank, decoded_token=token_name(token, tokenizer))
                for token, value, rank in [(own, own_value, own_rank), *likely]
            }
        )
    return body
