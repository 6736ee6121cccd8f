"""Tables of docs/results.md, docs/reliability.md and README.md, made from the reports in benchmarks/results."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.engine.cost import Point, round_times
from benchmarks.results_page import long_runs, quantized
from benchmarks.results_page.ranks import exchange_table, large_table, two_gpus_table
from benchmarks.results_page.reports import ROOT, Cells, ResultFile, report, table, targets
from benchmarks.results_page.split_tables import (
    ACCEPT_COLUMNS,
    ACCEPT_NGRAM,
    ALL_80,
    ALL_80_EAGLE3,
    ALL_80_STANDALONE,
    COLOCATED,
    COLOCATED_COLUMNS,
    COLOCATED_STANDALONE,
    COPIES,
    EQUAL_TEXTS,
    JSON,
    LARGE_SPLIT,
    LOCKSTEP,
    LONG,
    NAIVE,
    PAIR_COLUMNS,
    PLACEMENT,
    PLACEMENT_COLUMNS,
    PLAIN,
    PLAIN_16,
    SPLIT,
    SPLIT_16,
    USELESS,
    block_table,
    colocated_targets,
    split_table,
    split_targets,
    step_table,
    timeline_table,
)

PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "reliability.md")
BEGIN, END = "<!-- {0}: made by benchmarks.results_page -->", "<!-- {0}: end -->"

# The default model on a CPU.

MT_PLAIN, MT_DEFAULT = "smollm2-135m plain split b1 bf16 greedy", "smollm2-135m eagle3+ngram split b1 bf16 greedy"
KINDS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MT_INSIDE = MT_DEFAULT.replace("split", "colocated")
"""The default configuration on a CPU with few cores."""
MT_OTHER = "smollm2-135m llamacpp b1 gguf greedy"
MT_BENCH = "mt_bench_80_cpu"


def mt_table() -> str:
    """Return the table of the default against plain decoding: all questions, then by kind."""
    one = report(MT_BENCH)
    ratio, accept = (one.cell(MT_INSIDE, metric) for metric in ("speedup_over_plain", "accept_length"))
    speeds = f"{one(MT_INSIDE):.1f} tokens/s against {one(MT_PLAIN):.1f}"
    found = f"**{ratio} times plain decoding**: {speeds}, accept length {accept}."
    lines = []
    for kind in KINDS:
        plain, default = f"{MT_PLAIN} {kind}", f"{MT_INSIDE} {kind}"
        ratio = one.cell(default, "speedup_over_plain")
        lines.append((kind, f"{one(plain):.1f}", f"{one(default):.1f}", ratio, one.cell(default, "accept_length")))
    head = ("kind", "plain, tokens/s", "default, tokens/s", "speedup over plain", "accept length")
    return f"{found}\n\n{one.source()}\n\n{table(head, lines)}"


def mt_runs() -> str:
    """Return the table of the default, plain decoding and llama.cpp on several kinds of CPUs."""
    lines = []
    for name, machine, asked in (
        (MT_BENCH, "AMX", "80, 96"),
        ("mt_bench_llamacpp_cpu", "AMX", "16, 128"),
        ("mt_bench_avx512_bf16_cpu", "AVX-512 VNNI and bf16", "80, 96"),
        ("mt_bench_avx512_cpu", "AVX-512 VNNI", "80, 96"),
    ):
        one = report(name)
        plain, default = one(MT_PLAIN), one(MT_INSIDE)
        other = one(MT_OTHER) if (MT_OTHER, "tokens_per_second") in one else None
        cells = (f"{plain:.1f}", f"{default:.1f}", f"{default / plain:.2f}", one.cell(MT_INSIDE, "accept_length"))
        beside = (f"{other:.1f}", f"{default / other:.2f}") if other else ("", "")
        memory = f"{one(MT_INSIDE, 'resident_mib'):,.0f}"
        lines.append((f"{one.device}, {machine}", one.date, one.link, asked, *cells, *beside, memory))
    head = ("device", "date", "run", "questions, tokens", "plain, tokens/s", "default, tokens/s", "speedup over plain")
    return table(
        (*head, "accept length", "llama.cpp, tokens/s", "default over llama.cpp", "memory of all services, MiB"), lines
    )


def ngram_table() -> str:
    """Return the table of n-grams alone, by kind of prompt."""
    one = report("services_cpu")
    lines = []
    kinds = {"summary": "summaries", "code_edit": "code edits", "retrieval": "from a document", "creative": "creative"}
    for kind, title in kinds.items():
        ngram = f"smollm2-135m ngram split b1 bf16 greedy {kind}"
        plain = one(f"smollm2-135m plain split b1 bf16 greedy {kind}")
        other = one(f"smollm2-135m transformers b1 bf16 greedy {kind}")
        ratios = (one.cell(ngram, f"speedup_over_plain{end}") for end in ("", "_lowest_prompt"))
        lines.append(
            (title, f"{other:.1f}", f"{plain:.1f}", f"{one(ngram):.1f}", *ratios, one.cell(ngram, "accept_length"))
        )
    head = (
        "prompts",
        "transformers",
        "plain",
        "n-grams",
        "speedup over plain",
        "speedup, worst prompt",
        "accept length",
    )
    return f"{one.source()}\n\n{table(head, lines)}"


# One GPU.

TREE_32, TREE_64 = "llama-8b tree engine b1 m32 ctx1k", "llama-8b tree engine b16 m64 ctx1k"
ENGINE = "engine_renewed_h200"


def engine_targets() -> str:
    """Return the table of the engine's targets."""
    rounds, half = report(ENGINE), report("engine_fp16_renewed_h200")
    greedy = f"{TREE_32} bf16 greedy"
    plain = rounds("llama-8b plain engine b1 m1 ctx1k bf16 greedy")
    return targets(
        [
            ("plain decoding, batch 1, tokens/s (SGLang 0.5.17: 219)", "at least", 219, [("", plain)]),
            ("the same, aim", "at least", 241, [("", plain)]),
            ("round with 32 tree tokens, GPU ms", "at most", 5.0, [("", rounds(greedy, "round_gpu_ms"))]),
            ("the same, ratio to its bare products", "at most", 1.15, [("", rounds(greedy, "round_gpu_over_gemm"))]),
            ("the same, wall time minus GPU time, ms", "at most", 0.25, [("", rounds(greedy, "host_gap_ms"))]),
            (
                "64 tree tokens of 16 requests, ratio to their bare products",
                "at most",
                1.25,
                [
                    ("", rounds(f"{TREE_64} bf16 greedy", "round_gpu_over_gemm")),
                    ("float16", half(f"{TREE_64} fp16 greedy", "round_gpu_over_gemm")),
                ],
            ),
            (
                "tree attention, 32 queries, 1k context, us per layer",
                "at most",
                9,
                [("", rounds(f"{TREE_32} bf16", "attention_us_per_layer"))],
            ),
            (
                "the same, 16k context",
                "at most",
                25,
                [("", rounds("llama-8b tree engine b1 m32 ctx16k bf16", "attention_us_per_layer"))],
            ),
            (
                "prefill of 2,048 tokens, share of the matmul rate",
                "at least",
                0.6,
                [("", rounds("llama-8b prefill engine b1 m2048 bf16", "prefill_over_matmul"))],
            ),
        ]
    )


