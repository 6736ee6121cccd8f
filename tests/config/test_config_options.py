"""Options come from flags, environment and defaults, in that order, and what is wrong is explained."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config.base import (
    MAX_WHOLE,
    describe_options,
    option,
    options_to_argv,
    options_to_env,
    parse_options,
)
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError

FOLDER = Path("models")


@dataclass(frozen=True)
class Options:
    """Options of a test; 100% made up."""

    host: str = option("127.0.0.1", "Address to bind.")
    max_requests: int = option(1024, "Requests open at once.", minimum=1, maximum=4096)
    fraction: float = option(0.5, "A share, at most 100%.", minimum=0, maximum=1)
    match_type: str = option("BFS", "How to match.", choices=("BFS", "PROB"))
    draft: tuple[str, ...] = option((), "Addresses of drafts.")
    no_speculation: bool = option(False, "Plain decoding.")
    overlap: bool = option(True, "On unless turned off.")
    seed: int | None = option(None, "Seed.")
    model_path: Path = option(FOLDER, "Folder of the model.")
    auth_token: str = option("", "Bearer token.", secret=True)


def parse(*argv: str, **env: str) -> Options:
    return parse_options(Options, argv, prog="test", env=env)


def problem(*argv: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, **env)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_anything_the_defaults_hold() -> None:
    assert parse() == Options()


def test_a_flag_beats_the_environment_and_that_the_default() -> None:
    env = {"OUTRIDER_MAX_REQUESTS": "7", "OUTRIDER_HOST": "h", "OUTRIDER_NO_SPECULATION": "yes"}
    assert parse("--max-requests", "5", **env) == Options(max_requests=5, host="h", no_speculation=True)
    assert parse("--no-speculation=false", **env).no_speculation is False


def test_each_type_is_read() -> None:
    options = parse(
        "--fraction=1e-1", "--match-type", "PROB", "--draft", " a:1, b:2,,", "--no-speculation", "--overlap=off",
        "--seed", "-5", "--model-path", "~/m",
    )  # fmt: skip
    assert options == Options(
        fraction=0.1, match_type="PROB", draft=("a:1", "b:2"), no_speculation=True, overlap=False, seed=-5,
        model_path=Path.home() / "m",
    )  # fmt: skip


def test_empty_text_is_none_where_none_is_legal_and_unset_where_nothing_else_is() -> None:
    assert parse("--seed=", OUTRIDER_SEED="4").seed is None
    assert parse(OUTRIDER_SEED="", OUTRIDER_MAX_REQUESTS="", OUTRIDER_HOST="", OUTRIDER_OVERLAP="") == Options(host="")
    assert "--max-requests: '' is not a whole number" in problem("--max-requests=")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-requests", "0"], "--max-requests: '0' is below the minimum 1; use 1 or more"),
        (["--max-requests", "9999"], "--max-requests: '9999' is above the maximum 4096; use 4096 or less"),
        (["--max-requests", "3.5"], "'3.5' is not a whole number; use a whole number from 1 to 4096"),
        (["--fraction", "nan"], "--fraction: 'nan' is not a finite number; use a number from 0 to 1"),
        (["--fraction", "inf"], "'inf' is not a finite number"),
        (["--match-type", "bsf"], "--match-type: 'bsf' is not one of BFS, PROB; did you mean BFS?"),
        (["--no-speculation=perhaps"], "'perhaps' is not true or false; use --no-speculation or --no-speculation=fals"),
        (["--max-request", "4"], "unknown option --max-request; did you mean --max-requests?"),
        (["--max_request=4"], "unknown option --max_request; did you mean --max-requests?"),
        (["--zzz"], "unknown option --zzz; see --help"),
        (["stray"], "unexpected argument 'stray'"),
        (["--seed"], "--seed: expected one argument; see --help"),
        (["--seed", "x"], "--seed: 'x' is not a whole number"),
    ],
)
def test_what_is_wrong_names_option_value_limit_and_fix(argv: list[str], words: str) -> None:
    assert words in problem(*argv)


def test_a_wrong_environment_names_the_variable() -> None:
    assert "OUTRIDER_FRACTION (environment): '2' is above the maximum 1" in problem(OUTRIDER_FRACTION="2")


def test_the_own_command_line_ends_the_process_as_argparse_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prog", "--max-requests", "0"])
    with pytest.raises(SystemExit) as caught:
        parse_options(Options, prog="python -m test", env={})
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("python -m test: error: --max-requests: '0' is below")


def test_help_tells_defaults_limits_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "100% made up" in text
    assert "At most 4096. Default: 1024. Environment: OUTRIDER_MAX_REQUESTS." in text
    assert "One of BFS, PROB. Default: BFS." in text


def test_the_reference_table_has_a_row_per_option() -> None:
    rows = describe_options(Options)
    assert [row.env for row in rows] == ["OUTRIDER_" + field.name.upper() for field in fields(Options)]
    row = rows[1]
    assert (row.flag, row.default_text) == ("--max-requests", "1024")
    assert row.help_text == "Requests open at once. At least 1. At most 4096."


def test_a_secret_stays_off_command_lines_tables_and_reprs() -> None:
    options = Options(auth_token="s3cret")
    assert "s3cret" not in repr(options)
    assert "s3cret" not in "".join(options_to_argv(options))
    assert options_to_env(options) == {"OUTRIDER_AUTH_TOKEN": "s3cret"}
    assert parse_options(Options, options_to_argv(options), env=options_to_env(options)) == options


plain_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
list_items = plain_text.map(lambda text: text.replace(",", "").strip()).filter(bool)


@settings(max_examples=examples(30))
@given(
    st.builds(
        Options,
        host=plain_text,
        max_requests=st.integers(1, 4096),
        fraction=st.floats(0, 1),
        match_type=st.sampled_from(["BFS", "PROB"]),
        draft=st.lists(list_items).map(tuple),
        no_speculation=st.booleans(),
        overlap=st.booleans(),
        seed=st.none() | st.integers(max_value=MAX_WHOLE),
        model_path=st.lists(st.from_regex(r"[a-z. -]{1,5}", fullmatch=True)).map(lambda parts: Path(*parts)),
    )
)
def test_a_child_process_gets_the_same_options_whatever_its_environment(options: Options) -> None:
    hostile = {row.env: "1" for row in describe_options(Options) if row.env != "OUTRIDER_AUTH_TOKEN"}
    assert parse_options(Options, options_to_argv(options), env=hostile) == options


@given(st.lists(plain_text, max_size=4))
def test_no_command_line_raises_anything_but_a_config_error(argv: list[str]) -> None:
    if any(part.split("=")[0] in ("--help", "-h") or part.startswith("-h") for part in argv):
        return
    try:
        parse(*argv)
    except ConfigError as error:
        assert error.message


@given(st.sampled_from([field.name for field in fields(Options)]), plain_text)
def test_any_text_for_an_option_is_taken_or_explained(name: str, text: str) -> None:
    flag = "--" + name.replace("_", "-")
    try:
        parse(f"{flag}={text}")
    except ConfigError as error:
        assert flag in error.message


def test_a_list_that_a_command_line_cannot_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--draft: 'a,b' cannot be part"):
        options_to_argv(Options(draft=("a,b",)))


def test_a_mistake_in_a_declaration_is_found_at_once() -> None:
    @dataclass(frozen=True)
    class Wrong:
        names: Any = option("", "A type without a text form.")

    with pytest.raises(TypeError, match="names"):
        parse_options(Wrong, [])


def test_services_inherit_the_common_options() -> None:
    @dataclass(frozen=True)
    class Service(ServiceOptions):
        address: str = option("127.0.0.1:5", "Door.")
        width: int = option(3, "Width.", minimum=1)

    options = parse_options(Service, ["--width", "4", "--drain-seconds", "0"], env={})
    assert (options.address, options.width, options.drain_seconds) == ("127.0.0.1:5", 4, 0.0)


def test_options_import_neither_torch_nor_grpc() -> None:
    script = "import sys, outrider.config.service; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
