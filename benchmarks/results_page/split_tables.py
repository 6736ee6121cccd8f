"""Tables of drafting on one GPU while another verifies, and the cases shared with plots."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_page.reports import Cells, ResultFile, report, table, targets

PLAIN = "llama-8b plain b1 bf16 greedy"
SPLIT = "llama-8b standalone split b1 bf16 greedy"
LOCKSTEP = "llama-8b standalone lockstep steps=8 topk=4 nodes=31 b1 bf16 greedy"
PLAIN_16 = "llama-8b plain b16 bf16 greedy"
SPLIT_16 = "llama-8b standalone split b16 bf16 greedy"
EAGLE3 = "llama-8b eagle3 split b1 bf16 greedy"
EAGLE3_16 = "llama-8b eagle3 split b16 bf16 greedy"
EAGLE3_LOCKSTEP = "llama-8b eagle3 lockstep steps=8 topk=8 nodes=31 b1 bf16 greedy"
RANDOM = "llama-8b eagle3@random split b1 bf16 greedy"
ALL_80 = {
    PLAIN: "plain",
    SPLIT: "135M draft",
    LOCKSTEP: "135M draft in lockstep, 8 steps, 31 nodes",
    PLAIN_16: "plain, batch 16",
    SPLIT_16: "135M draft, batch 16",
    EAGLE3: "EAGLE-3",
    EAGLE3_LOCKSTEP: "EAGLE-3 in lockstep, 8 steps, 31 nodes",
    EAGLE3_16: "EAGLE-3, batch 16",
}
ALL_80_EAGLE3 = "llama-8b eagle3 colocated b1 n80 bf16 greedy"
ALL_80_STANDALONE = "llama-8b standalone colocated b1 n80 bf16 greedy"
COLOCATED_EAGLE3 = "llama-8b eagle3 colocated b1 bf16 greedy"
COLOCATED_STANDALONE = "llama-8b standalone colocated b1 bf16 greedy"
COLOCATED = {
    PLAIN: "plain",
    COLOCATED_EAGLE3: "EAGLE-3",
    COLOCATED_STANDALONE: "135M draft",
    "llama-8b plain b1 n80 bf16 greedy": "plain, 80 questions",
    ALL_80_EAGLE3: "EAGLE-3, 80 questions",
    ALL_80_STANDALONE: "135M draft, 80 questions",
    "llama-8b plain b1 bf16 t1": "plain, temperature 1",
    "llama-8b eagle3 colocated b1 bf16 t1": "EAGLE-3, temperature 1",
    "llama-8b standalone colocated b1 bf16 t1": "135M draft, temperature 1",
    "llama-8b plain b16 n80 bf16 greedy": "plain, 16 requests, 80 questions",
    "llama-8b eagle3 colocated b16 n80 bf16 greedy": "EAGLE-3, 16 requests, 80 questions",
    "llama-8b standalone colocated b16 n80 bf16 greedy": "135M draft, 16 requests, 80 questions",
    "llama-8b plain b64 ctx1k bf16 greedy": "plain, 64 requests of 1,024 tokens",
    "llama-8b eagle3 colocated b64 ctx1k bf16 greedy": "EAGLE-3, 64 requests of 1,024 tokens",
    "llama-8b standalone colocated b64 ctx1k bf16 greedy": "135M draft, 64 requests of 1,024 tokens",
    "llama-8b plain b64 bf16 greedy": "plain, 64 requests",
    "llama-8b eagle3 colocated b64 bf16 greedy": "EAGLE-3, 64 requests",
    "llama-8b plain b128 bf16 greedy": "plain, 128 requests",
    "llama-8b eagle3 colocated b128 bf16 greedy": "EAGLE-3, 128 requests",
}
USELESS = {
    f"llama-8b {drafter} {words} bf16 greedy": f"{title}, {requests}"
    for words, requests in (
        ("b1", "1 request, 6 questions"),
        ("b1 n8", "1 request, 8 questions"),
        ("b16", "16 requests, 32 answers"),
        ("b16 n48", "16 requests, 48 answers"),
        ("b64", "64 requests, 128 answers"),
        ("b64 n136", "64 requests, 136 answers"),
        ("b128", "128 requests, 256 answers"),
    )
    for drafter, title in (("plain", "plain"), ("eagle3@random colocated", "head of random weights"))
}
LONG = {
    "llama-8b plain b64 ctx4k n64 bf16 greedy": "plain, 4,096 tokens",
    "llama-8b eagle3 colocated b64 ctx4k n64 bf16 greedy": "EAGLE-3, 4,096 tokens",
    "llama-8b plain b64 ctx1k n128 bf16 greedy": "plain, 1,024 tokens, 128 requests",
    "llama-8b eagle3 colocated b64 ctx1k n128 bf16 greedy": "EAGLE-3, 1,024 tokens, 128 requests",
}
JSON = {
    "llama-8b plain b1 json bf16 greedy": "plain",
    "llama-8b eagle3 colocated b1 json bf16 greedy": "EAGLE-3",
    "llama-8b standalone colocated b1 json bf16 greedy": "135M draft",
    "llama-8b plain b16 json bf16 greedy": "plain, 16 requests",
    "llama-8b eagle3 colocated b16 json bf16 greedy": "EAGLE-3, 16 requests",
    "llama-8b standalone colocated b16 json bf16 greedy": "135M draft, 16 requests",
}
PLACEMENT = {
    PLAIN: "plain",
    EAGLE3: "EAGLE-3, draft service on the same GPU",
    "llama-8b eagle3 lockstep steps=5 topk=8 nodes=31 b1 bf16 greedy": "EAGLE-3, in lockstep, 5 steps, 31 nodes",
    "llama-8b eagle3 colocated lockstep steps=5 topk=8 max_draft_tokens=31 b1 bf16 greedy": (
        "EAGLE-3, inside the round, always 5 steps, 31 nodes"
    ),
    COLOCATED_EAGLE3: "EAGLE-3, inside the round",
    SPLIT: "135M draft, draft service on the same GPU",
    "llama-8b standalone lockstep steps=8 topk=4 nodes=31 b1 bf16 greedy": "135M draft, in lockstep, 8 steps, 31 nodes",
    "llama-8b standalone colocated lockstep steps=8 topk=4 max_draft_tokens=31 b1 bf16 greedy": (
        "135M draft, inside the round, always 8 steps, 31 nodes"
    ),
}
NAIVE = {
    "llama-8b plain b32 ctx1k out1024 n32 bf16 greedy": "plain, 32 requests, 1,024 tokens in and out",
    "llama-8b naive_eagle@eagle3 colocated b32 ctx1k out1024 n32 bf16 greedy": "NAIVE_EAGLE, the same",
    "llama-8b plain b64 ctx1k out1024 n64 bf16 greedy": "plain, 64 requests, 1,024 tokens in and out",
    "llama-8b naive_eagle@eagle3 colocated b64 ctx1k out1024 n64 bf16 greedy": "NAIVE_EAGLE, the same",
    PLAIN: "plain",
    "llama-8b nextn@mtp colocated b1 bf16 greedy": "MTP module",
    "llama-8b plain b16 n80 bf16 greedy": "plain, 16 requests, 80 questions",
    "llama-8b nextn@mtp colocated b16 n80 bf16 greedy": "MTP module, the same",
}
COLOCATED_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "speedup over plain": ("speedup_over_plain", ".2f"),
    "accept length": ("accept_length", ".2f"),
    "draft tokens per round": ("draft_tokens_per_round", ".1f"),
    "from round to round, ms": ("round_wall_ms", ".2f"),
    "verify on the GPU, ms": ("round_gpu_ms", ".2f"),
    "drafting, ms": ("drafting_gpu_ms", ".2f"),
    "GPU idle, ms": ("host_gap_ms", ".3f"),
}
PLACEMENT_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "speedup over plain": ("speedup_over_plain", ".2f"),
    "accept length": ("accept_length", ".2f"),
    "accept length over lockstep's": ("accept_over_lockstep", ".2f"),
    "draft tokens per round": ("draft_tokens_per_round", ".1f"),
    "from round to round, ms": ("round_wall_ms", ".2f"),
    "verify on the GPU, ms": ("round_gpu_ms", ".2f"),
    "GPU idle, ms": ("host_gap_ms", ".3f"),
    "hold, ms": ("hold_ms", ".2f"),
}
EQUAL_TEXTS = {case: title for case, title in PLACEMENT.items() if "lockstep" in case or case == PLAIN}
COPIES = {
    PLAIN: "plain",
    COLOCATED_EAGLE3: "EAGLE-3, inside the round",
    "llama-8b ngram split b1 bf16 greedy": "n-grams",
    "llama-8b eagle3+ngram colocated b1 bf16 greedy": "both in one tree",
}
_ON_CPU = "smollm2-135m {} colocated steps={} topk={} nodes=31 b1 fp32 greedy"
ACCEPT_NGRAM = {
    _ON_CPU.format("eagle3", 5, 8): "EAGLE-3, inside the round",
    "smollm2-135m ngram steps=5 topk=8 nodes=31 b1 fp32 greedy": "n-grams",
    _ON_CPU.format("eagle3+ngram", 5, 8): "both in one tree",
}
ACCEPT_COLUMNS = {"rounds": ("rounds", ".0f"), "accept length": ("accept_length", ".2f")}
PAIR_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "speedup over plain": ("speedup_over_plain", ".2f"),
    "accept length": ("accept_length", ".2f"),
    "draft tokens per round": ("draft_tokens_per_round", ".1f"),
    "hit rate": ("hit_rate", ".2f"),
    "ready rate": ("ready_rate", ".2f"),
    "from round to round, ms": ("round_wall_ms", ".2f"),
    "on the GPU": ("round_gpu_ms", ".2f"),
    "gap": ("host_gap_ms", ".2f"),
    "hold": ("hold_ms", ".2f"),
    "share of rounds held": ("held_rounds", ".2f"),
    "draft's answer, p50": ("draft_answer_ms_p50", ".2f"),
}
LARGE_SPLIT = {
    f"llama-70b-fp8-tp2 {how} {batch} bf16 greedy": title
    for how, batch, title in (
        ("plain", "b1", "plain"),
        ("standalone split", "b1", "135M draft"),
        ("eagle3 split", "b1", "EAGLE-3"),
        ("plain", "b16", "plain, 16 requests"),
        ("standalone split", "b16", "135M draft, 16 requests"),
    )
}
SPLIT_COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "speedup over plain": ("speedup_over_plain", ".2f"),
    "speedup over lockstep": ("speedup_over_lockstep", ".2f"),
    "accept length": ("accept_length", ".2f"),
    "accept length over lockstep's": ("accept_over_lockstep", ".2f"),
    "hit rate": ("hit_rate", ".2f"),
    "ready rate": ("ready_rate", ".2f"),
    "round on the GPU, ms": ("round_gpu_ms", ".2f"),
    "gap, ms": ("host_gap_ms", ".2f"),
    "hold, ms": ("hold_ms", ".2f"),
}


def split_table(name: str, cases: Mapping[str, str], columns: Mapping[str, tuple[str, str]] = SPLIT_COLUMNS) -> str:
    """Return the table of speed, accept length and a round's parts for each case."""
    one = report(name)
    lines = [
        [title, *(one.cell(case, name, form) if (case, name) in one else "-" for name, form in columns.values())]
        for case, title in cases.items()
    ]
    return f"{one.source()}\n\n{table(('case', *columns), lines)}"


