"""Sampling parameters of a request."""

from __future__ import annotations

import msgspec

from outrider.grammar.spec import Grammar

MAX_LOGPROBS = 20
"""Most log-probabilities of each token; `kernels` has room for as many."""
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
"""Most entries of a request's logit bias."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling fields of one request, already validated; torch-free.

    Processors run in the order of docs/sampling.md: repetition, frequency and presence penalty, logit bias, grammar
    mask, the mask of tokens that end an answer (`AnswerEnd`), temperature, top-k, top-p, min-p. A field at its default
    costs nothing.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy, without noise."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    seed: int = 0
    """64-bit key of the noise, unsigned. A request without a seed gets a fresh one when it is admitted."""
    choice_index: int = 0
    """Index of this answer among several to one request; part of the noise key."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output or the node's path."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each occurrence in the output or the node's path."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt, the output or the node's path."""
    logit_bias: dict[int, float] = {}
    """Token id to a number added to its logit."""
    num_logprobs: int | None = None
    """None: no log-probabilities; k: those of the committed token and of the k most likely."""
    grammar: Grammar | None = None
    """Grammar of the answer; forbidden tokens are masked. None allows any."""

    @property
    def greedy(self) -> bool:
        """Whether the noise is off."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the processed logits depend on the history."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class AnswerEnd(msgspec.Struct, frozen=True, array_like=True):
    """When an answer may end: the ending `token_ids` are masked until the answer has `min_tokens` other tokens."""

    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


ANY_END = AnswerEnd()
"""An answer may end at once."""
