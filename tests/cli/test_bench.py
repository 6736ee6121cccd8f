from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from raw_server import raw_server

from outrider.cli.cluster import Cluster
from outrider.cli.main import main
from outrider.errors import ConfigError, OutriderError
from outrider.metrics import Histogram, MetricsPage
from outrider.protocol.generation import TokenOrigin
from outrider_tools.bench.clients import Clock, GrpcClient, RequestOptions, RestClient, first_answer, run_point
from outrider_tools.bench.report import Row, draw, load_text, points_of
from outrider_tools.bench.requests import (
    LoadPoint,
    LoadRun,
    Prompt,
    RequestRecord,
    acceptance,
    arrivals,
    errors_of,
    random_prompts,
    read_prompts,
    rows_of,
    spread_of,
)
from outrider_tools.cli.bench import table_of

pytestmark = pytest.mark.xdist_group("live")

LENGTHS = {"input_len": 12, "output_len": 24, "vocab_size": 61}
SHAPE = ["--random-vocab-size=61", "--random-input-len=12", "--random-output-len=24", "--ignore-eos"]


def values(rows: list[Row], metric: str) -> list[float]:
    return [row.value for row in rows if row.metric == metric]


def test_percentiles_are_values_below_which_that_share_of_the_weight_lies() -> None:
    assert spread_of([(float(value), 1) for value in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }
    weighted = spread_of([(1.0, 9), (2.0, 1)])
    assert (weighted["p50"], weighted["p90"], weighted["p99"]) == (1.0, 1.0, 2.0)
    assert spread_of([]) == {}


def test_origins_tell_rounds_and_depths_apart() -> None:
    record = RequestRecord(due=0.0)
    record.take_origins([TokenOrigin.PLAIN, TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED])
    record.take_origins([TokenOrigin.BONUS, TokenOrigin.BONUS, TokenOrigin.PLAIN, TokenOrigin.ACCEPTED])
    record.finish(1.0)
    assert record.accepted_at == {1: 2, 2: 1}
    assert record.drafted_rounds == 3, "two that ended with a bonus token, one that a limit cut"


def test_tokens_of_one_message_share_its_time_and_later_ones_do_not_count_for_throughput() -> None:
    record = RequestRecord(due=1.0, prompt_tokens=3)
    for at, count in ((2.0, 1), (4.0, 4), (11.0, 1)):
        record.take(at, count)
    record.finish(11.0)
    rows = list(rows_of(LoadRun([record], window=10.0), "case"))
    assert values(rows, "tokens_per_second") == [0.5] and values(rows, "requests_per_second") == [0.0]
    assert values(rows, "ttft_ms_p50") == [1000.0] and values(rows, "itl_ms_p50") == [500.0]
    assert values(rows, "message_gap_ms_max") == [7000.0] and values(rows, "tpot_ms_p50") == [1800.0]
    assert values(rows, "e2e_ms_p50") == [10000.0]


def test_arrivals_are_repeatable_and_come_at_their_rate() -> None:
    def first(count: int, seed: int, burstiness: float = 1.0) -> list[float]:
        schedule = arrivals(4.0, burstiness, seed)
        return [next(schedule) for _ in range(count)]

    assert first(50, 1) == first(50, 1) != first(50, 2)
    assert first(4001, 1)[-1] == pytest.approx(1000, rel=0.1)

    def unevenness(times: list[float]) -> float:
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    assert unevenness(first(4000, 1)) == pytest.approx(1.0, rel=0.15), "a Poisson process"
    assert unevenness(first(4000, 1, 100.0)) < 0.2 < 2 < unevenness(first(4000, 1, 0.1))


def test_random_prompts_are_repeatable_within_their_lengths_and_differ() -> None:
    draw = partial(random_prompts, 50, input_len=100, output_len=10, vocab_size=1000, spread=0.5)
    prompts = draw("1")
    assert prompts == draw("1") != draw("2")
    assert {len(prompt.token_ids) for prompt in prompts} <= set(range(50, 151))
    assert len({prompt.token_ids[:4] for prompt in prompts}) == 50
    assert all(min(prompt.token_ids) >= 256 and max(prompt.token_ids) < 1000 for prompt in prompts)


def test_prompts_are_read_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, object]] = [
        {"prompt": "one"},
        {"turns": ["two", "more"], "max_tokens": 3},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "three"}]},
        {"prompt_token_ids": [1, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(path, 9) == [
        Prompt(9, text="one"),
        Prompt(3, text="two"),
        Prompt(9, text="three", system="be"),
        Prompt(9, token_ids=(1, 2)),
    ]


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", "{}", '{"prompt": ""}', '{"prompt_token_ids": [-1]}', '{"turns": []}']
)
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"--dataset-path: .*, line 2: "):
        read_prompts(path, 9)