def colocated_targets() -> str:
    """Return the table of targets of drafting inside the round."""
    one, placed, naive = map(report, ("split_colocated_h200", "split_placement_renewed_h200", "split_naive_eagle_h200"))
    start, line, equal = report("start_colocated_h100"), report("timeline_h200"), report("split_accept_h200")
    always = [case for case in PLACEMENT if "colocated lockstep" in case]
    useless, long = report("split_useless_h100"), report("split_long_h100")
    ratio = "speedup_over_plain"

    def named(source: ResultFile, metric: str, **cases: str) -> list[tuple[str, float]]:
        return [(name.replace("_", " "), source(case, metric)) for name, case in cases.items()]

    return targets(
        [
            (
                "tokens/s, EAGLE-3 (1.4 times SGLang's 420)",
                "at least",
                590,
                named(one, "tokens_per_second", six_questions=COLOCATED_EAGLE3, eighty=ALL_80_EAGLE3),
            ),
            (
                "tokens/s, 135M draft",
                "at least",
                620,
                named(one, "tokens_per_second", six_questions=COLOCATED_STANDALONE, eighty=ALL_80_STANDALONE),
            ),
            ("from round to round, EAGLE-3, 5 steps, ms", "at most", 6.0, [("", placed(always[0], "round_wall_ms"))]),
            (
                "accept length over lockstep's with the same steps and nodes, on equal texts",
                "at least",
                0.98,
                [
                    ("EAGLE-3", equal(always[0], "accept_over_lockstep")),
                    ("135M draft", equal(always[1], "accept_over_lockstep")),
                ],
            ),
            ("GPU idle between rounds, ms", "at most", 0.05, named(one, "host_gap_ms", batch_1=COLOCATED_EAGLE3)),
            (
                "the same without an engine around the rounds, 32 requests, ms",
                "at most",
                0.1,
                [("", line("llama-8b eagle3 colocated b32 bf16 greedy", "between_rounds_us") / 1e3)],
            ),
            (
                "speedup over plain, 16 requests",
                "at least",
                1.7,
                [
                    ("EAGLE-3", one("llama-8b eagle3 colocated b16 n80 bf16 greedy", ratio)),
                    ("135M draft", one("llama-8b standalone colocated b16 n80 bf16 greedy", ratio)),
                ],
            ),
            (
                "speedup over plain, 64 requests of 1,024 tokens",
                "at least",
                1.15,
                [
                    ("EAGLE-3", one("llama-8b eagle3 colocated b64 ctx1k bf16 greedy", ratio)),
                    ("135M draft", one("llama-8b standalone colocated b64 ctx1k bf16 greedy", ratio)),
                ],
            ),
            (
                "the same on an H100, later",
                "at least",
                1.15,
                [(title, long(case, ratio)) for case, title in LONG.items() if "EAGLE-3" in title],
            ),
            (
                "speedup over plain, NAIVE_EAGLE, 1,024 tokens in and out, by requests",
                "at least",
                1.1,
                [(_batch(case), naive(case, ratio)) for case in NAIVE if "naive_eagle" in case],
            ),
            (
                "speedup over plain, head of random weights, by requests, H100",
                "at least",
                0.98,
                [(_batch(case), useless(case, ratio)) for case in USELESS if "@random" in case],
            ),
            (
                "speedup over plain, temperature 1, EAGLE-3",
                "at least",
                1.6,
                [("", one("llama-8b eagle3 colocated b1 bf16 t1", ratio))],
            ),
            (
                "the same, 135M draft",
                "at least",
                2.0,
                [("", one("llama-8b standalone colocated b1 bf16 t1", ratio))],
            ),
            (
                "start of the engine, s",
                "at most",
                45,
                [
                    ("kernels already compiled", start(f"{START} kernels compiled before", "engine_start_seconds")),
                    ("first start", start(f"{START} kernels compiled anew", "engine_start_seconds")),
                ],
            ),
        ]
    )


