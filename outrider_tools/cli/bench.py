"""`outrider bench`: a load generator for a running gateway. See docs/tools.md."""

from __future__ import annotations

import argparse
import asyncio
import math
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from outrider.cli.options import MAX_SEED, add_connect_tls_options, number, whole_number
from outrider.cli.terminal import aligned, make_console
from outrider.config.base import expand
from outrider.config.service import TlsFiles, gateway_key, peer_tls
from outrider.errors import ConfigError, UnavailableError, count_of
from outrider.metrics import MetricsPage
from outrider.rpc.tls import client_context
from outrider.rpc.transport import is_http_url
from outrider_tools.bench.clients import Client, GrpcClient, RequestOptions, RestClient, first_answer, run_point
from outrider_tools.bench.report import Row, cpu_name, draw, require_matplotlib, write_report
from outrider_tools.bench.requests import (
    LoadPoint,
    LoadRun,
    Prompt,
    errors_of,
    random_prompts,
    read_prompts,
    rows_of,
)
from outrider_tools.files import check_writable, writing

DEFAULT_PROMPTS = 64
MAX_CONCURRENCY = 4096


def _rates(text: str) -> list[float]:
    one = number(1e-3, 1e6)
    return [math.inf if part.strip() == "inf" else one(part.strip()) for part in text.split(",")]


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    group = parser.add_argument_group("the gateway")
    group.add_argument(
        "--backend",
        choices=("grpc", "openai", "openai-chat"),
        default="grpc",
        help="API to call: gRPC (the default), /v1/completions, or /v1/chat/completions.",
    )
    group.add_argument(
        "--connect", default="127.0.0.1:50051", help="Address of the gRPC door. Default: 127.0.0.1:50051."
    )
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", help="URL of the REST door. Default: http://127.0.0.1:8000."
    )
    group.add_argument(
        "--metrics-url",
        default="",
        help="The gateway's metrics page, for acceptance by depth where the answers do not have it. Default: the REST "
        "door's.",
    )
    group.add_argument("--api-key-file", type=expand, help="File with the API key. Default: $OUTRIDER_API_KEY.")
    add_connect_tls_options(group)
    group.add_argument("--model", default="", help="Name of the model. Default: the served one.")

    group = parser.add_argument_group("the load")
    group.add_argument(
        "--num-prompts",
        type=whole_number(1, 10_000_000),
        help=f"Requests per point. Default: {DEFAULT_PROMPTS}, or no limit with --duration.",
    )
    group.add_argument(
        "--duration",
        type=number(0.1, 1e6),
        default=0.0,
        help="Seconds of each point: no request begins later, and what arrives later does not count for throughput.",
    )
    group.add_argument(
        "--max-concurrency",
        type=lambda text: [whole_number(1, MAX_CONCURRENCY)(part.strip()) for part in text.split(",")],
        help="Most requests at once; several values, comma separated, are measured one after the other. Default: all "
        "of them.",
    )
    group.add_argument(
        "--request-rate",
        type=_rates,
        default=[math.inf],
        help="Requests per second, however long answers take; several values, comma separated. Default: inf, a closed "
        "loop.",
    )
    group.add_argument(
        "--burstiness",
        type=number(0.01, 1000),
        default=1.0,
        help="Burstiness of arrivals: 1 (the default) is a Poisson process, less means bursts, more means more even.",
    )
    group.add_argument(
        "--num-warmups",
        type=whole_number(0, 100_000),
        default=8,
        help="Requests sent before all points and not counted, since the first wait for one-time work. Default: 8.",
    )
    group.add_argument(
        "--timeout", type=number(0.1, 86400), default=600.0, help="Most seconds that a request may take. Default: 600."
    )
    group.add_argument(
        "--seed", type=whole_number(0, MAX_SEED), default=0, help="Seed of prompts and arrivals. Default: 0."
    )

    group = parser.add_argument_group("the prompts")
    group.add_argument(
        "--dataset-path",
        type=expand,
        help="JSONL file of objects with prompt, turns, messages or prompt_token_ids, and optionally max_tokens. At "
        "its end it is read again from the start. By default prompts are random token ids.",
    )
    tokens = whole_number(1, 1 << 20)
    group.add_argument("--random-input-len", type=tokens, default=128, help="Tokens of a random prompt. Default: 128.")
    group.add_argument(
        "--random-output-len",
        type=tokens,
        default=128,
        help="Most tokens of an answer, also with --dataset-path. Default: 128.",
    )
    group.add_argument(
        "--random-range-ratio",
        type=number(0, 0.999),
        default=0.0,
        help="Random lengths differ by up to this share, up or down. Default: 0.",
    )
    group.add_argument(
        "--random-vocab-size",
        type=whole_number(1, 1 << 24),
        default=10000,
        help="Random token ids are below this number, and above 255 if it is over 512. Default: 10000.",
    )
    group.add_argument("--raw", action="store_true", help="Over gRPC, send texts as they are, not as a user's turn.")

    group = parser.add_argument_group("the answers")
    group.add_argument(
        "--temperature", type=number(0, 2), default=0.0, help="Sampling temperature. Default: 0, greedy."
    )
    group.add_argument("--top-p", type=number(1e-6, 1), help="By default, the server's.")
    group.add_argument("--top-k", type=whole_number(0, 1 << 24), help="By default, the server's.")
    group.add_argument("--sampling-seed", type=whole_number(0, MAX_SEED), help="Seed of every request. Default: none.")
    group.add_argument("--ignore-eos", action="store_true", help="Continue every answer to its most tokens.")
    group.add_argument("--plain", action="store_true", help="Ask for plain decoding, without speculation.")

    group = parser.add_argument_group("the report")
    group.add_argument("--out", type=expand, help="JSON file to write the report to.")
    group.add_argument("--plot", type=expand, help="Image file for a plot; needs matplotlib.")
    group.add_argument("--label", default="gateway", help="First words of each case: model, drafter, mode.")
    group.add_argument(
        "--device-name", default="", help="Name of the device that the services run on. Default: this processor."
    )
    group.add_argument("--save-detailed", action="store_true", help="Also write every request's figures to --out.")


