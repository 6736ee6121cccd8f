"""TLS and mTLS from files: who gets in, who does not, and what happens when the files are replaced."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, replace
from small_service import run_server

from outrider.cli.main import main
from outrider.config.service import ServiceOptions, TlsFiles, door_tls, peer_tls
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.rpc.channel import open_channel
from outrider.rpc.tls import TlsSource
from outrider.v1 import verify_pb2, verify_pb2_grpc

Load = verify_pb2.VerifyServiceGetLoadRequest
ANY = "127.0.0.1:0"


async def ask(address: str, tls: TlsSource | None) -> int:
    async with open_channel(address, tls=tls) as channel:
        return (await verify_pb2_grpc.VerifyServiceStub(channel).GetLoad(Load())).num_running


async def refused(address: str, tls: TlsSource | None) -> bool:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, tls)
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_only_who_trusts_the_server_and_speaks_tls_gets_in(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    files = changed(ours.files("server"), ca="")
    trusting, strange = TlsFiles(ca=ours.files("x").ca), TlsFiles(ca=theirs.files("x").ca)
    async with run_server(ANY, tls=TlsSource(files)) as running:
        assert await ask(running.address, TlsSource(trusting)) == 7
        assert await refused(running.address, TlsSource(strange))
        assert await refused(running.address, None)
        assert await refused(running.address, TlsSource(changed(trusting, name="elsewhere.example")))


async def test_words_above_certificates_may_be_in_any_script(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    files = ours.files("server")
    replace(files.ca, "# Autorità di prova\n".encode() + Path(files.ca).read_bytes())
    async with run_server(ANY, tls=TlsSource(files)) as running:
        assert await ask(running.address, TlsSource(changed(ours.files("client"), ca=files.ca))) == 7


async def test_with_a_ca_each_client_needs_a_certificate_that_it_signed(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    async with run_server(ANY, tls=TlsSource(ours.files("server"))) as running:
        assert await ask(running.address, TlsSource(ours.files("client"))) == 7
        assert await refused(running.address, TlsSource(TlsFiles(ca=ours.files("none").ca)))
        assert await refused(running.address, TlsSource(theirs.files("forged", trust=ours)))


async def test_a_unix_socket_and_a_name_of_ones_own_work_with_tls(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    async with run_server(f"unix:{tmp_path}/s", tls=TlsSource(ours.files("server"))) as running:
        assert await ask(running.address, TlsSource(ours.files("client"))) == 7
        assert await ask(running.address, TlsSource(changed(ours.files("client"), name="127.0.0.1"))) == 7


@pytest.mark.parametrize(("days", "num_warnings"), [(-3, 1), (3, 0)])
def test_a_certificate_that_has_expired_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: float, num_warnings: int
) -> None:
    source = TlsSource(Authority(tmp_path / "ours").files("server", days=days))
    assert source.current()[0] == 1
    assert caplog.text.count("certificate has expired") == num_warnings


async def test_replaced_server_files_serve_the_next_connection_and_streams_go_on(tmp_path: Path) -> None:
    ours, new = Authority(tmp_path / "ours"), Authority(tmp_path / "new")
    files, trusting = ours.files("server"), TlsSource(ours.files("client"))
    async with run_server(ANY, tls=TlsSource(files)) as running, open_channel(running.address, tls=trusting) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Generate(verify_pb2.VerifyServiceGenerateRequest())
        assert (await call.read()).token_ids == [1]
        # Both sides change hands: the certificate, and whose clients are let in.
        for end, data in zip((".key", ".pem", ".ca"), read(new.files("server")), strict=True):
            replace(str(tmp_path / "ours" / f"server{end}"), data)
        assert await ask(running.address, TlsSource(new.files("client"))) == 7
        assert await refused(running.address, trusting)
        running.verify.release.set()
        assert (await call.read()).token_ids == [2]


async def test_a_channel_takes_up_replaced_files_and_lets_its_streams_finish(tmp_path: Path) -> None:
    ours, new = Authority(tmp_path / "ours"), Authority(tmp_path / "new")
    server, client = ours.files("server"), ours.files("client")
    async with (
        run_server(ANY, tls=TlsSource(server)) as running,
        open_channel(running.address, tls=TlsSource(client)) as channel,
    ):
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        call = stub.Generate(verify_pb2.VerifyServiceGenerateRequest())
        assert (await call.read()).token_ids == [1]
        for files, name in ((server, "server"), (client, "client")):
            for path, data in zip((files.key, files.cert, files.ca), read(new.files(name)), strict=True):
                replace(path, data)
        assert (await stub.GetLoad(Load())).num_running == 7, "the same channel and stub, with the new files"
        (former,) = channel._closing  # type: ignore[attr-defined]
        assert not former.done(), "the stream is on a connection of its own now"
        running.verify.release.set()
        assert (await call.read()).token_ids == [2]
        assert await call.read() is grpc.aio.EOF
        assert (await stub.GetLoad(Load())).num_running == 7
        await former


async def test_files_that_became_useless_change_nothing_and_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Authority(tmp_path / "ours")
    files, trusting = ours.files("server"), TlsSource(ours.files("client"))
    source = TlsSource(files)
    async with run_server(ANY, tls=source) as running:
        version, _ = source.current()
        with caplog.at_level(logging.INFO, "outrider.rpc.tls"):
            replace(files.cert, b"no certificate")
            assert [await ask(running.address, trusting) for _ in range(3)] == [7, 7, 7]
            assert caplog.text.count("cannot be used") == 1 and "--tls-cert and --tls-key" in caplog.text
            Path(files.cert).unlink()
            assert [await ask(running.address, trusting) for _ in range(3)] == [7, 7, 7]
            assert caplog.text.count("cannot be used") == 2 and "cannot be read: No such file" in caplog.text
            assert source.current()[0] == version
            ours.files("server")
            assert await ask(running.address, trusting) == 7
            assert source.current()[0] == version + 1


def test_each_file_that_is_of_no_use_is_named_with_its_option(tmp_path: Path) -> None:
    good = Authority(tmp_path / "ours").files("good")
    other = Authority(tmp_path / "other").files("other")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "large").write_bytes(bytes(2_000_000))
    for files, words in (
        (changed(good, cert=str(tmp_path / "none")), "--tls-cert: .*none cannot be read: No such file"),
        (changed(good, key=other.key), "--tls-cert and --tls-key: .* are not a certificate"),
        (changed(good, ca=str(tmp_path / "text")), "--tls-ca: .*text holds no certificates"),
        (changed(good, cert=str(tmp_path / "large")), "--tls-cert: .*large is larger than"),
        (changed(good, cert="~nobody-here/c.pem"), "--tls-cert: ~nobody-here/c.pem cannot be read: No such file"),
        (changed(good, key=str(tmp_path)), "--tls-key: .* cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            TlsSource(files)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["top", "--once", "--connect-tls-ca"], "--connect-tls-ca"),
        (["top", "--once", "--tls-ca"], "--connect-tls-ca"),
        (["health", "127.0.0.1:1", "--tls-ca"], "--connect-tls-ca"),
        (["bench", "--backend=openai", "--connect-tls-ca"], "--connect-tls-ca"),
    ],
)
def test_tools_name_a_file_that_is_of_no_use(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    assert main([*words, "none"]) == 2
    assert f"{message}: none cannot be read: No such file or directory" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "empty")]) == 2
    assert f"{message}: {tmp_path}/empty holds no certificates as PEM" in capsys.readouterr().err


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    files = Authority(tmp_path / "ours").files("server")
    key: Any = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    replace(files.key, key.private_bytes(*form, locked))
    with pytest.raises(ConfigError, match="unencrypted"):
        TlsSource(files)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize("kind", ["rsa:2048", "ec:P-256", "ec:P-384", "ec:P-521", "ec:secp256k1", "ed25519", "ed448"])
async def test_a_key_that_opens_no_door_of_grpc_is_refused_by_its_kind(kind: str, tmp_path: Path) -> None:
    files = Authority(tmp_path / "ours").files("server")
    source = TlsSource(files)
    name, _, curve = kind.partition(":")
    made = ["-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{curve}"] if name == "ec" else ["-newkey", kind]
    own = ["-subj", "/CN=server", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-nodes", *made, *own, "-keyout", files.key, "-out", files.cert]
    subprocess.run(command, check=True, capture_output=True)
    replace(files.ca, Path(files.cert).read_bytes())
    if kind in ("rsa:2048", "ec:P-256", "ec:P-384"):
        async with run_server(ANY, tls=TlsSource(files)) as running:
            assert await ask(running.address, TlsSource(files)) == 7
        return
    with pytest.raises(ConfigError, match=r"--tls-key: .* RSA, P-256 or P-384"):
        TlsSource(files)
    assert source.current()[0] == 1, "while it runs the former files stay in use"


def test_a_key_that_others_may_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Authority(tmp_path / "ours").files("server")
    with caplog.at_level(logging.WARNING):
        TlsSource(files)
        assert caplog.text == ""
        Path(files.key).chmod(0o644)
        TlsSource(files)
    assert "--tls-key" in caplog.text and "chmod 600" in caplog.text
    assert "PRIVATE" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_the_commands_of_the_handbook_make_files_that_work(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (commands,) = (block for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) if "openssl req" in block)
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)

    def files(name: str) -> TlsFiles:
        return TlsFiles(*(str(tmp_path / part) for part in (f"{name}.pem", f"{name}.key", "ca.pem")))

    async with run_server(ANY, tls=TlsSource(files("verify"))) as running:
        assert await ask(running.address, TlsSource(files("gateway"))) == 7
    assert (tmp_path / "gateway.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ServiceOptions(tls_cert="a"), "--tls-cert: --tls-key is not set"),
        (ServiceOptions(tls_key="a"), "--tls-key: --tls-cert is not set"),
        (ServiceOptions(tls_ca="a"), "--tls-ca: clients can show a certificate over TLS only"),
        (VerifyOptions(draft_tls_cert="a", draft_tls_key="b"), "--draft-tls-cert: --draft-tls-ca is not set"),
        (VerifyOptions(draft_tls_name="a"), "--draft-tls-name: --draft-tls-ca is not set"),
        (VerifyOptions(draft_tls_ca="a", draft_tls_key="b"), "--draft-tls-key: --draft-tls-cert is not set"),
    ],
)
def test_files_that_do_not_go_together_are_refused(options: ServiceOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        door_tls(options)
        peer_tls(options, "draft")


def read(files: TlsFiles) -> list[bytes]:
    return [Path(path).read_bytes() for path in (files.key, files.cert, files.ca)]
