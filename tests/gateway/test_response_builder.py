"""Bodies that take long to build are built beside the event loop."""

from __future__ import annotations

import pytest
from scripted_verify import MODEL, ScriptedVerify

from gateway.core.admission import admit
from gateway.core.answer import Delta, Token
from gateway.core.catalogue import GatewayModel
from gateway.core.request import ClientRequest
from gateway.core.tool_parser import TextDelta
from gateway.openai.chat import ChatBuilder, ChatCompletionRequest, ChatMessage
from outrider.protocol.generation import GenerationUpdate, RoundTree, TokenLogprobs, TokenOrigin


@pytest.mark.parametrize("what", ["logprobs", "trees"])
async def test_a_long_answer_with_much_to_tell_is_large(verify: ScriptedVerify, what: str) -> None:
    model = GatewayModel(MODEL, 256, verify.vocab_size, verify.tokenizer, created=0, fingerprint="")
    job = await admit(ClientRequest(prompt="x", trace=True), model, "r")
    builder = ChatBuilder(model, [job], ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")]))
    logprobs = TokenLogprobs(-1.0, tuple((i, -1.0) for i in range(20))) if what == "logprobs" else None
    tree = RoundTree(
        position=1,
        num_tokens=1,
        parents=(-1,) * 20,
        token_ids=(5,) * 20,
        drafters=(0,) * 20,
        scores=(-1.0,) * 20,
        accepted=(),
        drafter_names=("ngram",),
    )
    chunk = GenerationUpdate(round_trees=(tree,) if what == "trees" else ())
    delta = Delta(0, (TextDelta("x", 0, 1),), (Token(5, TokenOrigin.PLAIN, "x", logprobs),), chunk)
    builder.collect(delta)
    assert not builder.is_large()
    for _ in range(200):
        builder.collect(delta)
    assert builder.is_large()