def points_of(arguments: argparse.Namespace) -> list[LoadPoint]:
    """Return the loads to measure: every rate with every concurrency. Raises ConfigError."""
    rates: list[float] = arguments.request_rate
    concurrencies: list[int] = arguments.max_concurrency or [0]
    if concurrencies == [0] and any(map(math.isinf, rates)) and arguments.num_prompts is None and arguments.duration:
        raise ConfigError("--max-concurrency: not set; with --duration a closed loop needs it, or set --request-rate")
    count = arguments.num_prompts
    if count is None:
        count = 0 if arguments.duration else DEFAULT_PROMPTS
    return [
        LoadPoint(
            concurrency=most,
            rate=rate,
            burstiness=arguments.burstiness,
            num_prompts=count,
            seconds=arguments.duration,
            timeout=arguments.timeout,
            seed=arguments.seed,
        )
        for rate in rates
        for most in concurrencies
    ]


TIMED_PROMPTS = 4096
"""Number of random prompts of a point that only time limits; after the last one the first one follows."""
PACKAGES = ("outrider", "grpcio", "httpx2")
_SHOWN = (
    ("requests_per_second", "", "req/s", 2),
    ("tokens_per_second", "", "tok/s", 1),
    ("ttft_ms_p50", "ttft", "p50", 0),
    ("ttft_ms_p99", "ttft", "p99", 0),
    ("itl_ms_mean", "itl", "mean", 1),
    ("itl_ms_p50", "itl", "p50", 1),
    ("itl_ms_p90", "itl", "p90", 1),
    ("itl_ms_p99", "itl", "p99", 1),
    ("e2e_ms_p50", "e2e", "p50", 0),
    ("e2e_ms_p99", "e2e", "p99", 0),
    ("accept_length", "", "accept", 2),
    ("failed", "", "failed", 0),
)
"""Metrics of the table: name, the two lines of the heading, and digits."""


def run(arguments: argparse.Namespace) -> int:
    """Measure every point. Return exit code 1 if a request failed."""
    if arguments.plot is not None:
        require_matplotlib(arguments.plot)
    for option, path in (("--out", arguments.out), ("--plot", arguments.plot)):
        if path is not None:
            check_writable(option, path)
    console = make_console(color=not arguments.no_color, stderr=True)
    points = points_of(arguments)
    rows, runs = asyncio.run(_measure(arguments, points, console))
    device = arguments.device_name or cpu_name()
    print(table_of(rows))
    for one in runs:
        for code, count in errors_of(one.records).items():
            detail = next(record.detail for record in one.records if record.error == code)
            console.print(f"outrider: {count_of(count, 'request')} failed with {code}: {detail}", soft_wrap=True)
    if arguments.out is not None:
        more: dict[str, Any] = {}
        if arguments.save_detailed:
            more["requests"] = [[record.as_dict() for record in one.records] for one in runs]
        command = ["outrider", *sys.argv[1:]]
        with writing("--out", arguments.out):
            write_report(arguments.out, "bench", device, rows, PACKAGES, command=command, more=more)
    if arguments.plot is not None:
        draw(rows, arguments.plot, f"{arguments.label}: {device}")
    return 1 if any(errors_of(one.records) for one in runs) else 0


