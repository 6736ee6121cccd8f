"""Tables of drafting on one GPU while another verifies, and the cases that plots show, too."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_page.reports import report, table, targets

PLAIN = "llama-8b plain b1 bf16 greedy"
SPLIT = "llama-8b standalone split b1 bf16 greedy"
LOCKSTEP = "llama-8b standalone lockstep steps=8 topk=4 nodes=31 b1 bf16 greedy"
PLAIN_16 = "llama-8b plain b16 bf16 greedy"
SPLIT_16 = "llama-8b standalone split b16 bf16 greedy"
EAGLE3 = "llama-8b eagle3 split b1 bf16 greedy"
EAGLE3_LOCKSTEP = "llama-8b eagle3 lockstep steps=8 topk=8 nodes=31 b1 bf16 greedy"
RANDOM = "llama-8b eagle3@random split b1 bf16 greedy"
ALL_80 = {
    PLAIN: "plain",
    SPLIT: "135M draft",
    LOCKSTEP: "135M draft in lockstep, 8 steps, 31 nodes",
    PLAIN_16: "plain, batch 16",
    SPLIT_16: "135M draft, batch 16",
}
SIX = {
    PLAIN: "plain",
    SPLIT: "135M draft",
    LOCKSTEP: "135M draft in lockstep, 8 steps, 31 nodes",
    "llama-8b standalone lockstep steps=6 topk=4 nodes=31 b1 bf16 greedy": "135M draft in lockstep, 6 steps, 31 nodes",
    "llama-8b standalone+ngram split b1 bf16 greedy": "135M draft and n-grams in one tree",
    EAGLE3: "EAGLE-3",
    EAGLE3_LOCKSTEP: "EAGLE-3 in lockstep, 8 steps, 31 nodes",
    RANDOM: "EAGLE-3 of random weights",
}
COLOCATED_EAGLE3 = "llama-8b eagle3 colocated b1 bf16 greedy"
COLOCATED_STANDALONE = "llama-8b standalone colocated b1 bf16 greedy"
COLOCATED = {
    PLAIN: "plain",
    EAGLE3: "EAGLE-3, draft service on the same GPU",
    COLOCATED_EAGLE3: "EAGLE-3, inside the round",
    COLOCATED_STANDALONE: "135M draft, inside the round",
}
COLOCATED_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "over plain": ("speedup_over_plain", ".2f"),
    "accept length": ("accept_length", ".2f"),
    "draft tokens a round": ("draft_tokens_per_round", ".1f"),
    "from round to round, ms": ("round_wall_ms", ".2f"),
    "verify on the GPU, ms": ("round_gpu_ms", ".2f"),
    "GPU idle, ms": ("host_gap_ms", ".3f"),
}
SPLIT_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "over plain": ("speedup_over_plain", ".2f"),
    "over lockstep": ("speedup_over_lockstep", ".2f"),
    "accept length": ("accept_length", ".2f"),
    "over lockstep's": ("accept_over_lockstep", ".2f"),
    "hit rate": ("hit_rate", ".2f"),
    "ready rate": ("ready_rate", ".2f"),
    "round on the GPU, ms": ("round_gpu_ms", ".2f"),
    "gap, ms": ("host_gap_ms", ".2f"),
    "hold, ms": ("hold_ms", ".2f"),
}


def split_table(name: str, cases: Mapping[str, str], columns: Mapping[str, tuple[str, str]] = SPLIT_COLUMNS) -> str:
    """Speed, accept length and a round's parts of each case."""
    one = report(name)
    lines = [
        [title, *(one.cell(case, name, form) if (case, name) in one else "-" for name, form in columns.values())]
        for case, title in cases.items()
    ]
    return f"{one.source()}\n\n{table(('case', *columns), lines)}"


def colocated_targets() -> str:
    """Targets of drafting inside the round."""
    one = report("split_colocated_h200")

    def value(case: str, metric: str) -> list[tuple[str, float]]:
        return [("six questions", one(case, metric))]

    return targets(
        [
            (
                "tokens/s, EAGLE-3 (1.4 times SGLang's 420)",
                "at least",
                590,
                value(COLOCATED_EAGLE3, "tokens_per_second"),
            ),
            ("tokens/s, 135M draft", "at least", 620, value(COLOCATED_STANDALONE, "tokens_per_second")),
            ("GPU idle between rounds, ms", "at most", 0.05, value(COLOCATED_EAGLE3, "host_gap_ms")),
        ]
    )


def split_targets() -> str:
    """Targets of the split."""
    all_80, six, steps = report("split_now_all_h200x2"), report("split_now_h200x2"), report("draft_step_now_h200")

    def both(metric: str) -> list[tuple[str, float]]:
        return [("80 questions", all_80(SPLIT, metric)), ("six", six(SPLIT, metric))]

    def step(case: str) -> list[tuple[str, float]]:
        return [(f"behind {place} tokens", steps(case.format(key), "draft_step_ms")) for key, place in CONTEXTS.items()]

    return targets(
        [
            (
                "gap and hold before a hit, over plain decoding's gap, ms",
                "at most",
                0.1,
                both("hit_wait_over_plain_gap_ms"),
            ),
            ("ready rate, 135M draft", "at least", 0.85, both("ready_rate")),
            ("hit rate, 135M draft", "at least", 0.85, both("hit_rate")),
            ("accept length over lockstep's, 135M draft", "at least", 0.88, both("accept_over_lockstep")),
            ("the same, EAGLE-3", "at least", 0.88, [("six questions", six(EAGLE3, "accept_over_lockstep"))]),
            ("tokens/s, 135M draft (2.5 times SGLang's 286)", "at least", 715, both("tokens_per_second")),
            ("speed over plain, batch 16", "at least", 1.8, [("80 questions", all_80(SPLIT_16, "speedup_over_plain"))]),
            ("speed over the fastest lockstep, 135M draft", "at least", 1.4, both("speedup_over_lockstep")),
            ("the same, EAGLE-3", "at least", 1.4, [("six questions", six(EAGLE3, "speedup_over_lockstep"))]),
            (
                "speed over plain, head of random weights",
                "at least",
                0.95,
                [("six questions", six(RANDOM, "speedup_over_plain"))],
            ),
            (
                "draft step of 32 nodes, 135M draft, ms",
                "at most",
                0.6,
                step("135m standalone split b1 m32 ctx{} bf16 greedy"),
            ),
            (
                "the same, EAGLE-3 head of 8B shape, ms",
                "at most",
                0.35,
                step("llama-8b eagle3 split b1 m32 ctx{} bf16 greedy"),
            ),
        ]
    )


CONTEXTS = {"0.25k": "256", "1k": "1,024"}
STEP_NODES = (8, 16, 32, 64)


def step_table() -> str:
    """Draft steps by nodes and context."""
    one = report("draft_step_now_h200")
    lines = []
    for draft, title in (("135m standalone", "135M draft"), ("llama-8b eagle3", "EAGLE-3 head of 8B shape")):
        for batch, widths in ((1, STEP_NODES), (16, STEP_NODES[1:])):
            for key, place in {**CONTEXTS, "4k": "4,096"}.items():
                cells = [
                    one.cell(f"{draft} split b{batch} m{count} ctx{key} bf16 greedy", "draft_step_ms", ".3f")
                    if count in widths
                    else "-"
                    for count in STEP_NODES
                ]
                lines.append((title, str(batch), place, *cells))
    head = ("ms a step", "requests", "context", *(f"{count} nodes" for count in STEP_NODES))
    return f"{one.source()}\n\n{table(head, lines)}"