def test_what_a_line_is_to_be_written_as_is_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("[]")
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, 9)
    path.write_text(caught.value.message.rpartition("write it as ")[2])
    assert read_prompts(path, 9) == [Prompt(9, text="text")]


def test_a_home_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="names a home that does not exist"):
        read_prompts(Path("~nobody-of-this-name/prompts.jsonl"), 9)


async def test_both_doors_count_the_same_tokens_and_the_page_agrees_on_acceptance(live: Cluster) -> None:
    prompts = random_prompts(6, "doors", **LENGTHS)
    ask = RequestOptions(ignore_eos=True)
    for client in (GrpcClient(live.gateway_address, ask), RestClient(live.rest_url, ask)):
        before = MetricsPage.read(live.metrics_url("gateway"))
        run = await run_point(client, prompts, LoadPoint(concurrency=3, num_prompts=6))
        page = MetricsPage.read(live.metrics_url("gateway")).since(before)
        await client.close()
        assert not errors_of(run.records), run.records[0].detail
        assert [record.tokens for record in run.records] == [24] * 6
        assert [record.prompt_tokens for record in run.records] == [12] * 6
        assert sum(record.rounds for record in run.records) == page.total("outrider_gateway_rounds")
        reported, counted = acceptance(run.records, page), acceptance([], page)
        assert reported is not None and counted is not None
        # The page knows depths that earlier requests reached, too.
        depths = reported.at_depth.keys() | counted.at_depth.keys()
        assert all(reported.at_depth.get(depth, 0.0) == counted.at_depth.get(depth, 0.0) for depth in depths)
        assert reported.at_depth[1] > 0
        reports_origins = acceptance(run.records, None) == reported
        assert reports_origins == isinstance(client, GrpcClient)


def test_the_page_tells_what_rounds_committed_where_an_accepted_token_ended_one() -> None:
    counters = {"outrider_gateway_rounds": 2.0, "vllm:spec_decode_num_accepted_tokens": 2.0}
    lengths = {"outrider_gateway_accept_length": Histogram(total=3, count=2, bounds={})}
    found = acceptance([], MetricsPage(counters=counters, histograms=lengths))
    assert found is not None and found.accept_length == 1.5


async def test_an_open_loop_sends_when_requests_are_due(live: Cluster) -> None:
    client = GrpcClient(live.gateway_address, RequestOptions(ignore_eos=True))
    point = LoadPoint(rate=200.0, num_prompts=10, seed=3)
    run = await run_point(client, random_prompts(10, "open", **LENGTHS), point)
    await client.close()
    schedule = arrivals(200.0, 1.0, 3)
    assert [record.due for record in run.records] == [next(schedule) for _ in range(10)]
    assert not errors_of(run.records)


