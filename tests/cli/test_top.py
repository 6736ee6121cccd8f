from __future__ import annotations

import asyncio
import contextlib
import http.server
import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from service_process import wait_until

from outrider.cli.cluster import Cluster
from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.metrics import MetricsPage
from outrider_tools.bench.clients import GrpcClient, RequestOptions, run_point
from outrider_tools.bench.requests import LoadPoint, Prompt, random_prompts
from outrider_tools.cli.top import PageView, TopFigure, Watch, _fitted, line_of, page_url, page_view, picture_of

pytestmark = pytest.mark.xdist_group("live")

ROOT = Path(__file__).resolve().parents[2]


def figures(view: PageView) -> dict[str, str]:
    return {figure.name.strip(): figure.value for figure in view.figures}


def number(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    assert found, text
    return float(found[0])


@pytest.fixture
def views(live: Cluster) -> dict[str, PageView]:
    """What a load leaves on the pages of all three services."""
    watch = Watch([live.metrics_url(name) for name in live.services])
    watch.read()
    drafted = page_url(live.metrics_url("draft"))
    commits_before = MetricsPage.read(drafted).total("outrider_draft_commits")

    async def load() -> None:
        client = GrpcClient(live.gateway_address, RequestOptions(ignore_eos=True))
        prompts = random_prompts(4, "top", input_len=12, output_len=40, vocab_size=61)
        prompts.append(Prompt(4, token_ids=(99,)))
        await run_point(client, prompts, LoadPoint(concurrency=2, num_prompts=5))
        await client.close()

    asyncio.run(load())
    # A draft's engine reports to its page a few times a second what it has done, and a load may be over sooner.
    wait_until(lambda: MetricsPage.read(drafted).total("outrider_draft_commits") > commits_before)
    return {view.kind: view for view in watch.read()}


def test_real_pages_tell_what_a_load_did(views: dict[str, PageView]) -> None:
    gateway, verify, draft = (figures(views[name]) for name in ("gateway", "verify", "draft"))
    for shown in (gateway, verify):
        assert number(shown["tokens/s"]) > 0 and number(shown["accept length"]) > 1
        assert number(shown["accepted by depth, %"]) > 0
        assert shown["running"] == "0"
    assert gateway["errors"] == "1" and gateway["invalid_value grpc"] == "1"
    assert gateway["replicas"] == "1 of 1 ready" and number(gateway["ttft p99"]) > 0
    assert verify["drafts"] == "1 of 1" and verify["preemptions"] == "0" and verify["pages"].endswith(" of 256")
    assert {"hit rate", "round p50", "gap p50", "hold", "plain rounds"} <= set(verify)
    assert number(draft["nodes/s"]) > 0 and number(draft["commits/s"]) > 0 and draft["sessions"] == "1"
    alarms = {figure.name.strip() for view in views.values() for figure in view.figures if figure.alarm}
    assert alarms == {"errors", "invalid_value grpc"}


def test_a_view_is_a_line_and_a_picture(views: dict[str, PageView]) -> None:
    line = line_of(views["verify"])
    assert (
        re.match(r"\d\d:\d\d:\d\d verify 127\.0\.0\.1:\d+  running 0  waiting 0  tokens/s ", line) and "\n" not in line
    )
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(picture_of(list(views.values()), 150))
    text = console.export_text()
    assert all(f" {name} 127.0.0.1" in text for name in views) and "accept length" in text
    assert "; --help explains the figures" in text


@pytest.mark.parametrize(("width", "together"), [(80, 2), (73, 2), (72, 1), (46, 1), (200, 3)])
def test_views_stand_side_by_side_where_they_fit(width: int, together: int) -> None:
    views = [PageView(kind, "127.0.0.1:9000", (TopFigure("name", "value"),)) for kind in ("gateway", "verify", "draft")]
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(picture_of(views, width))
    (line, *_) = [line for line in console.export_text().splitlines() if "gateway" in line]
    assert line.count("127.0.0.1:9000") == together


def test_what_a_terminal_has_no_room_for_is_counted() -> None:
    views = [PageView("verify", "x", tuple(TopFigure(f"figure {at}", "1") for at in range(30)))]
    console = Console(record=True, width=80, height=24, file=io.StringIO())
    console.print(_fitted(console, picture_of(views, 80)))
    lines = console.export_text().splitlines()
    assert len(lines) == 24 and lines[-1].startswith("10 more lines: ")
    console = Console(record=True, width=80, height=33, file=io.StringIO())
    console.print(_fitted(console, picture_of(views, 80)))
    assert "more lines" not in console.export_text()


def test_help_explains_every_figure(views: dict[str, PageView], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--help"])
    output = capsys.readouterr().out
    shown = {figure.name for view in views.values() for figure in view.figures}
    plain = {"tokens/s", "requests/s", "rounds/s", "nodes/s", "commits/s", "bursts/s", "running", "waiting", "errors"}
    words = {name.removesuffix(" p50").removesuffix(" p99") for name in shown - plain if not name.startswith(" ")}
    assert [word for word in sorted(words) if f"  {word} " not in output and not word.startswith("answer of ")] == []


def test_once_prints_a_line_for_each_page(live: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [live.metrics_url(name) for name in live.services]
    assert main(["top", "--once", "--interval=0.05", *pages]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == live.services
    assert main(["top", "--count=2", "--interval=0.05", *pages[:1]]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_page_that_is_gone_is_told_beside_the_others(live: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["top", "--once", "--interval=0.05"]
    assert main([*words, live.metrics_url("verify"), "127.0.0.1:1"]) == 0
    assert "127.0.0.1:1: http://127.0.0.1:1/metrics cannot be read" in capsys.readouterr().out
    assert main([*words, "127.0.0.1:1"]) == 1


def test_a_grpc_door_is_told_from_a_metrics_page(live: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--interval=0.05", live.gateway_address]) == 1
    text = capsys.readouterr().out
    assert "does not speak HTTP; give the REST door of a gateway or a --metrics-address, not a gRPC door" in text


def test_what_would_help_is_told_of_an_address_that_shows_no_page(
    live: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = live.rest_url
    for page, message in (
        ("127.0.0.1:1", "Connection refused; nobody listens there: give the REST door of a gateway or a --metrics-"),
        (rest.replace("http:", "https:"), "; begin it with http:// where the door has no TLS"),
        (f"{rest}/v1/none", "answers 404 Not Found; give the REST door of a gateway or a --metrics-address"),
        (f"{rest}/version", "is no metrics page; give the REST door of a gateway or a --metrics-address"),
    ):
        assert main(["top", "--once", "--interval=0.05", page]) == 1
        assert message in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["top", "--connect=127.0.0.1:1"])
    assert "--connect: not an option of top; give pages as arguments: outrider top host:port" in capsys.readouterr().err


def in_terminal(kind: str, page: str) -> str:
    """What two readings of a page bring a terminal of this kind."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "outrider.cli", "top", "--count=2", "--interval=0.05", page]
    environment = {**os.environ, "TERM": kind, "COLUMNS": "100"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT) as process:
        os.close(theirs)
        data = b""
        with contextlib.suppress(OSError):  # Linux's end of a terminal whose other side is gone
            while part := os.read(ours, 65536):
                data += part
        assert process.wait(30) == 0
    os.close(ours)
    return data.decode()


def test_a_terminal_gets_a_picture_that_is_left_behind(live: Cluster) -> None:
    screen, _, left = in_terminal("xterm-256color", live.metrics_url("verify")).partition("\x1b[?1049l")
    assert "\x1b[?1049h" in screen and screen.count("hit rate") == 2
    assert "hit rate" in left and "verify 127.0.0.1" in left


def test_a_terminal_that_draws_nothing_gets_lines(live: Cluster) -> None:
    output = in_terminal("dumb", live.metrics_url("verify"))
    assert "\x1b" not in output and output.count(" verify 127.0.0.1") == 2 and output.count("hit rate") == 2


def test_a_service_that_was_started_anew_counts_from_nothing() -> None:
    def page(tokens: int) -> MetricsPage:
        return MetricsPage.parse(
            f"# TYPE outrider_verify_committed_tokens_total counter\noutrider_verify_committed_tokens_total {tokens}\n"
        )

    assert figures(page_view("x", page(10), page(1000), 5.0))["tokens/s"] == "2.0"
    assert figures(page_view("x", page(1010), page(1000), 5.0))["tokens/s"] == "2.0"


def test_acceptance_is_of_the_same_rounds_on_every_page() -> None:
    """Of ten rounds, of which four had drafts and three took one."""

    def page(lengths: str, accepted: str, drafted: str, labels: str) -> MetricsPage:
        given = f"{{{labels}}}" if labels else ""
        return MetricsPage.parse(
            f"# TYPE {lengths} histogram\n{lengths}_count{given} 10\n{lengths}_sum{given} 13\n"
            f'# TYPE {accepted}_total counter\n{accepted}_total{{{labels}{"," * bool(labels)}position="0"}} 3\n'
            f"# TYPE {drafted}_total counter\n{drafted}_total{given} 4\n"
            f"# TYPE {lengths}_s gauge\n{lengths}_s 1\n"
        )

    verify = [f"outrider_verify_{name}" for name in ("accept_length", "accepted_tokens_per_position", "drafted_rounds")]
    vllm = [f"vllm:spec_decode_num_{name}" for name in ("accepted_tokens_per_pos", "drafts")]
    pages = [page(*verify, ""), page("outrider_gateway_accept_length", *vllm, 'model_name="m"')]
    shown = [figures(page_view("x", one, MetricsPage(), 1.0)) for one in pages]
    assert [one["accepted by depth, %"] for one in shown] == ["30", "30"]
    assert [one["accept length"] for one in shown] == ["1.30", "1.30"]


def test_a_page_of_somebody_else_is_told() -> None:
    view = page_view("x", MetricsPage.parse("# TYPE a gauge\na 1\n"), MetricsPage(), 1.0)
    assert view.error == "none of our services' pages"


class Asking(http.server.BaseHTTPRequestHandler):
    """Shows a page to holders of a key alone, if `key` is set, and keeps what it was sent."""

    key = ""
    sent: list[str | None]

    def do_GET(self) -> None:
        given = self.headers.get("Authorization")
        self.sent.append(given)
        self.send_response(200 if given == (self.key or None) else 401)
        self.end_headers()
        self.wfile.write(b"# TYPE outrider_verify_kv_pages gauge\noutrider_verify_kv_pages 1\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=["", "Bearer k1"])
def door(request: pytest.FixtureRequest) -> Iterator[tuple[str, type[Asking]]]:
    handler = type("Handler", (Asking,), {"key": request.param, "sent": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_key_goes_to_pages_alone_that_ask_for_one(door: tuple[str, type[Asking]]) -> None:
    address, handler = door
    watch = Watch([address], token="k1")
    assert [watch.read()[0].kind for _ in range(2)] == ["verify", "verify"]
    assert handler.sent == ([None, "Bearer k1", "Bearer k1"] if handler.key else [None, None])
    if handler.key:
        for token in ("", "wrong"):
            error = Watch([address], token).read()[0].error
            assert "401" in error and error.endswith("; set OUTRIDER_API_KEY or --api-key-file")


def test_pages_are_read_without_a_proxy(door: tuple[str, type[Asking]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, _ = door
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert Watch([address], token="k1").read()[0].kind == "verify"


def test_an_optional_page_is_left_out_until_it_was_read(door: tuple[str, type[Asking]]) -> None:
    address, handler = door
    handler.key = "Bearer nobody's"
    watch = Watch([address], optional=[f"http://{address}/draft"])
    assert [bool(view.error) for view in watch.read()] == [True]
    handler.key = ""
    assert [view.error for view in watch.read()] == ["", ""]
    handler.key = "Bearer nobody's"
    assert [bool(view.error) for view in watch.read()] == [True, True]


def test_pages_are_named_by_address_or_url() -> None:
    assert page_url("host:1") == "http://host:1/metrics" == page_url("http://host:1/")
    assert page_url("https://host:1/other") == "https://host:1/other"
    for none in ("ftp://host", "http://host:99999", "http://[::1"):
        with pytest.raises(ConfigError, match="is no metrics page"):
            page_url(none)