def _batch(case: str) -> str:
    """Return the number of simultaneous requests of a case."""
    return next(word[1:] for word in case.split() if word[:1] == "b" and word[1:].isdecimal())


START = "llama-8b eagle3 colocated r64 bf16"
PHASES = {
    "verify": "verification: target's forward, sampling, walk",
    "extension": "extension: the head over the committed tokens",
    "step": "steps of growth",
    "choice": "choice of the next nodes",
}


def timeline_table() -> str:
    """Return the table of the parts of a round with drafting inside it."""
    one = report("timeline_h200")
    cases = [f"llama-8b eagle3 colocated b{batch} bf16 greedy" for batch in (1, 16, 32)]
    lines = [
        (title, *(f"{one(case, f'{name}_us'):,.0f} ({one(case, f'{name}_idle_us'):.0f})" for case in cases))
        for name, title in PHASES.items()
    ]
    whole = {
        "between_graphs_us": "between graphs",
        "between_rounds_us": "between rounds",
        "round_us": "from round to round",
        "steps": "steps",
        "accept_length": "accept length",
    }
    lines += [(title, *(one.cell(case, name, ",.1f") for case in cases)) for name, title in whole.items()]
    head = ("us (of which without a kernel)", "1 request", "16", "32")
    return f"{one.source()}\n\n{table(head, lines)}"


