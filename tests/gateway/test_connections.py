"""No HTTP client holds a connection for ever by being slow, silent or many; real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
from gateway_world import until
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.responses import IN_EVENTS, ClientStalled, EventStream, run_while_connected
from gateway.http.server import Connections, HttpServer
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Application:
    """Answers with `body`; at /wait only when told to."""

    def __init__(self, body: bytes = b"ok") -> None:
        self.body = body
        self.open = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        if scope["path"] == "/wait":
            await self.open.wait()
        await Response(self.body)(scope, receive, send)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes = GET) -> tuple[int, bytes]:
        """Sends a request; status and body of the answer."""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return int(head.split()[1]), await self.reader.readexactly(int(length))

    async def ended(self) -> bool:
        """Waits until the server has closed the connection; whether it had nothing more to say."""
        try:
            async with asyncio.timeout(10):
                return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def serving(app: Any, **limits: Any) -> AsyncIterator[HttpServer]:
    options = GatewayOptions(**{"max_connections_per_address": 1024} | limits)
    server = HttpServer(app, "127.0.0.1:0", option="--rest-address", options=options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def client(server: HttpServer, source: str = "127.0.0.1") -> AsyncIterator[Client]:
    """From an address of this machine."""
    reader, writer = await asyncio.open_connection(*server.address.split(":"), local_addr=(source, 0))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize("begin", [GET[:-1], GET[:3], b"", GET], ids=["most", "few", "none at first", "a request"])
async def test_who_does_not_end_the_head_of_a_request_is_cut_off(begin: bytes) -> None:
    async with serving(Application(), header_seconds=0.2) as server, client(server) as slow:
        if begin == GET:
            assert await slow.ask() == (200, b"ok")
            begin = GET[:9]
        slow.writer.write(begin)
        await slow.writer.drain()
        slow.writer.write(b"G" if not begin else b"\r")  # more of it wins no time
        assert await slow.ended()
        await until(lambda: server.connections.num_open == 0)


async def test_a_whole_head_may_wait_for_its_answer_longer_than_a_head_may_take() -> None:
    app = Application()
    async with serving(app, header_seconds=0.1) as server, client(server) as patient, client(server) as slow:
        patient.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.num_begun == 1)
        slow.writer.write(GET[:9])
        assert await slow.ended()  # that long has passed
        app.open.set()
        assert await patient.answer() == (200, b"ok")
        # And between two requests it may be silent as long.
        async with client(server) as another:
            another.writer.write(GET[:9])
            assert await another.ended()
        assert await patient.ask() == (200, b"ok")


async def test_a_body_that_nobody_reads_may_not_trickle_on() -> None:
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
    async with serving(Application(), header_seconds=0.2) as server, client(server) as slow:
        assert await slow.ask(head) == (200, b"ok")
        slow.writer.write(b"x")
        assert await slow.ended()


async def test_a_whole_answer_that_is_left_unread_is_dropped() -> None:
    async with serving(Application(b"x" * 30_000_000), stall_seconds=0.2) as server, client(server) as deaf:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        deaf.writer.write(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        await until(lambda: server.connections.num_open == 1)
        await until(lambda: server.connections.num_open == 0)


async def test_a_stop_with_no_request_left_says_nothing_of_who_takes_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.http.server._GRACE_SECONDS", 0.05)
    answered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * 30_000_000)(scope, receive, send)
        answered.set()

    async with serving(app) as server, client(server) as deaf:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        deaf.writer.write(GET)
        await answered.wait()
        await server.stop()
        assert server.connections.num_open == 1
    assert not caplog.records


async def give_up(send: Send) -> None:
    """Streams until the client has been deaf for too long."""
    stream = EventStream(send, stall_seconds=0.1)
    with contextlib.suppress(ClientStalled):
        while True:
            await stream.write(b"x" * 1_000_000)


async def wait_on(send: Send) -> None:
    """Streams without a limit of its own."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 30_000_000, "more_body": True})
    await send({"type": "http.response.body", "body": b"y"})


@pytest.mark.parametrize("stream", [give_up, wait_on])
async def test_a_stream_that_is_left_unread_is_dropped_and_no_fault(
    stream: Callable[[Send], Coroutine[Any, Any, None]], caplog: pytest.LogCaptureFixture
) -> None:
    quiet_may_end = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/quiet":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            await quiet_may_end.wait()
            await send({"type": "http.response.body", "body": b"k"})
        else:
            await run_while_connected(receive, stream(send))

    async with serving(app, stall_seconds=0.1) as server, client(server) as quiet, client(server) as deaf:
        quiet.writer.write(GET.replace(b"/ ", b"/quiet "))
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        deaf.writer.write(GET)
        await until(lambda: server.connections.num_open == 2)
        await until(lambda: server.connections.num_open == 1)
        quiet_may_end.set()  # it was sent nothing for as long, and has taken all
        assert await quiet.answer() == (200, b"ok")
    assert not caplog.records


