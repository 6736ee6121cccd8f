"""Conversion between the messages of gateways and verify services and protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from outrider.errors import InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.protocol.codec import StructCodec
from outrider.protocol.generation import (
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptLogprobs,
    RoundCounts,
    RoundTree,
    TokenLogprobs,
    TokenOrigin,
    Usage,
    VerifyInfo,
    VerifyLoad,
)
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, draft_pb2, verify_pb2

MAX_CHOICES_ON_WIRE = 4096
"""Most choices of a grammar in a message. A few megabytes can hold a million empty texts, so they are counted first."""

Sampled = verify_pb2.VerifyServiceGenerateRequest | draft_pb2.Open
"""Messages with sampling fields, a grammar and a choice index."""


def encode_grammar(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """Return a grammar as a message; None stays None, which leaves the field unset."""
    if grammar is None:
        return None
    value: Any = grammar.source
    if grammar.kind is GrammarKind.JSON_OBJECT:
        value = True
    elif grammar.kind is GrammarKind.CHOICE:
        value = common_pb2.Grammar.Choices(texts=grammar.choices)
    # The kinds' values are the names of the message's fields.
    return common_pb2.Grammar(**{grammar.kind.value: value})


def decode_grammar(message: common_pb2.Grammar) -> Grammar:
    """Return a message's grammar. Raises InvalidRequestError if it is empty or has too many choices."""
    match kind := message.WhichOneof("kind"):
        case "json_object" if message.json_object:
            return Grammar(GrammarKind.JSON_OBJECT)
        case "json_schema" | "regex" | "ebnf":
            return Grammar(GrammarKind(kind), getattr(message, kind))
        case "choice":
            count = len(message.choice.texts)
            if count > MAX_CHOICES_ON_WIRE:
                raise InvalidRequestError("grammar.choice", f"holds {count} choices", "send fewer")
            return Grammar.of_choices(list(message.choice.texts))
    raise InvalidRequestError("grammar", "says nothing", "set json_object, json_schema, regex, choice or ebnf")


def decode_sampling(message: Sampled) -> SamplingParams:
    """Return a message's sampling parameters, with defaults for unset ones. Raises InvalidRequestError for a bad
    grammar."""
    grammar = decode_grammar(message.grammar) if message.HasField("grammar") else None
    return replace(SAMPLING.decode(message.sampling), choice_index=message.choice_index, grammar=grammar)


def encode_logprobs(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Return one token's log-probabilities as a message."""
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return common_pb2.TokenLogprobs(logprob=entry.logprob, top=top)


def _decode_logprobs(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def encode_prompt_logprobs(part: PromptLogprobs) -> common_pb2.PromptLogprobs:
    """Return log-probabilities of prompt tokens as a message."""
    return common_pb2.PromptLogprobs(
        start=part.start,
        logprobs=part.logprobs.tolist(),
        ranks=part.ranks.tolist(),
        num_top=part.top_ids.shape[1],
        top_token_ids=part.top_ids.reshape(-1).tolist(),
        top_logprobs=part.top_logprobs.reshape(-1).tolist(),
    )


def decode_prompt_logprobs(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    """Return a message's log-probabilities of prompt tokens. Raises ValueError if its lengths disagree."""
    shape = (len(message.logprobs), message.num_top)
    if len(message.ranks) != shape[0]:
        raise ValueError(f"{len(message.ranks)} ranks of {shape[0]} tokens")
    return PromptLogprobs(
        start=message.start,
        logprobs=np.array(message.logprobs, np.float32),
        ranks=np.array(message.ranks, np.uint32),
        top_ids=np.array(message.top_token_ids, np.int32).reshape(shape),
        top_logprobs=np.array(message.top_logprobs, np.float32).reshape(shape),
    )


ORIGINS = {int(origin): origin for origin in TokenOrigin}
_REASONS = {int(reason): reason for reason in FinishReason}


def _decode_reason(message: verify_pb2.VerifyServiceGenerateResponse) -> FinishReason | None:
    """Return a message's finish reason, or None if unset; a reason of a newer protocol counts as STOP."""
    if message.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _REASONS.get(message.finish_reason, FinishReason.STOP)


SAMPLING = StructCodec(SamplingParams, common_pb2.SamplingParams, local=("choice_index", "grammar"))
USAGE = StructCodec(Usage, common_pb2.Usage)
TREE = StructCodec(RoundTree, common_pb2.RoundTree)
INFO = StructCodec(VerifyInfo, verify_pb2.VerifyServiceGetInfoResponse)
LOAD = StructCodec(VerifyLoad, verify_pb2.VerifyServiceGetLoadResponse)
REQUEST = StructCodec(
    GenerationRequest,
    verify_pb2.VerifyServiceGenerateRequest,
    encoders={
        "sampling": lambda request: SAMPLING.encode(request.sampling),
        "choice_index": lambda request: request.sampling.choice_index,
        "grammar": lambda request: encode_grammar(request.sampling.grammar),
        "bad_words": lambda request: [verify_pb2.TokenSequence(ids=ids) for ids in request.bad_words],
    },
    decoders={
        "sampling": decode_sampling,
        "bad_words": lambda message: [list(sequence.ids) for sequence in message.bad_words],
    },
    local=("client",),
)
UPDATE = StructCodec(
    GenerationUpdate,
    verify_pb2.VerifyServiceGenerateResponse,
    nested={"rounds": StructCodec(RoundCounts, common_pb2.RoundReport), "round_trees": TREE},
    encoders={
        "logprobs": lambda update: [encode_logprobs(entry) for entry in update.logprobs],
        "prompt_logprobs": lambda update: [encode_prompt_logprobs(part) for part in update.prompt_logprobs],
        "finish_reason": lambda update: update.finish_reason or 0,
    },
    decoders={
        "origins": lambda message: [ORIGINS.get(origin, TokenOrigin.UNSPECIFIED) for origin in message.origins],
        "logprobs": lambda message: [_decode_logprobs(entry) for entry in message.logprobs],
        "prompt_logprobs": lambda message: [decode_prompt_logprobs(part) for part in message.prompt_logprobs],
        "finish_reason": _decode_reason,
    },
    local=("error",),
)