def engine_rounds() -> str:
    """Return the tables of rounds by batch and by context."""
    one = report(ENGINE)
    gpu = round_times(one.rows, "round_gpu_ms")

    def ms(rows: int, tokens: int, context: int) -> str:
        value = gpu.get(Point(rows, tokens, context))
        return "-" if value is None else f"{value:.2f}"

    batches, contexts = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)
    speeds = (one(f"llama-8b plain engine b{n} m{n} ctx1k bf16 greedy") for n in batches)
    batch = table(
        ("GPU ms, 1k context, batch", *map(str, batches)),
        [
            ("plain", *(ms(n, n, 1024) for n in batches)),
            ("64 tokens in total", *(ms(n, 64, 1024) for n in batches)),
            ("plain, tokens/s", *(f"{speed:,.0f}" for speed in speeds)),
        ],
    )
    context = table(
        ("GPU ms, batch 1, context", *(f"{n}k" for n in contexts)),
        [
            ("plain", *(ms(1, 1, n * 1024) for n in contexts)),
            ("32 tree tokens", *(ms(1, 32, n * 1024) for n in contexts)),
        ],
    )
    return f"{one.source()}\n\n{batch}\n\n{context}"


def live_table() -> str:
    """Return the table of rounds with clients, gateway and draft running, and its targets."""
    one = report("live_renewed_h200")
    lines, aims = [], []
    for drafter, title in (("plain", "plain"), ("ngram", "n-grams")):
        for batch, target in ((1, 0.25), (32, 0.6)):
            case = f"llama-8b {drafter} split b{batch} greedy"
            gaps = (one.cell(case, f"host_gap_ms{end}") for end in ("_p50", "_p90", ""))
            lines.append((f"{title}, batch {batch}", f"{one(case):,.0f}", one.cell(case, "accept_length"), *gaps))
            aims.append((f"mean gap, {title}, batch {batch}, ms", "at most", target, [("", one(case, "host_gap_ms"))]))
    head = ("case", "tokens/s", "accept length", "gap p50, ms", "gap p90", "gap mean")
    return f"{one.source()}\n\n{table(head, lines)}\n\n{targets(aims)}"