async def test_when_there_are_too_many_an_idle_one_gives_way() -> None:
    app = Application()
    async with serving(app, max_connections=2) as server, client(server) as busy, client(server) as idle:
        busy.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.num_begun == 1)
        assert await idle.ask() == (200, b"ok")
        async with client(server) as new:
            assert await new.ask() == (200, b"ok")
            assert await idle.ended()
            app.open.set()
            assert await busy.answer() == (200, b"ok")


async def test_one_whose_client_still_takes_its_answer_gives_no_way() -> None:
    body = b"x" * 30_000_000
    async with serving(Application(body), max_connections=1) as server, client(server) as slow:
        slow.writer.write(GET)
        await slow.reader.readexactly(1)
        async with client(server) as new:
            assert (await new.answer())[0] == 503
        assert (await slow.answer())[1] == body


async def test_when_all_are_in_use_a_new_one_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    app = Application()
    refused: list[Exception] = []
    async with serving(app, max_connections=2) as server, client(server) as one, client(server) as two:
        server.connections.on_refused = refused.append
        for busy in (one, two):
            busy.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.num_begun == 2)
        for _ in range(3):
            async with client(server) as new:
                status, body = await new.answer()
                assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
                assert await new.ended()
        assert len(refused) == 3 and caplog.text.count("--max-connections") == 1
        app.open.set()
        assert await one.answer() == await two.answer() == (200, b"ok")
        await until(lambda: server.connections.num_open == 2)
        async with client(server) as later:
            assert await later.ask() == (200, b"ok")


async def test_one_address_cannot_take_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    app, wait = Application(), GET.replace(b"/ ", b"/wait ")
    async with (
        serving(app, max_connections=4, max_connections_per_address=2) as server,
        client(server, "127.0.0.2") as one,
        client(server, "127.0.0.2") as two,
        client(server, "127.0.0.3") as other,
    ):
        assert await other.ask() == (200, b"ok")
        for busy in (one, two):
            busy.writer.write(wait)
        await until(lambda: app.num_begun == 3)
        for _ in range(2):
            async with client(server, "127.0.0.2") as new:
                status, body = await new.answer()
                assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        assert caplog.text.count("--max-connections-per-address") == 1
        # The other address has lost nothing, though it was idle, and may have more.
        async with client(server, "127.0.0.3") as more:
            assert await more.ask() == await other.ask() == (200, b"ok")
        app.open.set()
        assert await one.answer() == await two.answer() == (200, b"ok")
        # Now that it has an idle one, that one gives way.
        async with client(server, "127.0.0.2") as new:
            assert await new.ask() == (200, b"ok")
            assert await one.ended()
            assert await two.ask() == (200, b"ok")


async def test_a_proxy_is_many_clients() -> None:
    app = Application()
    limits: dict[str, Any] = {"max_connections_per_address": 1, "proxies": ("127.0.1.0/24",)}
    async with serving(app, **limits) as server, client(server, "127.0.1.9") as one, client(server, "127.0.1.9") as two:
        for busy in (one, two):
            busy.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.num_begun == 2)
        app.open.set()
        assert await one.answer() == await two.answer() == (200, b"ok")