def split_targets() -> str:
    """Return the table of targets of the split, over all 80 questions."""
    one, steps = report("split_80_h200x2"), report("draft_step_renewed_h200")
    random = report("split_renewed_h200x2")

    def value(case: str, metric: str) -> list[tuple[str, float]]:
        return [("", one(case, metric))]

    def step(case: str) -> list[tuple[str, float]]:
        return [(f"after {place} tokens", steps(case.format(key), "draft_step_ms")) for key, place in CONTEXTS.items()]

    over_lockstep, over_plain = "speedup_over_lockstep", "speedup_over_plain"
    both_16 = [("135M draft", one(SPLIT_16, over_plain)), ("EAGLE-3", one(EAGLE3_16, over_plain))]
    steps_of = "draft step of 32 nodes, 135M draft, ms", "the same, EAGLE-3 head of 8B shape, ms"
    draft_case, head_case = (f"{draft} split b1 m32 ctx{{}} bf16 greedy" for draft in DRAFT_STEPS)
    return targets(
        [
            (
                "gap and hold before a hit, beyond plain decoding's gap, ms",
                "at most",
                0.1,
                value(SPLIT, "hit_wait_over_plain_gap_ms"),
            ),
            ("ready rate, 135M draft", "at least", 0.85, value(SPLIT, "ready_rate")),
            ("hit rate, 135M draft", "at least", 0.85, value(SPLIT, "hit_rate")),
            ("accept length over lockstep's, 135M draft", "at least", 0.88, value(SPLIT, "accept_over_lockstep")),
            ("the same, EAGLE-3", "at least", 0.88, value(EAGLE3, "accept_over_lockstep")),
            ("tokens/s, 135M draft (2.5 times SGLang's 286)", "at least", 715, value(SPLIT, "tokens_per_second")),
            ("speedup over plain, batch 16, 135M draft", "at least", 1.8, both_16[:1]),
            ("speedup over plain, batch 16", "at least", 0.98, both_16),
            ("speedup over lockstep, 135M draft", "at least", 1.4, value(SPLIT, over_lockstep)),
            ("the same, EAGLE-3", "at least", 1.4, value(EAGLE3, over_lockstep)),
            ("speedup over plain, head of random weights", "at least", 0.95, [("", random(RANDOM, over_plain))]),
            (steps_of[0], "at most", 0.6, step(draft_case)),
            (steps_of[1], "at most", 0.35, step(head_case)),
        ]
    )


