from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from gateway_world import World, open_world
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripted_verify import MODEL, QUEUE_SECONDS, ScriptedVerify

from gateway.core.answer import Delta
from gateway.core.metrics import AnswerMeter, GatewayMetrics
from outrider.protocol.generation import GenerationUpdate, RoundCounts

VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
}


async def page(world: World) -> str:
    response = await world.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_round_that_an_accepted_token_ends_has_no_bonus_token_in_its_accept_length() -> None:
    metrics = GatewayMetrics()
    meter = AnswerMeter(metrics, MODEL, SimpleNamespace(job=SimpleNamespace(arrived=0.0)))  # type: ignore[arg-type]
    chunk = GenerationUpdate(token_ids=(5, 6, 7), rounds=(RoundCounts(4, 1), RoundCounts(4, 1)))
    meter.chunk(chunk, Delta(0, (), (), chunk))
    found = values(generate_latest(metrics.registry).decode())
    assert found["outrider_gateway_accept_length_sum", ()] == 3
    assert found["outrider_gateway_accept_length_count", ()] == 2


async def test_metrics_tell_what_happened(world: World) -> None:
    verify = world.verify
    verify.round_size = 4
    token_ids = verify.set_answer("The capital of France is Paris")
    for stream in (False, True):
        await world.http.post("/v1/completions", json={"prompt": "x y z", "stream": stream})
    await world.http.post("/v1/completions", json={"prompt": "x", "n": 99})
    text = await page(world)
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {name: kinds.get(name) for name in VLLM} == VLLM
    found = values(text)
    generated = 2 * (len(token_ids) + 1)
    num_rounds = 2 * -(-(len(token_ids) + 1) // 4)
    assert found["vllm:generation_tokens_total", ()] == generated
    assert found["vllm:request_success_total", (("finished_reason", "stop"),)] == 2
    assert found["vllm:time_to_first_token_seconds_count", ()] == 2
    assert found["vllm:inter_token_latency_seconds_count", ()] == generated - 2
    parts = [found[f"vllm:request_{part}_time_seconds_sum", ()] for part in ("queue", "prefill", "decode")]
    assert parts[0] == 2 * QUEUE_SECONDS
    assert sum(parts) <= found["vllm:e2e_request_latency_seconds_sum", ()] + 1e-6
    assert found["vllm:spec_decode_num_drafts_total", ()] == num_rounds
    assert found["vllm:spec_decode_num_draft_tokens_total", ()] == 4 * num_rounds
    accepted = found["vllm:spec_decode_num_accepted_tokens_total", ()]
    assert accepted == generated - num_rounds
    positions = [v for (name, _), v in found.items() if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(positions) == accepted and positions == sorted(positions, reverse=True)
    assert found["outrider_gateway_accept_length_sum", ()] == generated
    assert found["outrider_gateway_accept_length_count", ()] == num_rounds
    assert found["outrider_gateway_errors_total", (("code", "invalid_value"), ("door", "rest"))] == 1
    assert found["vllm:num_requests_waiting", ()] == 3
    assert found["vllm:kv_cache_usage_perc", ()] == 0.25
    assert found["outrider_gateway_tokens_per_second", ()] == 12.5
    state = ("outrider_gateway_verify_state", (("replica", world.host.address), ("state", "ready")))
    assert found[state] == 1
    assert f'model_name="{MODEL}"' in text


async def test_load_generators_find_their_sums_by_the_beginning_of_a_name(world: World) -> None:
    world.verify.round_size = 3
    world.verify.set_answer("one two three four five")
    await world.http.post("/v1/completions", json={"prompt": "x"})
    lines = [line for line in (await page(world)).splitlines() if not line.startswith("#")]
    found = values("\n".join(lines) + "\n")
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos"):
        begin = f"vllm:spec_decode_{name}"
        # vLLM's own load generator adds up all lines that begin so.
        total = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin))
        assert total == sum(value for (full, _), value in found.items() if full == f"{begin}_total") > 0
    positions = [line for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos")]
    assert sorted(line.split('position="')[1].split('"')[0] for line in positions) == ["0", "1"]


async def test_a_scrape_does_not_wait_for_a_dead_verify_service(world: World) -> None:
    await world.host.stop()
    assert "vllm:num_requests_running" in await page(world)


SGLANG = {
    "sglang:num_running_reqs": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:token_usage": "gauge",
    "sglang:gen_throughput": "gauge",
    "sglang:cache_hit_rate": "gauge",
    "sglang:spec_accept_length": "gauge",
    "sglang:spec_accept_rate": "gauge",
    "sglang:prompt_tokens": "counter",
    "sglang:generation_tokens": "counter",
    "sglang:cached_tokens": "counter",
    "sglang:num_requests": "counter",
    "sglang:num_aborted_requests": "counter",
    "sglang:time_to_first_token_seconds": "histogram",
    "sglang:inter_token_latency_seconds": "histogram",
    "sglang:time_per_output_token_seconds": "histogram",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:queue_time_seconds": "histogram",
    "sglang:prompt_tokens_histogram": "histogram",
    "sglang:generation_tokens_histogram": "histogram",
}


async def test_sglangs_names_tell_the_same_where_they_are_asked_for(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, sglang_metrics=True) as world:
        verify.round_size = 4
        verify.set_answer("The capital of France is Paris")
        for _ in range(2):
            await world.http.post("/v1/completions", json={"prompt": "x y z"})
        text = await page(world)
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {name: kind for name, kind in kinds.items() if name.startswith("sglang:")} == SGLANG
    found = values(text)
    same = {
        "sglang:num_queue_reqs": "vllm:num_requests_waiting",
        "sglang:token_usage": "vllm:kv_cache_usage_perc",
        "sglang:gen_throughput": "outrider_gateway_tokens_per_second",
        "sglang:generation_tokens_total": "vllm:generation_tokens_total",
        "sglang:cached_tokens_total": "vllm:prefix_cache_hits_total",
        "sglang:e2e_request_latency_seconds_sum": "vllm:e2e_request_latency_seconds_sum",
        "sglang:prompt_tokens_histogram_sum": "vllm:request_prompt_tokens_sum",
        "sglang:queue_time_seconds_count": "vllm:request_queue_time_seconds_count",
    }
    assert {ours: found[ours, ()] for ours in same} == {ours: found[theirs, ()] for ours, theirs in same.items()}
    length = found["outrider_gateway_accept_length_sum", ()] / found["outrider_gateway_accept_length_count", ()]
    assert found["sglang:spec_accept_length", ()] == length > 1
    drafted, accepted = (found[f"vllm:spec_decode_num_{name}_tokens_total", ()] for name in ("draft", "accepted"))
    assert found["sglang:spec_accept_rate", ()] == accepted / drafted
    hits, queries = (found[f"vllm:prefix_cache_{name}_total", ()] for name in ("hits", "queries"))
    assert found["sglang:cache_hit_rate", ()] == hits / queries
    assert found["sglang:num_requests_total", ()] == 2 and found["sglang:num_aborted_requests_total", ()] == 0


async def test_without_the_option_no_name_is_sglangs(world: World) -> None:
    assert "sglang:" not in await page(world)


async def test_tokens_that_come_at_once_tell_no_speed(world: World) -> None:
    world.verify.round_size = 2
    world.verify.set_answer("one two three four five")
    await world.http.post("/v1/completions", json={"prompt": "x"})
    found = values(await page(world))
    assert not any(name.startswith("outrider_gateway_request_tokens_per_second") for name, _ in found)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_finds_only_the_colons(world: World) -> None:
    world.verify.set_answer("ok")
    await world.http.post("/v1/completions", json={"prompt": "x"})
    result = subprocess.run(["promtool", "check", "metrics"], input=await page(world), text=True, capture_output=True)
    complaints = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    assert all(line.startswith("vllm:") and "should not contain ':'" in line for line in complaints), complaints