@pytest.mark.parametrize("door", ["grpc", "rest"])
async def test_failures_are_counted_by_code(live: Cluster, door: str) -> None:
    client = (
        GrpcClient(live.gateway_address, RequestOptions())
        if door == "grpc"
        else RestClient(live.rest_url, RequestOptions())
    )
    run = await run_point(
        client, [Prompt(4, token_ids=(99,)), Prompt(4, token_ids=(9,))], LoadPoint(concurrency=1, num_prompts=4)
    )
    await client.close()
    assert sum(errors_of(run.records).values()) == 2
    rows = list(rows_of(run, "case"))
    assert values(rows, "failed") == [2] and values(rows, "failed_invalid_value") == [2]


@pytest.mark.parametrize("code", ["peer_refused_credentials", "invalid_api_key"])
async def test_a_key_that_is_missing_is_told_by_its_name(code: str) -> None:
    class Refused:
        async def send(self, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
            record.finish(clock(), code, "missing or wrong")

        async def close(self) -> None: ...

    with pytest.raises(OutriderError, match="missing or wrong; set OUTRIDER_API_KEY or --api-key-file"):
        await first_answer(Refused(), Prompt(4, token_ids=(9,)), 5, "--connect")


@pytest.mark.parametrize(
    ("backend", "option"), [("grpc", "--connect"), ("openai", "--base-url"), ("openai-chat", "--base-url")]
)
def test_a_gateway_that_is_not_there_is_told_with_the_option_that_names_it(
    backend: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = ["--connect=127.0.0.1:1", "--base-url=http://127.0.0.1:1"]
    assert main(["bench", f"--backend={backend}", *nowhere, "--num-prompts=1"]) == 1
    assert f"; {option} names the gateway (`outrider up` prints its doors)" in capsys.readouterr().err


async def test_a_gateway_that_is_gone_is_an_error_of_each_request() -> None:
    for client in (GrpcClient("127.0.0.1:1", RequestOptions()), RestClient("http://127.0.0.1:1", RequestOptions())):
        run = await run_point(client, [Prompt(4, token_ids=(9,))], LoadPoint(concurrency=1, num_prompts=2, timeout=20))
        await client.close()
        assert sum(errors_of(run.records).values()) == 2


@pytest.mark.parametrize(("last", "error"), [("data: [DONE]\n\n", ""), ("", "incomplete")])
async def test_a_stream_is_complete_with_its_last_event_alone(last: str, error: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head.lower())
        # What is left unread when a connection is closed resets it.
        await reader.readexactly(int(length))
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        writer.write(f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps({'usage': usage})}\n\n{last}".encode())

    async with raw_server(answer) as address:
        client, record = RestClient(f"http://{address}", RequestOptions()), RequestRecord(due=0.0)
        await client.send(Prompt(4, token_ids=(9,)), record, asyncio.get_running_loop().time)
        await client.close()
    assert (record.tokens, record.error) == (2, error)


def test_the_command_writes_a_report_in_the_common_form(live: Cluster, tmp_path: Path) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    command = ["bench", f"--connect={live.gateway_address}", *SHAPE, "--num-prompts=6", "--max-concurrency=1,3"]
    command += ["--num-warmups=2", "--label=tiny ngram split", f"--out={out}", f"--plot={plot}", "--save-detailed"]
    assert main(command) == 0
    report = json.loads(out.read_text())
    assert {"benchmark", "device", "host", "commit", "date", "command", "versions", "rows"} <= set(report)
    rows = [Row(**row) for row in report["rows"]]
    assert {row.case for row in rows} == {"tiny ngram split b1 greedy", "tiny ngram split b3 greedy"}
    assert values(rows, "completion_tokens") == [144, 144]
    assert values(rows, "cached_prompt_tokens") == [0, 0], "no part finds another one's prompts in the cache"
    assert all(values(rows, f"{name}_p99") for name in ("ttft_ms", "itl_ms", "e2e_ms"))
    assert [len(part) for part in report["requests"]] == [6, 6]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_request_is_told_at_once(live: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"--connect={live.gateway_address}", "--random-vocab-size=99999"]) == 1
    assert "the first request failed: invalid_value" in capsys.readouterr().err


def test_a_time_without_a_load_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--duration=1"]) == 2
    assert "--max-concurrency: not set" in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--connect=127.0.0.1:1", "--plot=x.png"]) == 2
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw([], Path("x.png"), "")


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_report_that_cannot_be_written_is_told_before_anything_runs(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider_tools.cli.bench.require_matplotlib", lambda path: None)
    assert main(["bench", "--connect=127.0.0.1:1", option, str(tmp_path)]) == 2
    assert f"{option}: {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


def test_a_run_that_fails_leaves_no_report(tmp_path: Path) -> None:
    assert main(["bench", "--connect=127.0.0.1:1", f"--out={tmp_path}/bench.json"]) == 1
    assert not list(tmp_path.iterdir())
    earlier = tmp_path / "earlier.json"
    earlier.write_text("kept")
    assert main(["bench", "--connect=127.0.0.1:1", f"--out={earlier}"]) == 1
    assert earlier.read_text() == "kept"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://localhost", "http://", "http://[", "http://a:b"])
def test_a_base_url_that_is_none_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend=openai", f"--base-url={url}"]) == 2
    assert f"--base-url: {url!r} is no URL; write it like http://127.0.0.1:8000" in capsys.readouterr().err


def test_the_table_fits_80_columns_and_a_pipe() -> None:
    names = ("requests_per_second", "tokens_per_second", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99", "e2e_ms_p99")
    rows = [Row("llama-8b eagle3 split b64 greedy", name, 12345.678, "") for name in names]
    rows += [Row("llama-8b eagle3 split b1 greedy", "accept_length", 3.25, "")]
    lines = table_of(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "times in ms: ttft to the first token, itl between tokens, e2e to the end;"
    assert lines[1] == "accept: tokens committed in a round, on average"
    del lines[0]
    assert lines[2].split()[:4] == ["req/s", "tok/s", "p50", "p99"] and lines[2].split()[-2:] == ["accept", "failed"]
    assert lines[3] == "llama-8b eagle3 split b64 greedy" and lines[4].split()[:2] == ["12345.68", "12345.7"]
    assert lines[5] == "llama-8b eagle3 split b1 greedy" and lines[6].split() == ["3.25"]


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--plot: .*/file/x\.png cannot be written: "):
        draw([], tmp_path / "file" / "x.png", "")


def test_plots_have_a_tick_for_each_load() -> None:
    loads = [("b", 0.0), ("b", 8.0), ("rate", 2.5)]
    assert [load_text(*load, with_kind=False) for load in loads] == ["all", "8", "2.5"]
    assert load_text("rate", 2.5, with_kind=True) == "rate2.5"


def test_plots_order_cases_by_load() -> None:
    rows = [Row(f"x b{size} greedy", "tokens_per_second", size * 10.0, "") for size in (8, 1)]
    assert [(kind, size) for kind, size, _ in points_of(rows)] == [("b", 1.0), ("b", 8.0)]
    assert points_of([Row("x b4 rate2.5 greedy", "failed", 0, "")])[0][:2] == ("rate", 2.5)


async def test_a_load_of_a_time_lasts_that_time_though_nothing_is_due_in_its_last_part(live: Cluster) -> None:
    client = GrpcClient(live.gateway_address, RequestOptions(ignore_eos=True))
    prompts = random_prompts(1, "window", **LENGTHS)
    run = await run_point(client, prompts, LoadPoint(rate=1e-3, seconds=300.0))
    few = await run_point(client, prompts, LoadPoint(rate=1e-3, seconds=300.0, num_prompts=1))
    await client.close()
    figures = {row.metric: row.value for row in rows_of(run, "case")}
    assert figures["seconds"] == 300.0 and figures["requests_per_second"] == 1 / 300
    assert few.window == few.records[0].end < 300


def test_a_plot_of_a_kind_that_is_not_drawn_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "--connect=127.0.0.1:1", "--plot=x.txt"]) == 2
    assert "--plot: x.txt: the kind of image is not known; end it with one of" in capsys.readouterr().err