def host_gap_table() -> str:
    """Return the table of the engine's Python between two rounds, on a fake device."""
    one = report("host_gap_cpu")
    cases = {"1": "host b1 m64", "16": "host b16 m79", "32": "host b32 m96"}
    names = ("host_gap_ms", "host_gap_p99_ms", "messages_host_ms")
    lines = [(batch, *(one.cell(case, name) for name in names)) for batch, case in cases.items()]
    return f"{one.source()}\n\n{table(('requests', 'gap, ms', 'gap p99, ms', 'messages in a round, ms'), lines)}"


def gateway_host_table() -> str:
    """Return the table of the gateway's Python for a message, part by part."""
    one = report("gateway_host_cpu")
    cases = {
        "1 round of 1": "r1 m1",
        "5 rounds of 1": "r5 m5",
        "1 round of 5": "r1 m5",
        "16 rounds of 1": "r16 m16",
        "5 rounds of 1, stop strings": "r5 m5 stop",
    }
    parts = ("decode", "feed", "meter", "encode", "token")
    lines = [
        (title, *(one.cell(f"gateway {case}", f"{part}_us", ".1f") for part in parts)) for title, case in cases.items()
    ]
    head = ("tokens in a message", "decode, us", "text", "metrics", "encode", "total per token")
    return f"{one.source()}\n\n{table(head, lines)}"


def attention_table() -> str:
    """Return the table of our attention against FlashInfer's."""
    one = report("attention_backends_h200")
    lines = []
    for case, title in {
        "prefill b1 m2048 ctx0k": "prompt of 2k tokens",
        "prefill b1 m8192 ctx0k": "prompt of 8k tokens",
        "tree b1 m32 ctx1k": "tree of 32 tokens, 1k context",
        "tree b1 m32 ctx16k": "tree of 32 tokens, 16k context",
    }.items():
        ours, theirs = (one(f"{name} {case} bf16", "attention_us_per_layer") for name in ("triton", "flashinfer"))
        plan = one(f"flashinfer {case} bf16", "attention_plan_ms")
        lines.append((title, f"{ours:,.1f}", f"{theirs:,.1f}", f"{theirs / ours:.2f}", f"{plan:.1f}"))
    head = (
        "us per layer",
        "ours",
        "FlashInfer",
        "FlashInfer over ours",
        "FlashInfer's planning on the host, ms per round",
    )
    return f"{one.source()}\n\n{table(head, lines)}"


MODEL_IMPL = ("model_impl_8b_h100", "model_impl_fp32_cpu", "model_impl_bf16_cpu", "model_impl_fp32_h100")


def model_impl_table() -> str:
    """Return the table of a model's rounds with our decoder and through transformers."""
    files = [report(name) for name in MODEL_IMPL]
    lines = []
    for one in files:
        for case in dict.fromkeys(row.case for row in one.rows if row.metric == "transformers_over_outrider"):
            model, tokens, dtype = (case.split()[place] for place in (0, 4, 5))
            metric = "round_gpu_ms" if (case, "round_gpu_ms") in one else "round_ms"
            ours, theirs = one.cell(case, metric), one.cell(f"transformers {case}", metric)
            ratio = one.cell(case, "transformers_over_outrider")
            lines.append((model, dtype, tokens.removeprefix("m"), ours, theirs, ratio, one.device))
    head = ("model", "dtype", "tokens", "ours, ms", "through transformers, ms", "ratio", "device")
    sources = "\n\n".join(one.source() for one in files[:2])
    worst = [max(row.value for row in one.rows if row.metric == "transformers_over_outrider") for one in files]
    aims = [
        ("8B shape, ratio of transformers to ours", "at most", 1.2, [("", worst[0])]),
        ("the same on a CPU", "at most", 1.1, [("float32", worst[1]), ("bfloat16", worst[2])]),
    ]
    return f"{sources}\n\n{table(head, lines)}\n\n{targets(aims)}"


