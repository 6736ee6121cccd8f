"""What clients are told of their own prompt: its text, and the log-probabilities of its tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.core.tokenizer import Tokenizer
from gateway.openai.logprobs import add_completion_logprob, finite, token_name
from gateway.openai.responses import CompletionLogprobs, PromptLogprob, PromptLogprobsBody
from outrider.protocol.tokens import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back."""

    token_ids: Sequence[int]
    text: str
    pieces: Sequence[str]
    """The text of each token; half a character counts for the token that ends it."""
    num_top: int | None
    """Likely tokens told at each position; None where no log-probabilities were asked for."""

    @classmethod
    def of(cls, token_ids: Sequence[int], text: str | None, num_top: int | None, tokenizer: Tokenizer) -> Echo:
        """`text`: the prompt where it was sent as text, which its tokens may spell otherwise."""
        pieces = prompt_pieces(token_ids, tokenizer)
        return cls(token_ids, "".join(pieces) if text is None else text, pieces, num_top)


def prompt_pieces(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each of a prompt's tokens, special ones spelled out."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = len(token_ids) - 1
    return [decoder.decode(tokenizer.token_bytes(token), i == last) for i, token in enumerate(token_ids)]


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """Parts that follow each other as one; None where there are none, as of a prompt of one token."""
    if not parts:
        return None
    names = ("logprobs", "ranks", "top_ids", "top_logprobs")
    return PromptLogprobs(parts[0].start, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def echo_logprobs(echo: Echo, parts: Sequence[PromptLogprobs], tokenizer: Tokenizer) -> CompletionLogprobs | None:
    """The prompt's part of a completion's log-probabilities; None where none were asked for."""
    if echo.num_top is None:
        return None
    shape = CompletionLogprobs(
        tokens=[token_name(echo.token_ids[0], tokenizer)], token_logprobs=[None], top_logprobs=[None], text_offset=[0]
    )
    offset = len(echo.pieces[0])
    for part in parts:
        values, top_ids, top_values = part.logprobs.tolist(), part.top_ids.tolist(), part.top_logprobs.tolist()
        for index, value in enumerate(values):
            position = part.start + index
            top = zip(top_ids[index][: echo.num_top], top_values[index], strict=False)
            add_completion_logprob(shape, echo.token_ids[position], value, top, offset, tokenizer)
            offset += len(echo.pieces[position])
    return shape


def together(one: CompletionLogprobs | None, other: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The prompt's lists with the answer's behind them."""
    if one is None or other is None:
        return one or other
    return CompletionLogprobs(
        tokens=one.tokens + other.tokens,
        token_logprobs=one.token_logprobs + other.token_logprobs,
        top_logprobs=(one.top_logprobs or []) + (other.top_logprobs or []),
        text_offset=one.text_offset + other.text_offset,
    )


def prompt_logprobs_body(
    token_ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobsBody:
    """vLLM's shape: a mapping of token ids at each position, the prompt's own token included."""
    body: PromptLogprobsBody = [None]
    for part in parts:
        ranks, values = part.ranks.tolist(), part.logprobs.tolist()
        top_ids, top_values = part.top_ids.tolist(), part.top_logprobs.tolist()
        for index, value in enumerate(values):
            own = token_ids[part.start + index]
            likely = list(enumerate(zip(top_ids[index][:num_top], top_values[index], strict=False), start=1))
            found = [(own, value, ranks[index]), *((token, top, rank) for rank, (token, top) in likely if token != own)]
            body.append(
                {
                    str(token): PromptLogprob(
                        logprob=finite(logprob), rank=rank, decoded_token=token_name(token, tokenizer)
                    )
                    for token, logprob, rank in found
                }
            )
    return body
