from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from fake_cluster import FAKES, is_alive
from service_process import wait_until


class Up:
    """`outrider up` with fake services, as its own process in a session of its own, as from a terminal."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        ignored: str = "",
        output: int | None = None,
        closed: str = "",
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        for module in ("draft_service", "verify_service", "gateway"):
            (folder / f"{module}.py").write_text("import sys, fake_service\nsys.exit(fake_service.main())\n")
        ignoring = f'trap "" {ignored}; ' if ignored else ""  # without a signal it ends some shells
        self.log = folder / "log"
        path = os.pathsep.join([str(folder), str(FAKES), str(FAKES.parents[2])])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *("sh", "-c", f'{ignoring}exec "$@" {closed}', "sh"),
                    sys.executable,
                    "-m",
                    "outrider.cli",
                    "up",
                    "--ephemeral",
                    f"--model={model}",
                    "--drain-seconds=1",
                    "--draft-placement=remote",
                    *options,
                ],
                env={**os.environ, **environment, "PYTHONPATH": path},
                cwd=folder,
                stdout=log if output is None else output,
                stderr=log,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def processes(self, name: str) -> list[int]:
        return [int(number) for number in re.findall(rf"hello from {name}, .*process (\d+)\n", self.text)]

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # its test failed; nothing of it shall disturb the next one
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def wait_for(self, *words: str) -> None:
        wait_until(lambda: all(each in self.text for each in words) or self.process.poll() is not None)
        for each in words:
            assert each in self.text, self.text


# A shell without job control has what it starts with & ignore SIGINT.
@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGINT, ""), (signal.SIGINT, "INT"), (signal.SIGTERM, ""), (signal.SIGHUP, "")]
)
def test_a_signal_stops_everything_cleanly(
    number: signal.Signals, ignored: str, tmp_path: Path, model_path: Path
) -> None:
    with Up(tmp_path, model_path, ignored=ignored) as up:
        up.wait_for("Outrider is up", "verify  | hello from verify")
        up.wait_for("page                http://127.0.0.1:4711/\n")
        up.wait_for("REST                http://127.0.0.1:4711/v1", "gRPC                127.0.0.1:4711")
        up.wait_for("model               fake-1b in float8, context 77\n", "device              abacus\n")
        up.wait_for("drafts              a trained head (EAGLE3) and n-grams", "(NGRAM), in the draft service\n")
        up.process.send_signal(number)
        assert up.process.wait(20) == 0
        assert "outrider: stopping; requests that still run get up to 1 s to finish; Ctrl-C again kills\n" in up.text
        assert "outrider: draft ended, verify ended, gateway ended" in up.text
        assert "\x1b" not in up.text


def test_a_repeated_request_to_end_does_not_cut_the_first_one_short(tmp_path: Path, model_path: Path) -> None:
    with Up(tmp_path, model_path) as up:
        up.wait_for("Outrider is up")
        up.process.terminate()
        up.wait_for("outrider: stopping")
        up.process.terminate()
        assert up.process.wait(20) == 0, up.text
        assert "outrider: draft ended, verify ended, gateway ended" in up.text


def test_doors_that_are_open_to_all_are_told_with_what_would_close_them(tmp_path: Path, model_path: Path) -> None:
    doors = ["--gateway-address=0.0.0.0:0", "--rest-address=0.0.0.0:0", "--draft-address=0.0.0.0:0"]
    with Up(tmp_path, model_path, options=doors) as up:
        up.wait_for("Outrider is up", "metrics of gateway")
        for flag in ("--gateway-address", "--rest-address"):
            fix = "set OUTRIDER_API_KEY or --api-key-file"
            up.wait_for(f"  warning             {flag} 0.0.0.0:4711: anyone who can reach it can use it; {fix}\n")
        up.wait_for("--draft-address 0.0.0.0:4711: anyone who can reach it can use it; set --draft-auth-token-file\n")
    with Up(tmp_path, model_path, options=doors[:2], OUTRIDER_API_KEY="secret") as up:
        up.wait_for("Outrider is up", "metrics of gateway")
        assert "anyone who" not in up.text and "secret" not in up.text


def test_a_service_that_dies_is_started_again(tmp_path: Path, model_path: Path) -> None:
    with Up(tmp_path, model_path) as up:
        up.wait_for("Outrider is up")
        wait_until(lambda: bool(up.processes("verify")))
        os.kill(up.processes("verify")[0], signal.SIGKILL)
        up.wait_for("outrider: verify ended (SIGKILL); starting it again in 0.5 s")
        up.wait_for("outrider: verify serves again")
        wait_until(lambda: len(up.processes("verify")) == 2)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(20) == 0
        assert not any(map(is_alive, up.processes("verify")))


def test_nohup_keeps_everything_running_when_the_terminal_goes(tmp_path: Path, model_path: Path) -> None:
    with Up(tmp_path, model_path, ignored="HUP") as up:
        up.wait_for("Outrider is up", "hello from verify")
        up.process.send_signal(signal.SIGHUP)
        os.kill(up.processes("verify")[0], signal.SIGKILL)
        up.wait_for("outrider: verify serves again")
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(20) == 0


def test_up_ends_when_nobody_reads_what_it_prints_as_at_the_end_of_a_terminal(tmp_path: Path, model_path: Path) -> None:
    reader, writer = os.pipe()
    with Up(tmp_path, model_path, output=writer) as up, open(reader) as output:
        os.close(writer)
        numbers = {}
        for line in output:
            if found := re.search(r"hello from (\w+), .*process (\d+)\n", line):
                numbers[found[1]] = int(found[2])
            if len(numbers) == 3 and line.startswith("  metrics of gateway"):
                break
        output.close()
        os.kill(numbers["verify"], signal.SIGKILL)  # which `up` has to report
        assert up.process.wait(20) == 0
        assert not any(map(is_alive, numbers.values()))
        assert "Traceback" not in up.text


def test_up_ends_its_services_also_where_nobody_reads_what_it_prints_any_more(tmp_path: Path, model_path: Path) -> None:
    reader, writer = os.pipe()
    with Up(tmp_path, model_path, output=writer) as up, open(reader) as output:
        for line in output:
            if line.startswith("  metrics of gateway"):
                break
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * 4096)
        os.set_blocking(writer, True)
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(20) == 0
        os.close(writer)


def test_a_service_that_fails_to_start_ends_the_command_with_its_words(tmp_path: Path, model_path: Path) -> None:
    with Up(tmp_path, model_path, FAKE_VERIFY="broken") as up:
        assert up.process.wait(20) == 1
        assert "outrider: error: verify ended at its start (exit code 3)." in up.text
        assert "    the flux is not compensated" in up.text and "Traceback" not in up.text
        assert not any(map(is_alive, up.processes("draft")))


def test_a_taken_port_ends_the_command_with_the_options_that_choose_others(tmp_path: Path, model_path: Path) -> None:
    with Up(tmp_path, model_path, FAKE_DRAFT="taken") as up:
        assert up.process.wait(20) == 1
        assert "--draft-metrics-address" in up.text and "--rest-address" in up.text


def test_up_without_an_output_says_where_it_can_what_failed(tmp_path: Path, model_path: Path) -> None:
    with Up(tmp_path, model_path, closed="1>&-", FAKE_VERIFY="broken") as up:
        assert up.process.wait(20) == 1
        assert "    the flux is not compensated" in up.text and "Traceback" not in up.text
