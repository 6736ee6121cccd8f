"""A struct and a message of equal field names need no line of code between them."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import InvalidRequestError
from outrider.protocol.codec import StructCodec
from outrider.protocol.generation import (
    FinishReason,
    GenerationUpdate,
    RoundCounts,
    RoundTree,
    TokenOrigin,
    Usage,
    join_updates,
)
from outrider.protocol.generation_codec import REQUEST, UPDATE, USAGE
from outrider.protocol.speculation import Commit
from outrider.protocol.speculation_codec import decode_verify, encode_verify
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, draft_pb2, verify_pb2


class Unknown(msgspec.Struct):
    prompt_tokens: int = 0
    no_such_field: int = 0


def test_a_field_that_the_message_lacks_is_found_at_import() -> None:
    with pytest.raises(TypeError, match=r"outrider\.v1\.Usage lacks no_such_field"):
        StructCodec(Unknown, common_pb2.Usage)
    assert StructCodec(Unknown, common_pb2.Usage, local=("no_such_field",)).decode(common_pb2.Usage()) == Unknown()


def test_what_is_unset_takes_the_default_of_the_struct() -> None:
    message = verify_pb2.VerifyServiceGenerateRequest(prompt_token_ids=[1, 2], max_tokens=3, choice_index=4)
    request = REQUEST.decode(message)
    assert request.sampling == SamplingParams(choice_index=4) and request.num_prompt_logprobs is None
    message.num_prompt_logprobs = 0
    message.sampling.temperature = 0.0
    assert REQUEST.decode(message).num_prompt_logprobs == 0 and REQUEST.decode(message).sampling.greedy


def test_half_a_number_is_refused_by_name() -> None:
    event = draft_pb2.VerifyEvent(commit=draft_pb2.Commit(request=1, token_ids=b"abcde"))
    with pytest.raises(InvalidRequestError, match=r"commit\.token_ids: 5 bytes are no whole number of 4-byte values"):
        decode_verify(draft_pb2.DraftServiceSpeculateRequest(events=[event]))


@pytest.mark.parametrize("root", [None, 0, 7])
def test_an_optional_number_is_told_from_zero(root: int | None) -> None:
    commit = Commit(1, 2, [3, -4], 5, 6, root, 8)
    assert decode_verify(encode_verify([commit])) == [commit]


def test_updates_that_gathered_are_one_message_and_words_of_a_newer_protocol_are_known_ones() -> None:
    tree = RoundTree(3, 1, [-1], [5], [0], [-0.5], [0], ["ngram"])
    first = GenerationUpdate([5], [TokenOrigin.ACCEPTED], [], [RoundCounts(4, 1)], None, 2, [], [tree])
    last = GenerationUpdate([6], [TokenOrigin.PLAIN], [], [RoundCounts(0, 0)], FinishReason.LENGTH)
    message = UPDATE.encode(join_updates([first, last]))
    joined = UPDATE.decode(message)
    assert joined.token_ids == [5, 6] and joined.last and joined.cached_prompt_tokens == 2
    assert (joined.num_draft_tokens, joined.num_accepted_tokens) == (4, 1) and joined.round_trees == [tree]
    message.finish_reason = 99  # type: ignore[assignment]
    message.origins[:] = [99, 99]  # type: ignore[list-item]
    newer = UPDATE.decode(message)
    assert newer.finish_reason is FinishReason.STOP and set(newer.origins) == {TokenOrigin.UNSPECIFIED}


def test_usages_add_up() -> None:
    total = Usage.total([Usage(1, 2, 3, 4, 5, 6), Usage(1, 1, 1, 1, 1, 1)])
    assert total == Usage(2, 3, 4, 5, 6, 7) == USAGE.decode(USAGE.encode(total)) and Usage.total([]) == Usage()
