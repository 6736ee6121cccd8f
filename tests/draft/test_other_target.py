"""A draft service with n-grams serves any target, whatever model is beside them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from draft_door import HELLO, Door, Stream
from draft_fakes import SignallingDrafter, open_message
from msgspec.structs import replace

from draft_service.engine.worker import describe
from draft_service.main import start_engine
from outrider.config.draft import DraftOptions
from outrider.drafting.base import CombinedDrafter, Needs
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import drafters_of_service
from outrider.protocol.speculation import Close, Grow, Hello
from outrider.rpc.status import error_from_rpc

Serve = Callable[..., Awaitable[Door]]

NAMES = ("EAGLE3", "NGRAM")
OURS = replace(HELLO, model="ours", hidden_size=64, num_layers=6)
OTHER = replace(HELLO, model="other", hidden_size=32, num_layers=3)
TEXT = [*range(20, 50), 20, 21, 22]


class Head(SignallingDrafter):
    """Stands for a head that was trained for one target."""

    needs = Needs(hidden_size=64, feature_layers=(2, 5))


def drafters() -> tuple[CombinedDrafter, Head]:
    head = Head()
    return CombinedDrafter([head, NgramDrafter(DraftOptions())]), head


async def grown(stream: Stream) -> Grow:
    """The first nodes that come."""
    while True:
        message = await stream.receive()
        if isinstance(message, Grow) and len(message.token_ids):
            return message


async def test_another_target_is_drafted_for_by_n_grams_alone_and_the_log_names_both(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    several, head = drafters()
    door = await serve(several, speculative_algorithm=NAMES)
    stream = door.stream()
    with caplog.at_level(logging.WARNING, "draft_service"):
        await stream.send(OTHER)
        hello = await stream.receive()
    assert isinstance(hello, Hello)
    assert (hello.model, hello.feature_layers, hello.hidden_size, hello.features_token) == ("NGRAM", (), 0, "")
    assert hello.sources == several.sources, "nodes name their sources by number among all"
    (line,) = (record.getMessage() for record in caplog.records if "only NGRAM drafts" in record.getMessage())
    assert all(word in line for word in ("only NGRAM", "other", "EAGLE3+NGRAM", "32", "64"))
    await stream.send(open_message(TEXT, credit=16))
    tokens: list[int] = []
    while len(tokens) <= 8:  # no room is left for a head that is not there
        grow = await grown(stream)
        assert set(grow.sources) == {1}
        tokens += grow.token_ids
    assert tokens[:3] == [23, 24, 25]
    assert not head.open_requests
    await stream.send(Close(1))


async def test_its_own_target_gets_all_drafters_when_the_other_one_is_gone(serve: Serve) -> None:
    several, head = drafters()
    door = await serve(several, speculative_algorithm=NAMES)
    other = door.stream()
    await other.send(OTHER)
    await other.receive()
    other.call.cancel()
    while (await door.info()).num_sessions:
        pass
    stream = door.stream()
    await stream.send(OURS)
    hello = await stream.receive()
    assert isinstance(hello, Hello) and (hello.model, hello.feature_layers) == ("EAGLE3+NGRAM", (2, 5))
    await stream.send(open_message(TEXT))
    assert {0, 1} & set((await grown(stream)).sources)
    assert head.open_requests


@pytest.mark.parametrize("hello", [OTHER, replace(OURS, protocol_version=77)])
async def test_a_head_alone_refuses_what_does_not_fit(serve: Serve, hello: Hello) -> None:
    """And so do all drafters another release."""
    several, head = drafters()
    stream = (await serve(head if hello is OTHER else several, speculative_algorithm=NAMES)).stream()
    await stream.send(hello)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.receive()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert ("77" if hello is not OTHER else "32") in error_from_rpc(caught.value).message


async def test_n_grams_draft_alone_where_the_model_beside_them_cannot_be_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for names, works in ((NAMES, True), (("EAGLE3",), False)):
        options = DraftOptions(speculative_algorithm=names, speculative_draft_model_path=str(tmp_path / "none"))
        process, *_ = await start_engine(options)
        try:
            if not works:
                with pytest.raises(ConfigError, match="none"):
                    await process.ready(asyncio.Event())
                continue
            profile = await process.ready(asyncio.Event())
            assert profile is not None and profile.hello.model == "NGRAM"
            assert (profile.hello.sources, profile.any_target_drafters) == (("ngram", "ngram_shared"), frozenset())
            await process.stop()
        finally:
            await process.close()
    stderr = capfd.readouterr().err
    assert f"only n-grams draft, {tmp_path}/none is not used: " in stderr


def test_only_drafters_of_which_some_take_no_features_can_do_without() -> None:
    several, head = drafters()
    named = DraftOptions(speculative_algorithm=NAMES)
    assert describe(several, named).hello.features_optional
    assert not describe(head, named).hello.features_optional
    assert not describe(several, dataclasses.replace(named, lockstep=True)).hello.features_optional


def test_a_draft_model_of_which_nobody_said_what_it_is_ends_no_service(caplog: pytest.LogCaptureFixture) -> None:
    """A container would be started again with the same options, for ever."""
    with caplog.at_level(logging.ERROR, "outrider"):
        chosen = drafters_of_service(DraftOptions(speculative_draft_model_path="/models/head"))
    assert (chosen.speculative_algorithm, chosen.speculative_draft_model_path) == (("NGRAM",), "")
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ("/models/head", "--speculative-algorithm", "only n-grams"))
