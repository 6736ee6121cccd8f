"""Between messages of common.proto and what is known of tokens: prompt log-probabilities and trees of rounds."""

from __future__ import annotations

import numpy as np

from outrider.protocol.tokens import PromptLogprobs, RoundTree
from outrider.v1 import common_pb2


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
    return common_pb2.RoundTree(
        position=tree.position,
        num_tokens=tree.num_tokens,
        parents=tree.parents,
        token_ids=tree.token_ids,
        drafters=tree.drafters,
        scores=tree.scores,
        accepted=tree.accepted,
        drafter_names=tree.drafter_names,
    )


def decode_tree(message: common_pb2.RoundTree) -> RoundTree:
    """From a message."""
    return RoundTree(
        position=message.position,
        num_tokens=message.num_tokens,
        parents=tuple(message.parents),
        token_ids=tuple(message.token_ids),
        drafters=tuple(message.drafters),
        scores=tuple(message.scores),
        accepted=tuple(message.accepted),
        drafter_names=tuple(message.drafter_names),
    )
