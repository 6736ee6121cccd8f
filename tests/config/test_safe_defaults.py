"""Out of the box nothing can be reached from elsewhere, and nothing tells more than it must."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from outrider.cli.cluster import OPTION_TYPES, service_flags
from outrider.config.base import options_to_argv, options_to_env
from outrider.config.service import PeerServiceOptions, peer_token, read_api_keys, read_secret
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.rpc.transport import is_local

KINDS = list(OPTION_TYPES.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_door_is_on_loopback_until_told_otherwise(kind: type) -> None:
    for field in fields(kind):
        if field.name.endswith("address") and field.default:
            assert is_local(field.default), field.name
    assert not is_local("0.0.0.0:1") and not is_local("[::]:1") and not is_local("gateway:1")


@pytest.mark.parametrize("kind", KINDS)
def test_reflection_is_off_and_secrets_are_neither_shown_nor_on_a_command_line(kind: type) -> None:
    assert kind().reflection is False
    secrets = [field.name for field in fields(kind) if field.metadata["secret"]]
    assert secrets, "each service has a token"
    options = replace(kind(), **dict.fromkeys(secrets, "pa55w0rd"))
    assert "pa55w0rd" not in repr(options) and "pa55w0rd" not in " ".join(options_to_argv(options))
    assert list(options_to_env(options).values()) == ["pa55w0rd"] * len(secrets)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_called_a_token_or_key_is_a_secret(kind: type) -> None:
    for field in fields(kind):
        if field.name.endswith(("token", "api_key", "password")):
            assert field.metadata["secret"], field.name


def test_no_two_options_of_outrider_up_have_one_name() -> None:
    named: dict[str, set[str]] = {}
    for flag in service_flags():
        named.setdefault(flag.flag, set()).add(flag.option.name)
    assert [flag for flag, meant in named.items() if len(meant) > 1] == []


def test_a_token_to_send_is_one_line(tmp_path: object) -> None:
    path = f"{tmp_path}/t"
    with open(path, "w") as file:
        file.write("one\ntwo\n")
    with pytest.raises(ConfigError, match=r"--x-file: .* has 2 lines"):
        read_secret("", path, "--x")
    with pytest.raises(ConfigError, match="--x is set too"):
        read_secret("value", path, "--x")
    assert read_secret("", "", "--x") == ""
    with pytest.raises(ConfigError, match="--x-file: ~nobody-here/x cannot be read: No such file"):
        read_secret("", "~nobody-here/x", "--x")


def test_a_token_that_no_header_can_carry_is_told_by_its_file_and_a_mark_of_utf_8_is_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes("pa55wörd\n".encode())
    for flag, read in (
        ("--api-key-file", lambda: read_api_keys("", path)),
        ("--auth-token-file", PeerServiceOptions(auth_token_file=str(path)).read_auth_tokens),
        ("--draft-auth-token-file", lambda: peer_token(VerifyOptions(draft_auth_token_file=str(path)), "draft")),
    ):
        with pytest.raises(ConfigError) as caught:
            read()
        assert caught.value.message.startswith(f"{flag}: {path} holds a space or a character beyond ASCII")
        assert "pa55" not in caught.value.message
    path.write_bytes("one\r\ntwo team\r\n".encode("utf-8-sig"))
    assert read_api_keys("", path) == {"one": "", "two": "team"}
