"""Between what gateways and verify services say of requests, and protobuf."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from outrider.errors import InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.protocol.codec import StructCodec
from outrider.protocol.generation import PromptLogprobs, RoundTree
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2

MAX_CHOICES_ON_WIRE = 4096
"""A message of some megabytes holds a million empty texts; they are counted before an object is made of each."""

_SAMPLING = StructCodec(SamplingParams, common_pb2.SamplingParams, local=("choice_index", "grammar"))
_TREE = StructCodec(RoundTree, common_pb2.RoundTree)


def encode_sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Sampling fields as a message; every field is set, so that defaults of other versions do not matter."""
    return _SAMPLING.encode(params)


def decode_sampling(message: common_pb2.SamplingParams, *, choice_index: int) -> SamplingParams:
    """Sampling fields of a message; unset ones take their defaults."""
    return replace(_SAMPLING.decode(message), choice_index=choice_index)


def encode_grammar(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """A grammar as a message; None stays None, which leaves the field unset."""
    match grammar:
        case None:
            return None
        case Grammar(kind=GrammarKind.JSON_OBJECT):
            return common_pb2.Grammar(json_object=True)
        case Grammar(kind=GrammarKind.JSON_SCHEMA):
            return common_pb2.Grammar(json_schema=grammar.source)
        case Grammar(kind=GrammarKind.REGEX):
            return common_pb2.Grammar(regex=grammar.source)
        case _:
            return common_pb2.Grammar(choice=common_pb2.Grammar.Choices(texts=grammar.choices))


def decode_grammar(message: common_pb2.Grammar) -> Grammar:
    """The grammar of a message that was sent. Raises InvalidRequestError if it says nothing, or far too much."""
    match message.WhichOneof("kind"):
        case "json_object" if message.json_object:
            return Grammar(GrammarKind.JSON_OBJECT)
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "regex":
            return Grammar(GrammarKind.REGEX, message.regex)
        case "choice":
            count = len(message.choice.texts)
            if count > MAX_CHOICES_ON_WIRE:
                raise InvalidRequestError("grammar.choice", f"holds {count} choices", "send fewer")
            return Grammar.of_choices(list(message.choice.texts))
    raise InvalidRequestError("grammar", "says nothing", "set json_object, json_schema, regex or choice")


def encode_prompt_logprobs(part: PromptLogprobs) -> common_pb2.PromptLogprobs:
    """As a message."""
    return common_pb2.PromptLogprobs(
        start=part.start,
        logprobs=part.logprobs.tolist(),
        ranks=part.ranks.tolist(),
        num_top=part.top_ids.shape[1],
        top_token_ids=part.top_ids.reshape(-1).tolist(),
        top_logprobs=part.top_logprobs.reshape(-1).tolist(),
    )


def decode_prompt_logprobs(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    """From a message. Raises ValueError if its lengths disagree."""
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


def encode_tree(tree: RoundTree) -> common_pb2.RoundTree:
    """As a message."""
    return _TREE.encode(tree)


def decode_tree(message: common_pb2.RoundTree) -> RoundTree:
    """From a message."""
    return _TREE.decode(message)
