"""Signals, exit codes and the ready file of a service process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.config.base import parse_options
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError, exit_text
from outrider.rpc.lifecycle import misspelt_variables, run_service, with_variable, write_ready_file

REPOSITORY = Path(__file__).parents[2]
SERVICE = """
import asyncio, signal, sys
from outrider.config.base import parse_options
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_service, write_ready_file
async def main(options, stop):
    print("up", flush=True)
    {body}
sys.exit(run_service(main, parse_options(ServiceOptions, prog="python -m test")))
"""


def spawn(body: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE.format(body=body), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_service_drain(number: signal.Signals) -> None:
    with spawn("await stop.wait(); await asyncio.sleep(0); print('drained')") as process:
        wait_until_up(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == "drained\n"
    assert err.count(f"{number.name}: stopping") == 1


def test_a_second_interrupt_ends_even_a_busy_process_at_once() -> None:
    body = "await stop.wait(); print('draining', flush=True)\n    while True: pass"
    with spawn(body) as process:
        wait_until_up(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize(
    "body",
    [
        "raise ConfigError('--model: no such folder; use a folder')",
        "raise ExceptionGroup('tasks', [ConfigError('--model: no such folder; use a folder')])",
    ],
)
def test_a_config_error_is_one_line_and_exit_code_2(body: str) -> None:
    with spawn(body) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err == "service: error: --model: no such folder; use a folder\n"


def test_a_wrong_option_is_one_line_and_exit_code_2() -> None:
    with spawn("pass", "--drain-secs", "3") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert err == "python -m test: error: unknown option --drain-secs; did you mean --drain-seconds?\n"


def test_an_exception_is_logged_in_one_line_and_exit_code_1() -> None:
    with spawn("raise ValueError('a\\\\nb')") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "ValueError: a\\nb" in err


def test_the_ready_file_lives_as_long_as_the_service(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.write_text("stale")
    body = "write_ready_file(options.ready_file, address='unix:/x'); print('ready', flush=True); await stop.wait()"
    with spawn(body, "--ready-file", str(path)) as process:
        wait_until_up(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert json.loads(path.read_text()) == {"address": "unix:/x", "metrics_address": "", "rest_address": ""}
        process.terminate()
        process.communicate(timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_a_ready_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ready-file: cannot write .*No such file"):
        write_ready_file(tmp_path / "none" / "ready", address="a:1")
    write_ready_file("", address="a:1")


def test_a_ready_file_that_cannot_be_removed_is_one_line(tmp_path: Path) -> None:
    with spawn("pass", "--ready-file", str(tmp_path)) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("service: error: --ready-file: cannot remove")


def test_the_handlers_are_put_back_and_the_result_is_the_exit_code() -> None:
    async def main(options: ServiceOptions, stop: asyncio.Event) -> int:
        assert signal.getsignal(signal.SIGTERM) not in before
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        return 3

    before = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
    assert run_service(main, ServiceOptions()) == 3
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == before


def test_every_end_of_a_process_has_words() -> None:
    codes = (2, -signal.SIGKILL, -signal.SIGRTMIN - 1)
    assert [exit_text(code) for code in codes] == ["exit code 2", "SIGKILL", f"signal {signal.SIGRTMIN + 1}"]


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("OUTRIDER_MAX_QUED_REQUESTS", "OUTRIDER_MAX_QUEUED_REQUESTS"),
        ("OUTRIDER_ALLOWED_HOST", "OUTRIDER_ALLOWED_HOSTS"),
        ("OUTRIDER_DTPYE", "OUTRIDER_DTYPE"),
        ("OUTRIDER_SPECULATIVE_ALGO", "OUTRIDER_SPECULATIVE_ALGORITHM"),
    ],
)
def test_a_misspelt_variable_is_found(variable: str, meant: str) -> None:
    assert misspelt_variables(["PATH", variable, meant]) == [(variable, meant)]


def test_no_name_that_docker_or_the_pages_use_is_taken_for_a_mistake() -> None:
    pages = [*REPOSITORY.glob("docker/**/*"), *REPOSITORY.glob("docs/*.md"), REPOSITORY / "README.md"]
    named = {name for page in pages if page.is_file() for name in re.findall(r"OUTRIDER_[A-Z0-9_]+", page.read_text())}
    assert len(named) > 100
    assert misspelt_variables(named) == []


def test_a_service_tells_of_a_misspelt_variable_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADRESS", "127.0.0.1:1")
    with spawn("pass") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "OUTRIDER_ADRESS in the environment is not an option of any service; did you mean OUTRIDER_ADDRESS?" in err


@pytest.mark.parametrize("given", [(), ("--log-level", "INFO"), ("--address=bar",)])
def test_what_is_wrong_in_the_environment_is_named_so(given: tuple[str, ...]) -> None:
    env = {"OUTRIDER_ADDRESS": "foo"}
    options = parse_options(GatewayOptions, given, env=env)
    message = f"'{options.address}' is not an address"
    named = "--address" if options.address == "bar" else "OUTRIDER_ADDRESS (environment)"
    assert with_variable(f"--address: {message}", options, env) == f"{named}: {message}"
    assert with_variable(f"--address: {message}", options, {}) == f"--address: {message}"


def test_a_service_names_the_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADDRESS", "foo")
    done = subprocess.run(
        [sys.executable, "-m", "gateway"], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gateway: error: OUTRIDER_ADDRESS (environment): 'foo' is not an address")
