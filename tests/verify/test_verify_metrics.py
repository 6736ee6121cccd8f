"""Rounds and the engine's state as Prometheus sees them."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import generate_latest

from verify_service.door.metrics import VerifyMetrics
from verify_service.frames import DraftStatus, RoundFigures, RoundReport, Snapshot


def test_a_round_is_counted_in_every_figure() -> None:
    metrics = VerifyMetrics()
    figures = RoundFigures(seconds=0.02, held=0.5, gap=2e-4, gpu=0.01)
    metrics.observe(RoundReport(6, 9, committed=[3, 1], accepted=[2], num_failed=1, figures=figures))
    metrics.observe(RoundReport(0, 0, [1], [], 0, RoundFigures(0.03, 0.0)))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"outrider_verify_{name}", labels)

    assert value("rounds_total") == 2 and value("hold_seconds_total") == 0.5
    assert value("round_seconds_sum") == 0.05 and value("round_draft_tokens_sum") == 6
    assert value("committed_tokens_total") == 5 and value("prefilled_tokens_total") == 9
    assert value("draft_tokens_total") == 6 and value("accepted_tokens_total") == 2 and metrics.num_rejected == 4
    assert value("accepted_tokens_per_position_total", position="1") == 1
    assert value("accept_length_count") == 3 and value("failed_requests_total") == 1
    # What nobody measured is not counted as no time.
    assert value("host_gap_seconds_count") == 1 and value("host_gap_seconds_bucket", le="0.0002") == 1
    assert value("gpu_seconds_count") == 1 and value("gpu_seconds_sum") == 0.01
    assert metrics.tokens_per_second == 1.0


def test_what_grew_inside_rounds_is_counted_apart() -> None:
    metrics = VerifyMetrics()
    figures = RoundFigures(0.02, 0.0, drafting=0.0015)
    metrics.observe(RoundReport(6, 0, [3, 2], [2, 1], 0, figures, num_grown=4, num_grown_accepted=2))
    metrics.observe(RoundReport(0, 0, [1], [], 0, RoundFigures(0.02, 0.0)))

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"outrider_verify_{name}")

    assert value("colocated_draft_tokens_total") == 4 and value("colocated_accepted_tokens_total") == 2
    assert value("drafting_seconds_count") == 1 and value("drafting_seconds_sum") == 0.0015


def test_a_hit_is_a_round_that_finds_half_of_the_usual_nodes_without_waiting() -> None:
    metrics = VerifyMetrics()

    def observe(ready: int | None, nodes: int, held: float = 0.0) -> None:
        metrics.observe(RoundReport(nodes, 0, [1], [], 0, RoundFigures(0.02, held, 1e-4, None, ready, [0.003])))

    observe(None, 0)
    for _ in range(5):
        observe(20, 20)
    observe(9, 9)
    observe(0, 20, held=0.002)
    observe(0, 0)
    observe(12, 20, held=0.001)
    observe(7, 20, held=0.001)
    observe(3, 0)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"outrider_verify_{name}")

    assert value("drafted_rounds_total") == 11 and value("hit_rounds_total") == 6 and value("held_rounds_total") == 3
    assert value("ready_rounds_total") == 7, "of its own nodes, a round of few has enough"
    assert value("ready_draft_tokens_sum") == 131 and value("draft_answer_times_seconds_count") == 12
    assert value("hit_wait_seconds_count") == 6 and round(value("hit_wait_seconds_sum") or 0, 6) == 0.0016


def test_the_page_shows_the_engine_s_last_word() -> None:
    metrics = VerifyMetrics()
    peers = [DraftStatus("far:1", True, 0.002)]
    snapshot = Snapshot(3, 4, 100, 50, 2, {"duplicate": 7}, {"gap": 1}, peers, {1: 0.5}, 9, 1, 6)
    backlog = SimpleNamespace(num_tokens=9, refused={"requests": 5, "tokens": 6}, slow_readers=8)
    engine = SimpleNamespace(snapshot=snapshot, num_running=3, num_waiting=4, num_healthy=1, backlog=backlog)
    metrics.watch(engine, [SimpleNamespace(address="far:1", state="connected")])  # type: ignore[arg-type, list-item]
    page = generate_latest(metrics.registry).decode()
    for line in (
        "running_requests 3.0",
        "waiting_requests 4.0",
        "waiting_tokens 9.0",
        'refused_requests_total{reason="tokens"} 6.0',
        "slow_readers_total 8.0",
        "kv_pages_used 50.0",
        "healthy_drafts 1.0",
        "graphs_pending 9.0",
        "drafts_waiting_for_features 1.0",
        'wasted_draft_tokens_total{reason="duplicate"} 7.0',
        'declines_total{reason="gap"} 1.0',
        "preemptions_total 2.0",
        "displaced_requests_total 6.0",
        'draft_connected{address="far:1"} 1.0',
        'draft_answer_seconds{address="far:1"} 0.002',
        'round_cost_seconds{tokens="1"} 0.5',
    ):
        assert f"outrider_verify_{line}\n" in page


def test_a_round_that_leaves_its_drafts_out_is_neither_drafted_nor_a_fallback() -> None:
    metrics = VerifyMetrics()
    metrics._has_drafts = True
    metrics.observe(RoundReport(0, 0, [1], [], 0, RoundFigures(0.02, 0.0, ready=0, resting=True)))
    names = ("resting", "drafted", "fallback")
    values = [metrics.registry.get_sample_value(f"outrider_verify_{name}_rounds_total") for name in names]
    assert values == [1, 0, 0]


def test_a_round_of_tokens_that_no_draft_serves_is_a_fallback_only_where_drafts_are_configured() -> None:
    def fallbacks(dialers: list[SimpleNamespace]) -> float | None:
        metrics = VerifyMetrics()
        backlog = SimpleNamespace(num_tokens=0, refused={"requests": 0, "tokens": 0}, slow_readers=0)
        engine = SimpleNamespace(snapshot=Snapshot(), num_running=0, num_waiting=0, num_healthy=0, backlog=backlog)
        metrics.watch(engine, dialers)  # type: ignore[arg-type]
        undrafted = RoundFigures(0.02, 0.0, 1e-4)
        metrics.observe(RoundReport(0, 0, [1], [], 0, undrafted))
        metrics.observe(RoundReport(0, 64, [], [], 0, undrafted))
        metrics.observe(RoundReport(4, 0, [2], [1], 0, undrafted._replace(ready=4)))
        return metrics.registry.get_sample_value("outrider_verify_fallback_rounds_total")

    assert fallbacks([SimpleNamespace(address="far:1", state="connecting")]) == 1
    assert fallbacks([]) == 0
