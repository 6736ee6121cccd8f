"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.events import Token
from gateway.rest.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from gateway.tokenizer import Tokenizer

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


def completion_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer, offset: int) -> CompletionLogprobs | None:
    """Those of a completion's tokens; None where none were asked for. `offset`: characters of text before them."""
    if not any(t.logprobs is not None for t in tokens):
        return None
    shape = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        if token.logprobs is None or token.ends_answer:
            continue
        name = _completion_name(token.id, tokenizer)
        value = _finite(token.logprobs.logprob)
        shape.tokens.append(name)
        shape.token_logprobs.append(value)
        shape.text_offset.append(offset)
        if shape.top_logprobs is not None:
            top: dict[str, float] = {}
            for token_id, logprob in token.logprobs.top:
                # Two ids may be spelled alike: the likelier one stands.
                top.setdefault(_completion_name(token_id, tokenizer), _finite(logprob))
            shape.top_logprobs.append(top | {name: value})
        offset += len(token.text)
    return shape


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _completion_name(token_id: int, tokenizer: Tokenizer) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:  # part of a character
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
