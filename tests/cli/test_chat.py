from __future__ import annotations

import asyncio
import os
import platform
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from outrider.cli.main import main
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]


class EchoGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers with the number of messages and the last one, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[gateway_pb2.GatewayServiceGenerateRequest] = []

    async def ListModels(self, request, context):
        return gateway_pb2.GatewayServiceListModelsResponse(models=[gateway_pb2.Model(id="echo", context_length=9)])

    async def Generate(self, request, context):
        self.requests.append(request)
        messages = request.chat.messages
        if messages[-1].content == "key":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")
        if messages[-1].content == "fail":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "verify is away")
        if messages[-1].content == "wait":
            yield gateway_pb2.GatewayServiceGenerateResponse(text="begun", token_ids=[1], origins=[1], text_lengths=[5])
            await asyncio.Event().wait()
        answer = f"{len(messages)} {messages[-1].content}"
        for word, origin in ((answer[:2], common_pb2.TOKEN_ORIGIN_PLAIN), (answer[2:], 1)):
            yield gateway_pb2.GatewayServiceGenerateResponse(
                text=word, token_ids=[1], origins=[origin], text_lengths=[len(word)]
            )
        usage = common_pb2.Usage(
            completion_tokens=2, num_rounds=1, num_draft_tokens=3, num_accepted_tokens=1, num_committed_tokens=2
        )
        yield gateway_pb2.GatewayServiceGenerateResponse(finish_reason=common_pb2.FINISH_REASON_STOP, usage=usage)


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[EchoGateway, str]]:
    servicer = EchoGateway()
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


