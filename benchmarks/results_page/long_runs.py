"""Tables of faults, roll-outs, long runs and containers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.chaos.cases import CASES
from benchmarks.results_page.reports import Cells, ResultFile, report, table


def faults_table() -> str:
    """Return the table of streams under faults."""
    one = report("chaos_cpu")
    return f"{one.source()}\n\n{table(FAULT_COLUMNS, fault_lines(one))}"


FAULT_COLUMNS = (
    "what happens",
    "failed / refused / complete",
    "wrong tokens",
    "longest stall before the fault, from then on",
    "speed during, after (share of before)",
    "drafts accepted again after",
    "pages leaked",
    "services alive",
)


def fault_lines(one: ResultFile) -> Iterable[Cells]:
    """Yield a line for each case that ran, in the order of `CASES`."""
    labels = {match[2]: match[1] for row in one.rows if (match := re.match(r"(.* chaos (\w+)) ", row.case))}
    for name, case in CASES.items():
        if name not in labels:
            continue
        title = f"{labels[name]} fp32"
        recovered = (title, "recovery_ms") in one
        yield (
            case.title,
            " / ".join(one.cell(title, metric, "g") for metric in ("failed", "refused", "complete")),
            one.cell(title, "wrong_tokens", "g"),
            f"{one.cell(title, 'stall_before_ms', '.0f')}, {one.cell(title, 'stall_ms', '.0f')} ms",
            f"{one.cell(title, 'during_over_before', '.0%')}, {one.cell(title, 'after_over_before', '.0%')}",
            f"{one(title, 'recovery_ms') / 1000:.1f} s" if recovered else "never",
            one.cell(title, "pages_leaked", "g"),
            one.cell(title, "processes_alive", "g"),
        )


def rollout_table() -> str:
    """Return the table of clients during roll-outs."""
    one = report("rollout_cpu")
    steps = {
        "calm": "nothing",
        "verify_rolled": "each verify service replaced",
        "draft_rolled": "each draft service replaced",
        "gateway_rolled": "each gateway replaced",
        "verify_killed": "SIGKILL of a verify service",
        "calm_again": "nothing",
    }
    titles = {match[1]: row.case for row in one.rows if (match := re.search(r" rollout (\w+) ", row.case))}
    lines = [
        (
            text,
            f"{one.cell(titles[step], 'seconds', '.0f')} s",
            " / ".join(one.cell(titles[step], metric, "g") for metric in ("failed", "refused", "complete")),
            " / ".join(one.cell(titles[step], metric, "g") for metric in ("rest_failed", "rest_complete")),
            f"{one(titles[step], 'wrong_tokens') + one(titles[step], 'rest_wrong'):g}",
            f"{one.cell(titles[step], 'stall_ms', '.0f')} ms",
        )
        for step, text in steps.items()
    ]
    head = (
        "what happens",
        "duration",
        "gRPC: failed / refused / complete",
        "REST: failed / complete",
        "wrong",
        "longest stall",
    )
    return f"{one.source()}\n\n{table(head, lines)}"


def cases_table() -> str:
    """Return the table of what users see in each case of the chaos benchmark."""
    lines = [(f"`{name}`", case.title, case.seen) for name, case in CASES.items()]
    return table(("case", "what happens", "what users see"), lines)


def soak_table() -> str:
    """Return the table of long runs under mixed load."""
    blocks = []
    for name, case in (
        ("soak_cpu", "smollm2-135m ngram soak"),
        ("soak_colocated_cpu", "smollm2-135m eagle3+ngram colocated soak"),
        ("soak_h200", "llama-8b standalone soak"),
        ("soak_h100x2", "llama-8b eagle3+standalone soak"),
    ):
        one = report(name)
        counts = ("minutes", "complete", "cancelled", "preemptions", "failed")
        spells = [row.case for row in one.rows if re.search(r" spell \d+$", row.case)]
        spells = sorted(set(spells), key=spells.index)
        left = sum(
            one(spells[-1], f"outrider_{what}")
            for what in ("verify_running_requests", "verify_kv_pages_used", "draft_open_requests", "draft_live_nodes")
        )
        memory = []
        for service in ("verify", "draft", "gateway"):
            values = [one(spell, f"{service}_resident_mib") for spell in spells[1:]]
            memory.append(f"{min(values):,.0f} to {max(values):,.0f}")
        cells = [*(f"{one(case, count):,.0f}" for count in counts), f"{left:.0f}", *memory]
        head = (*counts[:1], "answers", *counts[2:], "left at the end")
        head = (*head, *(f"{service}, MiB" for service in ("verify", "draft", "gateway")))
        blocks.append(f"{one.source()}\n\n{table(head, [cells])}")
    return "\n\n".join(blocks)


def containers_table() -> str:
    """Return the table of GPU profiles as plain processes: with the draft, while it is dead, and once it is back."""
    lines, sources = [], []
    for name, profile in (("compose_gpu1_h200", "gpu1"), ("compose_gpu2_h200x2", "gpu2")):
        one = report(name)
        case = f"compose {profile} SmolLM2-135M-Instruct"
        start = one(f"{case} verify-{profile}", "seconds_to_healthy")
        for door in ("rest", "grpc"):
            states = (f"{case} {door} {state}" for state in ("draft-runs", "draft-killed", "draft-is-back"))
            cells = (f"{one(state):,.0f} ({one(state, 'accept_length'):.2f})" for state in states)
            lines.append((f"`{profile}`, {door}", f"{start:.0f} s", *cells, one.cell(case, "different_texts", ".0f")))
        sources.append(one.source())
    head = (
        "profile, door",
        "verify healthy after",
        "draft running: tokens/s (accept length)",
        "draft dead",
        "draft back",
    )
    return "\n\n".join([*sources, table((*head, "distinct texts among all answers"), lines)])


def load_table() -> str:
    """Return the table of latencies of 64 streams."""
    one = report("load_cpu")
    case = "smollm2-135m eagle3+ngram split b64 greedy grpc"
    ends = ("mean", "p50", "p90", "p99", "max")
    names = {
        "ttft_ms": "to the first token",
        "itl_ms": "between tokens",
        "message_gap_ms": "between messages",
        "e2e_ms": "to the end",
    }
    lines = [(title, *(one.cell(case, f"{name}_{end}", ",.0f") for end in ends)) for name, title in names.items()]
    rise = (f"{name} {one(case, f'{name}_second_half_rise_mib'):+.0f} MiB" for name in ("verify", "draft", "gateway"))
    text = (
        f"{one(case, 'requests'):,.0f} answers, {one(case, 'failed'):.0f} failed, {one(case):.0f} tokens/s, "
        f"accept length {one(case, 'accept_length'):.2f}. Memory growth in the second half: {', '.join(rise)}."
    )
    return f"{one.source()}\n\n{text}\n\n{table(('ms', *ends), lines)}"
