"""Doors, links and certificates that cannot work are reported before anything starts."""

from __future__ import annotations

import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from test_options import parse

from outrider.cli.cluster import link, place, with_bound_addresses
from outrider.cli.main import main
from outrider.cli.options import (
    door_checks,
    find_faults,
    parse_service_options,
)
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError


def test_a_key_file_that_cannot_be_read_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["up", "--ephemeral", f"--api-key-file={tmp_path}/none", "--model=nosuch"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"--api-key-file: {tmp_path}/none cannot be read" in lines[-1], lines


def test_what_the_gateway_and_tls_would_refuse_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong, message in (
        (["--cors-origins=foo"], "--cors-origins: 'foo' is no origin"),
        (["--api-key-file=none"], "--api-key-file: none cannot be read"),
        (["--proxies=10.0.0.1/8"], "--proxies: 10.0.0.1/8 has host bits set"),
        (["--gateway-tls-cert=none", "--gateway-tls-key=none"], "--gateway-tls-cert: none cannot be read"),
        (["--verify-tls-key=x"], "--verify-tls-key: --verify-tls-cert is not set"),
        (["--gateway-verify-tls-cert=x"], "--gateway-verify-tls-cert: --gateway-verify-tls-key is not set"),
        (["--api-key=a b"], "--api-key holds a space"),
        (["--branch-length=12"], "--branch-length: 12 leaves no room behind a match of --max-match-window-size 12"),
        (["--tokenizer=none"], "--tokenizer: none has no tokenizer.json"),
        (["--gateway-tls-ca=x"], "--gateway-tls-ca: clients can show a certificate over TLS only; set --gateway-tls"),
    ):
        assert main(["up", "--ephemeral", "--draft-placement=remote", "--device=gpu", *wrong]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 and lines[1].startswith(message), lines


def test_a_door_that_its_own_caller_could_not_open_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong, message in (
        (
            ["--verify-auth-token=x"],
            "--verify-auth-token: the gateway .* set --gateway-verify-auth-token-file",
        ),
        (["--draft-auth-token=x"], "--draft-auth-token: the verify .* set --verify-draft-auth-token-file"),
        (["--verify-tls-cert=x", "--verify-tls-key=x"], "--verify-tls-cert: the gateway .*-verify-tls-ca, too"),
    ):
        assert main(["up", "--ephemeral", "--draft-placement=remote", "--device=gpu", *wrong]) == 2
        assert re.search(message, capsys.readouterr().err), message
    tokens = ["--verify-auth-token=x", "--gateway-verify-auth-token=x"]
    assert main(["up", "--ephemeral", "--draft-placement=remote", "--device=gpu", *tokens]) == 2
    assert "auth-token" not in capsys.readouterr().err


def test_both_ends_of_every_link_show_and_trust_certificates_and_tokens_or_neither(tmp_path: Path) -> None:
    """`up` would wait for them until its time is over."""
    files = issued_by(tmp_path)
    cert, ca = [f"--{{}}-tls-{word}={files[word]}" for word in ("cert", "key")], f"--{{}}-tls-ca={files['ca']}"

    def found(*words: str) -> list[str]:
        return find_faults(parse_service_options(parse(*words), env={}), gpus=0)

    def of(prefix: str, *words: str) -> list[str]:
        return [word.format(prefix) for word in words]

    for caller, peer in (("gateway", "verify"), ("verify", "draft")):
        way = f"{caller}-{peer}"
        assert found(*of(peer, *cert, ca), *of(way, ca, *cert)) == []
        assert found(*of(peer, *cert), *of(way, ca)) == []
        assert found(*of(peer, *cert, ca), *of(way, ca)) == [
            f"--{peer}-tls-ca: the {caller} service shows no certificate; set --{way}-tls-cert and --{way}-tls-key, too"
        ]
        assert found(*of(way, ca)) == [
            f"--{way}-tls-ca: the {peer} service has no certificate; set --{peer}-tls-cert and --{peer}-tls-key, too"
        ]
        assert found(*of(peer, *cert)) == [
            f"--{peer}-tls-cert: the {caller} service has no CA to check it with; set --{way}-tls-ca, too"
        ]
        assert found(f"--{peer}-auth-token=x", f"--{way}-auth-token=x") == []
        assert found(f"--{peer}-auth-token=x", f"--{way}-auth-token=y") == [
            f"--{way}-auth-token: the {peer} service accepts only the tokens of --{peer}-auth-token; "
            "give it one of them"
        ]


def test_certificates_that_the_other_end_of_a_link_would_not_take_are_told(tmp_path: Path) -> None:
    """`up` would wait for them until its time is over."""
    ours, others, elsewhere = (tmp_path / name for name in ("ours", "others", "elsewhere"))
    hosts = {ours: "localhost", others: "localhost", elsewhere: "example.org"}
    made = {folder: issued_by(folder, host) for folder, host in hosts.items()}

    def files(prefix: str, *words: str, of: Path) -> list[str]:
        return [f"--{prefix}-tls-{word}={made[of][word]}" for word in words]

    for caller, peer in (("gateway", "verify"), ("verify", "draft")):
        way = f"{caller}-{peer}"
        refusal = "would not accept the certificate of"
        for door, trust, shown, message in (
            (ours, ours, ours, ""),
            (ours, others, ours, f"--{way}-tls-ca: the {caller} service {refusal} --{peer}-tls-cert: "),
            (ours, ours, others, f"--{peer}-tls-ca: the {peer} service {refusal} --{way}-tls-cert: "),
            (elsewhere, elsewhere, elsewhere, f"--{peer}-tls-name: the {caller} service {refusal} --{peer}-tls-cert: "),
        ):
            words = files(peer, "cert", "key", "ca", of=door)
            words += [*files(way, "ca", of=trust), *files(way, "cert", "key", of=shown)]
            found = find_faults(parse_service_options(parse(*words), env={}), gpus=0)
            assert len(found) == bool(message) and all(message in one for one in found), found
        assert find_faults(parse_service_options(parse(*words, f"--{peer}-tls-name=example.org"), env={}), gpus=0) == []
        words = [*files(peer, "cert", of=ours), *files(peer, "key", of=others), *files(way, "ca", of=ours)]
        (one,) = find_faults(parse_service_options(parse(*words), env={}), gpus=0)
        assert f"--{peer}-tls-cert and --{peer}-tls-key: " in one and "are not a certificate" in one


@pytest.mark.parametrize(
    ("begins", "ends", "reason"),
    [(None, -1, "certificate has expired"), (1, 2, "certificate is not yet valid")],
)
def test_a_certificate_out_of_its_time_is_to_be_renewed(
    tmp_path: Path, begins: int | None, ends: int, reason: str
) -> None:
    days = [None if at is None else datetime.now(UTC) + timedelta(days=at) for at in (begins, ends)]
    made = issued_by(tmp_path / "made", days=(days[0], days[1]))
    words = [
        *(f"--verify-tls-{word}={made[word]}" for word in ("cert", "key")),
        f"--gateway-verify-tls-ca={made['ca']}",
    ]
    (found,) = find_faults(parse_service_options(parse(*words), env={}), gpus=0)
    assert found == (
        "--verify-tls-cert: the gateway service would not accept the certificate of --verify-tls-cert: "
        f"{reason}; renew it, or correct the clock"
    )


def issued_by(
    folder: Path, host: str = "localhost", days: tuple[datetime | None, datetime | None] = (None, None)
) -> dict[str, Path]:
    """PEM files of a certificate, its key, and the certificate that signed it; `days`: its first and last, if given."""
    ca = trustme.CA()
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(host, not_before=days[0], not_after=days[1])
    files = {"cert": issued.cert_chain_pems[0], "key": issued.private_key_pem, "ca": ca.cert_pem}
    for word, blob in files.items():
        (folder / word).write_bytes(blob.bytes())
        (folder / word).chmod(0o600)
    return {word: folder / word for word in files}


def test_a_socket_that_cannot_be_bound_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for name, message in (
        ("none/x", f"the folder {tmp_path}/none does not exist"),
        ("file", f"{tmp_path}/file exists and is not a socket"),
    ):
        assert main(["up", "--ephemeral", f"--model={model_path}", f"--verify-address=unix:{tmp_path}/{name}"]) == 2
        assert f"--verify-address: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_a_command_does_not_start_a_gateway_that_it_could_not_speak_to(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_path: Path
) -> None:
    files = issued_by(tmp_path)
    tls = [f"--gateway-tls-{word}={files[word]}" for word in ("cert", "key")]
    others = issued_by(tmp_path / "others")
    trusted, strange = (f"--connect-tls-ca={issued['ca']}" for issued in (files, others))
    named, foreign = (
        "--connect-tls-name=localhost",
        [f"--connect-tls-{word}={others[word]}" for word in ("cert", "key")],
    )
    for words, message in (
        (tls, "--connect-tls-ca: --gateway-tls-cert is set; name the"),
        ([trusted], "--connect-tls-ca: the gateway has no certificate"),
        ([*tls, trusted, f"--gateway-tls-ca={files['ca']}"], "--connect-tls-cert: --gateway-tls-ca requires one"),
        ([*tls, trusted], "--connect-tls-name: this command would not accept the certificate of --gateway-tls-cert: "),
        ([*tls, strange], "--connect-tls-ca: this command would not accept the certificate of --gateway-tls-cert: "),
        ([*tls, trusted, named, f"--gateway-tls-ca={files['ca']}", *foreign], "--gateway-tls-ca: the gateway service"),
        ([*tls, "--connect-tls-ca=none"], "--connect-tls-ca: none cannot be read"),
    ):
        assert main([command, f"--model={model_path}", "--device=cpu", *words]) == 2
        assert message in capsys.readouterr().err


def test_an_address_that_cannot_be_bound_is_refused_with_its_option() -> None:
    def check(*words: str, fixed_ports: bool = True) -> None:
        free = ["--ephemeral"] if not fixed_ports else []
        others = [f"--{name}=127.0.0.1:0" for name in ("gateway-address", "verify-metrics-address", "rest-address")]
        given = parse(*free, *others, "--draft-metrics-address=127.0.0.1:0", *words)
        for look in door_checks(parse_service_options(given, env={}), fixed_ports):
            look()

    check()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--rest-address: cannot bind port {port} of 127.0.0.1"):
            check(f"--rest-address=127.0.0.1:{port}", fixed_ports=False)
    with pytest.raises(ConfigError, match=r"^--verify-address: 'nowhere' is not an address"):
        check("--verify-address=nowhere")
    with pytest.raises(
        ConfigError, match=r"^--gateway-address: 127.0.0.1:9 is also the address of --verify-metrics-address"
    ):
        check("--verify-metrics-address=127.0.0.1:9", "--gateway-address=127.0.0.1:9")


def test_links_and_given_addresses_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w")
    given = {"verify": VerifyOptions(address="0.0.0.0:7000", draft=("far:1",)), "gateway": GatewayOptions()}
    linked = link({name: place(name, options, folder, fixed_ports=True) for name, options in given.items()})
    assert linked["verify"].address == "0.0.0.0:7000"
    assert getattr(linked["verify"], "draft") == ("far:1",)  # noqa: B009
    assert getattr(linked["gateway"], "verify") == ("0.0.0.0:7000",)  # noqa: B009
    assert linked["gateway"].address == GatewayOptions().address


def test_a_restart_binds_what_was_bound() -> None:
    options = GatewayOptions(address="127.0.0.1:0", rest_address="127.0.0.1:0")
    again = with_bound_addresses(
        options, {"address": "127.0.0.1:5", "rest_address": "127.0.0.1:6", "metrics_address": ""}
    )
    assert (again.address, getattr(again, "rest_address")) == ("127.0.0.1:5", "127.0.0.1:6")  # noqa: B009


def test_a_restarted_gateway_opens_no_second_door_where_rest_serves_its_metrics() -> None:
    options = GatewayOptions(rest_address="127.0.0.1:0", metrics_address="")
    again = with_bound_addresses(options, {"rest_address": "127.0.0.1:6", "metrics_address": "127.0.0.1:6"})
    assert again.metrics_address == ""


def test_host_and_port_are_answered_with_the_address_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--host", "0.0.0.0"]) == 2
    assert "--rest-address HOST:PORT for HTTP, --gateway-address HOST:PORT for gRPC" in capsys.readouterr().err