CONTEXTS = {"0.25k": "256", "1k": "1,024"}
STEP_NODES = (8, 16, 32, 64)
DRAFT_STEPS = {"135m standalone": "135M draft", "llama-8b eagle3": "EAGLE-3 head of 8B shape"}


def step_table() -> str:
    """Return the table of draft steps by nodes and context."""
    one = report("draft_step_renewed_h200")
    lines = []
    for draft, title in DRAFT_STEPS.items():
        for batch, widths in ((1, STEP_NODES), (16, STEP_NODES[1:])):
            for key, place in {**CONTEXTS, "4k": "4,096"}.items():
                cells = [
                    one.cell(f"{draft} split b{batch} m{count} ctx{key} bf16 greedy", "draft_step_ms", ".3f")
                    if count in widths
                    else "-"
                    for count in STEP_NODES
                ]
                lines.append((title, str(batch), place, *cells))
    head = ("ms per step", "requests", "context", *(f"{count} nodes" for count in STEP_NODES))
    return f"{one.source()}\n\n{table(head, lines)}"


def block_table() -> str:
    """Return the table of block heads' costs in a draft service and inside rounds, next to EAGLE-3's."""
    service, rounds = report("block_draft_h100"), report("round_draft_h100")
    heads = {"eagle3": "EAGLE-3", "dspark-1-layers": "DSPARK, 1 layer", "dspark-2-layers": "DSPARK, 2 layers"}
    apart = "llama-8b {} split b{} m8 ctx1k bf16 greedy"
    lines: list[Cells] = []
    for name, title in heads.items():
        metrics = ("draft_first_ms", "draft_tree_ms")
        grown = [service.cell(apart.format(name, count), metric) for metric in metrics for count in (1, 8)]
        inside = f"llama-8b {name} colocated b1 m16 ctx1k bf16 greedy"
        lines.append((title, *grown, *(rounds.cell(inside, f"draft_round_{steps}_steps_ms") for steps in (2, 5, 8))))
    head = (
        *("ms", "first level, 1 root", "8 roots", "eight levels, 1 root", "8 roots"),
        *("in the round, 2 levels", "5 levels", "8 levels"),
    )
    one, eight = (service(apart.format("dspark-1-layers", count), "draft_first_ms") for count in (1, 8))
    aims = [
        ("draft time, one outcome", "at most", 0.45, [("1 layer, 1 root", one)]),
        ("draft time, eight", "at most", 0.6, [("8 roots", eight)]),
    ]
    return f"{service.source()}\n\n{rounds.source()}\n\n{table(head, lines)}\n\n{targets(aims)}"