def deterministic_table() -> str:
    """Return the table of the cost of --deterministic, and of answers equal to plain decoding's."""
    one = report("deterministic_8b_h200x2")
    lines = []
    for drafter, title in (("plain", "plain"), ("ngram", "n-grams"), ("standalone", "135M draft")):
        for batch in (1, 16):
            for decoding in ("greedy", "t0.8"):
                exact, fast = (
                    f"llama-8b {drafter} {mode} b{batch} bf16 {decoding}" for mode in ("deterministic", "fast")
                )
                cost = one.cell(f"llama-8b {drafter} b{batch} {decoding}", "deterministic_over_fast")
                equal = (f"{one(case, 'equal_answers'):.0f} of 16" for case in (exact, fast))
                lines.append(
                    (f"{title}, batch {batch}, {decoding}", f"{one(exact):,.0f}", f"{one(fast):,.0f}", cost, *equal)
                )
    head = (
        "run",
        "deterministic, tokens/s",
        "default, tokens/s",
        "ratio",
        "equal answers, deterministic",
        "equal answers, default",
    )
    return f"{one.source()}\n\n{table(head, lines)}"


# Draft models.


def drafts_table() -> str:
    """Return the table of offline accept lengths of the shipped head and of the noisy copy."""
    lines = []
    for name, title in (("evaluate_eagle3_h200", "shipped EAGLE-3 head"), ("evaluate_noisy_h200", "135M noisy copy")):
        for one in report(name).data["evaluation"]:
            all_of = one["all"]
            rates = (f"{all_of['rates'][depth - 1]:.2f}" for depth in (1, 6, 10))
            lengths = (f"{all_of[kind]['accept_length']:.2f}" for kind in ("tree", "chain"))
            lines.append((title, f"{one['temperature']:g}", *lengths, *rates))
    one = report("evaluate_eagle3_h200")
    head = ("draft", "temperature", "tree", "chain", "accept rate at depth 1", "6", "10")
    by_heat = [answers["all"]["tree"]["accept_length"] for answers in one.data["evaluation"]]
    deep = one.data["evaluation"][0]["all"]["deep_over_first"]
    aims = targets(
        [
            ("head, tree, greedy", "at least", 4.36, [("", by_heat[0])]),
            ("head, accept rate at depth 6 over depth 1, greedy", "at least", 0.85, [("", deep)]),
            ("head, tree at temperature 1 over greedy", "at least", 0.8, [("", by_heat[1] / by_heat[0])]),
        ]
    )
    return f"{one.source()}\n\n{table(head, lines)}\n\n{aims}"


def kinds_table() -> str:
    """Return the table of other kinds of drafters, trained at small cost."""
    one = report("train_drafters_h200")
    lines = []
    for key, title, steps in (
        ("eagle", "EAGLE-2", 250),
        ("nextn", "MTP", 250),
        ("standalone", "STANDALONE, 4 layers", 500),
    ):
        case = f"smollm2-135m {key} bf16"
        tree = " tree 32 nodes depth 8"
        lines.append(
            (
                title,
                str(steps),
                *(one.cell(f"{case} greedy", f"accept_rate_depth_{depth}") for depth in (1, 6)),
                *(one.cell(f"{case} greedy{end}", "accept_length") for end in (" chain", tree)),
                one.cell(f"{case} t1{tree}", "accept_length"),
            )
        )
    head = ("kind", "steps", "accept rate at depth 1", "6", "chain", "tree", "tree at temperature 1")
    return f"{one.source('description')}\n\n{table(head, lines)}"


# README.