async def _measure(
    arguments: argparse.Namespace, points: Sequence[LoadPoint], console: Console
) -> tuple[list[Row], list[LoadRun]]:
    """Measure all points, one after the other, with one client."""
    key = gateway_key(arguments)
    files = peer_tls(arguments, "connect")
    tls = client_context(files) if files else None
    client = _client(arguments, key, files, tls)
    rows: list[Row] = []
    runs: list[LoadRun] = []
    try:
        warm = _prompts(arguments, max(1, arguments.num_warmups), "warm-up")
        option, url = ("--connect", "") if arguments.backend == "grpc" else ("--base-url", arguments.base_url)
        first = replace(warm[0], max_tokens=min(4, warm[0].max_tokens))
        await first_answer(client, first, arguments.timeout, option, url)
        if arguments.num_warmups:
            console.print(f"warming up, not measured: {count_of(arguments.num_warmups, 'request')}")
            most = max(1, min(arguments.num_warmups, max(point.concurrency for point in points) or 8))
            await run_point(client, warm, LoadPoint(concurrency=most, num_prompts=arguments.num_warmups))
        for place, point in enumerate(points):
            case = case_of(arguments, point)
            console.print(f"measuring {case}")
            prompts = _prompts(arguments, point.num_prompts or TIMED_PROMPTS, str(place))
            before = await _page(arguments, key, tls, console)
            one = await run_point(client, prompts, point, lambda so_far: _print_progress(console, so_far))
            after = await _page(arguments, key, tls, console)
            gained = after.since(before) if before is not None and after is not None else None
            rows += rows_of(one, case, gained)
            runs.append(one)
    finally:
        await client.close()
    return rows, runs


def _client(arguments: argparse.Namespace, key: str, files: TlsFiles | None, tls: ssl.SSLContext | None) -> Client:
    ask = RequestOptions(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.sampling_seed,
        ignore_eos=arguments.ignore_eos,
        speculation=not arguments.plain,
        model=arguments.model,
        chat=arguments.backend != "openai" and not arguments.raw,
    )
    if arguments.backend == "grpc":
        return GrpcClient(arguments.connect, ask, key, files)
    if not is_http_url(arguments.base_url):
        raise ConfigError(f"--base-url: {arguments.base_url!r} is no URL; write it like http://127.0.0.1:8000")
    return RestClient(arguments.base_url, ask, key, tls or True, arguments.timeout)


def _prompts(arguments: argparse.Namespace, count: int, part: str) -> list[Prompt]:
    """Return prompts. Random ones differ from part to part of a run, so that none is in the radix cache already."""
    if arguments.dataset_path is not None:
        return read_prompts(arguments.dataset_path, arguments.random_output_len)
    return random_prompts(
        count,
        f"{arguments.seed} {part}",
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        vocab_size=arguments.random_vocab_size,
        spread=arguments.random_range_ratio,
    )


async def _page(
    arguments: argparse.Namespace, key: str, tls: ssl.SSLContext | None, console: Console
) -> MetricsPage | None:
    """Read the gateway's metrics page; None if it was not named and the backend is gRPC, or if it cannot be read."""
    url = arguments.metrics_url
    if not url and arguments.backend != "grpc":
        url = arguments.base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    if not url:
        return None
    try:
        return await asyncio.to_thread(MetricsPage.read, url, token=key, tls=tls)
    except UnavailableError as error:
        console.print(f"outrider: no acceptance by depth from the metrics page: {error.message}", soft_wrap=True)
        return None


def case_of(arguments: argparse.Namespace, point: LoadPoint) -> str:
    """Return a point as words: label, load, decoding."""
    words = [arguments.label]
    words += [f"b{point.concurrency}"] if point.concurrency else []
    words += [] if math.isinf(point.rate) else [f"rate{point.rate:g}"]
    temperature = arguments.temperature
    words.append("greedy" if temperature == 0 else f"t{temperature:g}")
    return " ".join([*words, *(["plain"] if arguments.plain else [])])


def _print_progress(console: Console, so_far: LoadRun) -> None:
    done = sum(1 for record in so_far.records if record.end)
    failed = sum(errors_of(so_far.records).values())
    if console.is_terminal or round(so_far.window) % 10 == 0:
        console.print(
            f"  {so_far.window:5.0f} s: {done} done, {len(so_far.records) - done} under way, {failed} failed".ljust(60),
            end="\r" if console.is_terminal else "\n",
        )


def table_of(rows: Sequence[Row]) -> str:
    """Return the most important figures as a table of at most 80 columns, each case below its name. Times are in ms."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.metric] = row.value
    cells = [[above for _, above, _, _ in _SHOWN], [title for _, _, title, _ in _SHOWN]]
    cells += [
        [f"{found[name]:.{digits}f}" if name in found else "" for name, _, _, digits in _SHOWN]
        for found in cases.values()
    ]
    above, titles, *figures = aligned(cells, right=range(len(_SHOWN)), gap=" ").splitlines()
    named = [line for pair in zip(cases, figures, strict=True) for line in pair]
    heads = ["times in ms: ttft to the first token, itl between tokens, e2e to the end;"]
    heads.append("accept: tokens committed in a round, on average")
    return "\n".join([*heads, above, titles, *named])