async def chat(address: str, typed: str | bytes, *options: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", "chat", "--connect", address, *options,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    out, err = await process.communicate(typed.encode() if isinstance(typed, str) else typed)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("question", ["", "wait\n"], ids=["at the prompt", "while an answer comes"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it(gateway: tuple[EchoGateway, str], question: str, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", "chat", "--connect", gateway[1], stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    await process.stderr.readuntil(b"echo: ")
    process.stdin.write(question.encode())
    if question:
        await process.stdout.readuntil(b"begun")
    process.send_signal(number)
    await is_interrupted(process)


async def test_nohup_keeps_it_running_when_the_terminal_goes(gateway: tuple[EchoGateway, str]) -> None:
    command = 'trap "" HUP; exec "$0" -m outrider.cli chat --connect "$1"'
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command, sys.executable, gateway[1], stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    await process.stderr.readuntil(b"echo: ")
    process.send_signal(signal.SIGHUP)
    out, _ = await process.communicate(b"go on\n")
    assert (process.returncode, out) == (0, b"1 go on\n")


async def is_interrupted(process: asyncio.subprocess.Process) -> None:
    """It ends by itself, as one that a signal ended."""
    try:
        async with asyncio.timeout(20):
            assert await process.wait() == 130
    finally:
        if process.returncode is None:
            process.kill()


# Sends a signal that does not interrupt the main thread's read, as one that came just before it: it goes to another
# thread, once the main thread reads from file 0 (system call 0).
UNSEEN = """
import builtins, os, signal, threading
from outrider.cli.main import main

def send():
    while not open("/proc/self/task/%d/syscall" % os.getpid()).read().startswith("0 0x0 "):
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

def read(prompt):
    threading.Thread(target=send).start()
    return os.read(0, 1).decode()

builtins.input = read
raise SystemExit(main())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls differ")
async def test_a_signal_ends_it_that_came_before_the_read_of_a_line(gateway: tuple[EchoGateway, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UNSEEN, "chat", "--connect", gateway[1], stdin=asyncio.subprocess.PIPE, cwd=ROOT
    )
    await is_interrupted(process)


async def test_a_conversation_is_remembered_until_reset(gateway: tuple[EchoGateway, str]) -> None:
    servicer, address = gateway
    code, out, err = await chat(address, "one\n\ntwo\n/reset\nthree\n/quit\nfour\n", "--system", "be brief")
    assert (code, out) == (0, "2 one\n4 two\n2 three\n"), "what is no answer is not among the answers of a pipe"
    roles = [message.role for message in servicer.requests[1].chat.messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert servicer.requests[1].chat.messages[2].content == "2 one"
    assert "2 tokens" in err and "accept length 2.00, 1 of 3 draft tokens accepted" in err


async def test_a_pipe_gets_text_without_escape_codes(gateway: tuple[EchoGateway, str]) -> None:
    _, out, err = await chat(gateway[1], "one\n")
    assert "1 one" in out
    assert "\x1b" not in out + err


async def test_options_reach_the_request(gateway: tuple[EchoGateway, str]) -> None:
    servicer, address = gateway
    await chat(address, "x\n", "--temperature=0.5", "--seed=7", "--max-tokens=9", "--plain")
    request = servicer.requests[0]
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0.5, 7, 9)
    assert not request.sampling.HasField("top_p")
    assert request.speculation == gateway_pb2.SPECULATION_OFF


async def test_a_failed_answer_is_told_and_not_remembered(gateway: tuple[EchoGateway, str]) -> None:
    code, out, err = await chat(gateway[1], "fail\nnext\n")
    assert (code, out) == (1, "\n1 next\n")
    assert "error: " in err and "verify is away" in err


async def test_a_key_that_is_missing_is_told_by_its_name(gateway: tuple[EchoGateway, str]) -> None:
    code, _, err = await chat(gateway[1], "key\n")
    assert code == 1
    assert "missing or wrong bearer token; set OUTRIDER_API_KEY" in " ".join(err.split())


async def test_in_a_terminal_everything_is_on_stdout_and_a_failed_answer_is_no_failure(
    gateway: tuple[EchoGateway, str],
) -> None:
    terminal, stdin = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", "chat", "--connect", gateway[1],
        stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    os.close(stdin)
    os.write(terminal, b"fail\nnext\n/quit\n")
    out, err = await process.communicate()
    os.close(terminal)
    assert process.returncode == 0, err
    for text in (b"echo: ", b"error: ", b"verify is away", b"1 next\n", b"accept length"):
        assert text in out


async def test_nobody_there_is_one_clear_line() -> None:
    code, _, err = await chat("127.0.0.1:1", "x\n")
    assert code == 1
    assert err.startswith("outrider: error: ") and "Traceback" not in err


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
async def test_a_closed_input_is_its_end_and_a_closed_output_drops_what_is_told(
    gateway: tuple[EchoGateway, str], closed: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "outrider.cli", "chat", "--connect", gateway[1],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    out, err = await process.communicate(b"one\n")
    assert process.returncode == 0 and b"Traceback" not in err
    assert out == (b"" if "1>" in closed or "0<" in closed else b"1 one\n")
    assert len(gateway[0].requests) == ("0<" not in closed)


async def test_what_the_outputs_encoding_does_not_have_is_a_question_mark(
    gateway: tuple[EchoGateway, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    source = "import io, sys; sys.stdin = io.StringIO('\\U0001f600 \\xe9\\n'); "
    source += "from outrider.cli.main import main; raise SystemExit(main())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, "chat", "--connect", gateway[1], stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"1 ? ?\n")


@pytest.mark.parametrize("errors", ["surrogateescape", "strict"])
async def test_bytes_that_are_no_text_are_asked_as_question_marks(
    gateway: tuple[EchoGateway, str], monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    servicer, address = gateway
    monkeypatch.setenv("PYTHONIOENCODING", f"utf-8:{errors}")
    code, out, err = await chat(address, b"one \xff two\n")
    assert (code, out) == (0, "1 one ? two\n"), err
    assert servicer.requests[0].chat.messages[0].content == "one ? two"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seed", "-3"),
        ("--seed", str(2**64)),
        ("--max-tokens", "0"),
        ("--max-tokens", str(2**32)),
        ("--temperature", "9"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
    ],
)
def test_numbers_that_no_request_can_hold_are_refused_by_name(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--connect", "127.0.0.1:1", f"{option}={value}"])
    assert ended.value.code == 2
    kind = "number" if option in ("--temperature", "--top-p") else "whole number"
    assert f"argument {option}: '{value}' is not a {kind} from" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model=other", "--draft-placement=remote"])
async def test_options_of_services_are_refused_where_none_is_started(option: str) -> None:
    code, _, err = await chat("127.0.0.1:1", "", option)
    flag = option.partition("=")[0]
    assert (
        code == 2
        and err == f"outrider: error: {flag}: with --connect no service is started here; leave one of the two out\n"
    )