def readme_table() -> str:
    """Return the table of README.md, with one line per configuration."""
    cpu, two, one = report(MT_BENCH), report("split_80_h200x2"), report("live_renewed_h200")
    no_amx = report("mt_bench_avx512_bf16_cpu")
    inside, ranks = report("split_colocated_h200"), report("split_ranks_h200x2")

    def line(what: str, prompts: str, source: ResultFile, plain: str, drafted: str) -> Cells:
        before, after = source(plain), source(drafted)
        form = ",.1f" if before < 100 else ",.0f"
        speeds = (f"{before:{form}}", f"{after:{form}}", f"**{after / before:.2f}**")
        return (what, prompts, *speeds, source.cell(drafted, "accept_length"), source.device, source.date)

    live, plain_80 = "llama-8b {} split b{} greedy", "llama-8b plain b1 n80 bf16 greedy"
    lines = [
        line("SmolLM2-135M, EAGLE-3 head and n-grams, one request", "80", cpu, MT_PLAIN, MT_INSIDE),
        line("the same on a CPU with AVX-512 and without AMX", "80", no_amx, MT_PLAIN, MT_INSIDE),
        line("8B shape, 135M draft, one request", "80", two, PLAIN, SPLIT),
        line("the same in lockstep: draft and verify take turns", "80", two, PLAIN, LOCKSTEP),
        line("8B shape, 135M draft, 16 requests", "80", two, PLAIN_16, SPLIT_16),
        line("8B shape, EAGLE-3 inside the round, one request", "80", inside, plain_80, ALL_80_EAGLE3),
        line("8B shape, 135M draft inside the round, one request", "80", inside, plain_80, ALL_80_STANDALONE),
        line("8B shape, 135M draft inside the rounds of two ranks", "6", ranks, PLAIN, COLOCATED_STANDALONE),
        line("8B shape, n-grams, one request", "ours", one, live.format("plain", 1), live.format("ngram", 1)),
        line("8B shape, n-grams, 32 requests", "ours", one, live.format("plain", 32), live.format("ngram", 32)),
    ]
    head = ("tokens/s", "prompts", "plain", "with drafts", "ratio", "accept length", "device", "date")
    return table(head, lines)


TABLES: dict[str, Callable[[], str]] = {
    "measured": readme_table,
    "mt_bench": mt_table,
    "mt_bench_runs": mt_runs,
    "ngram": ngram_table,
    "split_80": lambda: split_table("split_80_h200x2", ALL_80),
    "split_targets": split_targets,
    "split_70b": lambda: split_table("split_70b_fp8_tp2_h100x4", LARGE_SPLIT, PAIR_COLUMNS),
    "colocated": lambda: split_table("split_colocated_h200", COLOCATED, COLOCATED_COLUMNS),
    "equal_texts": lambda: split_table("split_accept_h200", EQUAL_TEXTS, PLACEMENT_COLUMNS),
    "copies": lambda: split_table("split_copy_renewed_h200", COPIES, PLACEMENT_COLUMNS),
    "accept_ngram": lambda: split_table("accept_ngram_cpu", ACCEPT_NGRAM, ACCEPT_COLUMNS),
    "placement": lambda: split_table("split_placement_renewed_h200", PLACEMENT, PLACEMENT_COLUMNS),
    "naive": lambda: split_table("split_naive_eagle_h200", NAIVE, COLOCATED_COLUMNS),
    "timeline": timeline_table,
    "colocated_useless": lambda: split_table("split_useless_h100", USELESS, COLOCATED_COLUMNS),
    "colocated_long": lambda: split_table("split_long_h100", LONG, COLOCATED_COLUMNS),
    "colocated_json": lambda: split_table("split_json_h100", JSON, COLOCATED_COLUMNS),
    "colocated_targets": colocated_targets,
    "draft_steps": step_table,
    "block_steps": block_table,
    "engine_targets": engine_targets,
    "engine_rounds": engine_rounds,
    "live": live_table,
    "host_gap": host_gap_table,
    "gateway_host": gateway_host_table,
    "attention": attention_table,
    "model_impl": model_impl_table,
    "exchange": exchange_table,
    "two_gpus": two_gpus_table,
    "ranks_large": large_table,
    "deterministic": deterministic_table,
    "quantized_text": quantized.text_table,
    "quantized_engine": quantized.engine_table,
    "quantized_spec": quantized.spec_table,
    "expert_products": quantized.expert_products_table,
    "quantized_long": quantized.long_table,
    "quantized_deterministic": quantized.deterministic_table,
    "experts": quantized.experts_table,
    "drafts": drafts_table,
    "kinds": kinds_table,
    "faults": long_runs.faults_table,
    "rollout": long_runs.rollout_table,
    "cases": long_runs.cases_table,
    "soak": long_runs.soak_table,
    "load": long_runs.load_table,
    "containers": long_runs.containers_table,
}


def filled(text: str) -> str:
    """Return a page's text with every table between marks made anew. Raises KeyError for an unknown table."""
    for name in re.findall(BEGIN.format(r"(\w+)"), text):
        head, _, rest = text.partition(BEGIN.format(name))
        _, mark, tail = rest.partition(END.format(name))
        if not mark:
            raise ValueError(f"{name}: no {END.format(name)}")
        text = f"{head}{BEGIN.format(name)}\n\n{TABLES[name]()}\n\n{mark}{tail}"
    return text
