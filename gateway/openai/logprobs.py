"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gateway.core.events import Token
from gateway.core.tokenizer import Tokenizer
from gateway.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

_IMPOSSIBLE = -9999.0
"""JSON has no minus infinity."""


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
    tokens: Sequence[Token], tokenizer: Tokenizer, offset: int, *, with_end: bool = False
) -> CompletionLogprobs | None:
    """Those of a completion's tokens; None where none were asked for.

    `offset`: characters of text before them. `with_end`: the token that ends an answer has an entry, too, as clients
    expect that read the prompt's: they count one for each token of the completion.
    """
    if not any(t.logprobs is not None for t in tokens):
        return None
    shape = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        if token.logprobs is None or (token.ends_answer and not with_end):
            continue
        add_completion_logprob(shape, token.id, token.logprobs.logprob, token.logprobs.top, offset, tokenizer)
        offset += len(token.text)
    return shape


def add_completion_logprob(
    shape: CompletionLogprobs,
    token_id: int,
    logprob: float,
    top: Iterable[tuple[int, float]],
    offset: int,
    tokenizer: Tokenizer,
) -> None:
    """Append a token to the four lists."""
    name = token_name(token_id, tokenizer)
    value = finite(logprob)
    shape.tokens.append(name)
    shape.token_logprobs.append(value)
    shape.text_offset.append(offset)
    if shape.top_logprobs is not None:
        named: dict[str, float] = {}
        for likely, likely_logprob in top:
            # Two ids may be spelled alike: the likelier one stands.
            named.setdefault(token_name(likely, tokenizer), finite(likely_logprob))
        shape.top_logprobs.append(named | {name: value})


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