@pytest.mark.parametrize(
    ("one", "another", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_clients_are_told_apart_by_what_they_cannot_choose(one: str, another: str, same: bool) -> None:
    connections = Connections(GatewayOptions())
    assert (connections.client_of(one) == connections.client_of(another) != "") is same


def test_a_host_that_is_no_name_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"--rest-address: 'a\.\.b:0' is not an address: .*; use a host's name"):
        HttpServer(Application(), "a..b:0", option="--rest-address", options=GatewayOptions())


@pytest.mark.parametrize("proxy", ["proxy.example", "10.0.0.1/8", "10.0.0.0/99", ""])
def test_a_proxy_that_is_no_address_is_refused_at_the_start(proxy: str) -> None:
    with pytest.raises(ConfigError, match="--proxies"):
        GatewayOptions(proxies=(proxy,)).check()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01 no http\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000, (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a:b\r\n" * 12_000 + b"\r\n", (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a:b\n" * 300 + b"\n", (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a:b\r\n" * 300, (431, "head_too_large")),
    ],
)
async def test_what_is_no_http_is_counted_and_told_so_in_the_shape_of_other_errors(
    data: bytes, expected: tuple[int, str]
) -> None:
    counted: list[str] = []
    async with serving(Application()) as server, client(server) as odd:
        server.connections.on_refused = lambda error: counted.append(error.code)
        status, body = await odd.ask(data)
        assert (status, json.loads(body)["error"]["code"]) == expected
        assert await odd.ended()
    assert counted == [expected[1]]


async def test_lines_of_a_body_are_no_lines_of_headers_nor_are_those_of_another_request() -> None:
    lines = b"\n" * 1000
    begin = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n"
    few, many = (begin + b"a: b\r\n" * count + b"\r\n" + lines for count in (200, 300))
    async with serving(Application()) as server, client(server) as odd:
        odd.writer.write(few + few + many)
        statuses = [await odd.answer() for _ in range(3)]
        assert [status for status, _ in statuses] == [200, 200, 431]
        assert await odd.ended()


async def test_what_is_no_http_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(Application()) as server:
            for _ in range(5):
                async with client(server) as odd:
                    assert (await odd.ask(b"no http\r\n\r\n"))[0] == 400
    assert caplog.text.count("refused: invalid_http") == 1


async def test_a_damaged_body_in_the_middle_of_an_answer_harms_no_one(caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"

    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(early) as server, client(server) as odd:
        odd.writer.write(head)
        await odd.reader.readuntil(b"begun")
        odd.writer.write(b"no length of a chunk\r\n")
        await odd.ended()
        await until(lambda: server.connections.num_open == 0)
    assert "Traceback" not in caplog.text and "Fatal" not in caplog.text


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://example.org:8000/v1/models?a=1", "/v1/models", "example.org:8000"),
        (b"HTTPS://EXAMPLE.org", "/", "EXAMPLE.org"),
        (b"http://example.org?a=1", "/", "example.org"),
        (b"http://localhost:x@example.org/v1/models", "/v1/models", "example.org"),
        (b"/http://example.org/", "/http://example.org/", "localhost"),
        (b"http:///v1/models", "http:///v1/models", "localhost"),
    ],
)
async def test_a_whole_url_is_taken_as_its_path_and_host(target: bytes, path: str, host: str) -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await Response(b"ok")(scope, receive, send)

    async with serving(app) as server, client(server) as proxy:
        assert await proxy.ask(GET.replace(b"/ ", target + b" ", 1)) == (200, b"ok")
    (scope,) = seen
    assert (scope["path"], scope["raw_path"]) == (path, path.encode())
    assert [value for name, value in scope["headers"] if name == b"host"] == [host.encode()]
    assert scope["query_string"] == (b"a=1" if b"?" in target else b"")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_who_sends_no_more_gets_all_answers_that_are_due(version: bytes) -> None:
    async with serving(Application()) as server, client(server) as half:
        half.writer.write(GET + GET.replace(b"1.1", version) + GET[:9])
        half.writer.write_eof()
        assert await half.answer() == await half.answer() == (200, b"ok")
        assert await half.ended()


async def answer_slowly(scope: Scope, receive: Receive, send: Send, may_end: asyncio.Event) -> None:
    """Begins events at /events, and ends them, or answers as a whole, when told to."""
    if scope["path"] == "/events":
        scope["state"][IN_EVENTS] = True
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    await may_end.wait()
    if scope["path"] == "/events":
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})
    else:
        await Response(b"ok")(scope, receive, send)


@pytest.mark.parametrize("path", [b"/events", b"/whole"])
async def test_who_sends_no_more_may_wait_for_an_answer(path: bytes) -> None:
    may_end = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await run_while_connected(receive, answer_slowly(scope, receive, send, may_end))

    async with serving(app, keep_alive_seconds=0.05) as server, client(server) as half:
        half.writer.write(GET.replace(b"/ ", path + b" "))
        half.writer.write_eof()
        # It is looked whether the client is there, with what every client passes over.
        looked = b": keep-alive\n\n" if path == b"/events" else b"HTTP/1.1 100 Continue\r\n\r\n"
        before = b"".join([await half.reader.readuntil(looked) for _ in range(2)])
        may_end.set()
        whole = before + await half.reader.read()
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target=path, headers=[("host", "localhost")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(whole)
    events = list(iter(parser.next_event, h11.NEED_DATA))
    assert isinstance(events[-1], h11.EndOfMessage)
    assert [event.status_code for event in events if isinstance(event, h11.Response)] == [200]
    body = b"".join(event.data for event in events if isinstance(event, h11.Data))
    assert body.replace(b": keep-alive\n\n", b"") == (b"data: 1\n\ndata: 2\n\n" if path == b"/events" else b"ok")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("path", [b"/events", b"/whole"])
async def test_who_has_gone_is_not_waited_for(path: bytes, version: bytes) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await run_while_connected(receive, answer_slowly(scope, receive, send, asyncio.Event()))
        ended.set()

    async with serving(app) as server:
        async with client(server) as gone:
            gone.writer.write(GET.replace(b"/ ", path + b" ").replace(b"1.1", version))
            await begun.wait()
        await ended.wait()
        await until(lambda: server.connections.num_open == 0)
