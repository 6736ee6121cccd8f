"""Tokens follow their files while services run, at the door and at its callers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.config.service import PeerServiceOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.logs import redact
from outrider.rpc.channel import open_channel
from outrider.rpc.credentials import door_tokens, peer_tokens
from outrider.v1 import verify_pb2, verify_pb2_grpc

Load = verify_pb2.VerifyServiceGetLoadRequest


async def answers(running: Any, token: str) -> bool:
    call = running.stub.GetLoad(Load(), metadata=(("authorization", f"Bearer {token}"),))
    return await call.code() is grpc.StatusCode.OK


async def test_a_door_opens_to_the_tokens_that_its_file_lists_now(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text("former-token\n")
    running = await start(auth_tokens=door_tokens(PeerServiceOptions(auth_token_file=str(file))))
    assert [await answers(running, token) for token in ("former-token", "next-token")] == [True, False]
    file.write_text("former-token\nnext-token\n")
    assert [await answers(running, token) for token in ("former-token", "next-token")] == [True, True]
    file.write_text("next-token\n")
    assert [await answers(running, token) for token in ("former-token", "next-token")] == [False, True]
    assert redact("former-token next-token") == "*** ***"
    for spoil in (lambda: file.write_text("\n"), lambda: file.write_text("two words\n"), file.unlink):
        spoil()
        # The door neither opens to all nor closes to those who had a token.
        assert [await answers(running, token) for token in ("", "former-token", "next-token")] == [False, False, True]
    refused = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert len(refused) == 3 and all(text.count("--auth-token-file") == 1 for text in refused)
    file.write_text("last-token\n")
    assert [await answers(running, token) for token in ("next-token", "last-token")] == [False, True]


async def test_a_caller_sends_the_token_that_its_file_holds_now(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-token\n")
    door = door_tokens(PeerServiceOptions(auth_token_file=str(file)))
    running = await start(auth_tokens=door)
    sent = peer_tokens(VerifyOptions(draft_auth_token_file=str(file)), "draft")
    async with open_channel(running.address, auth_token=sent) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        assert (await stub.GetLoad(Load())).num_running == 7
        file.write_text("second-token\n")
        assert (await stub.GetLoad(Load())).num_running == 7 and set(door.current()) == {b"second-token"}


def test_without_a_file_the_token_is_that_of_the_option() -> None:
    assert peer_tokens(VerifyOptions(draft_auth_token="of-the-option"), "draft")() == "of-the-option"
    assert peer_tokens(VerifyOptions(), "draft")() == ""
    assert set(door_tokens(PeerServiceOptions(auth_token="of-the-option")).current()) == {b"of-the-option"}
    assert not door_tokens(PeerServiceOptions())


def test_a_service_does_not_start_with_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--auth-token-file: .* cannot be read"):
        door_tokens(PeerServiceOptions(auth_token_file=str(tmp_path / "none")))


def test_a_file_is_read_again_though_its_size_and_modification_time_stay(tmp_path: Path) -> None:
    """As after cp -p and rsync --inplace; likewise a file that only chown or chmod has made readable."""
    file = tmp_path / "tokens"
    file.write_text("former-token\n")
    door = door_tokens(PeerServiceOptions(auth_token_file=str(file)))
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock has a tick of milliseconds
        file.write_text("latest-token\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert set(door.current()) == {b"latest-token"}
