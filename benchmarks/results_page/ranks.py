"""Tables of ranks: the exchange between them, and a round of a target that is cut in N."""

from __future__ import annotations

from benchmarks.results_page.reports import Cells, ResultFile, report, table, targets
from kernels.exchange import two_shot_pays

EXCHANGE, CUT = "exchange_h100x2", "cut_round_h100"
WIDTHS = (4096, 8192)
JOINED = "join m{} w64128 float32"
HIDDEN, LAYERS = 8192, 80
LARGE = (
    ("ranks_70b_tp2_h100x4", "llama-70b", "H100", 2, (1, 16)),
    ("ranks_70b_tp4_h100x4", "llama-70b", "H100", 4, (1, 16)),
    ("ranks_70b_fp8_tp2_h100x4", "llama-70b-fp8", "H100", 2, (1, 16)),
    ("ranks_70b_fp8_tp4_h100x4", "llama-70b-fp8", "H100", 4, (1, 16)),
    ("ranks_70b_fp8_tp4_h200x4", "llama-70b-fp8", "H200", 4, (1,)),
    ("ranks_70b_fp8_tp2_h200x2", "llama-70b-fp8", "H200", 2, (1, 16)),
)
"""Report, label, GPU, ranks, requests at once."""
LARGE_MATRICES = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * 1024 + 3 * HIDDEN * 28672)
LARGE_HEAD_BYTES = 2 * 49152 * HIDDEN
"""Of the output matrix, which stays in bf16."""
BYTES_PER_SECOND = {"H100": 3.35e12, "H200": 4.8e12}
"""By the vendor's datasheet."""


def _sizes(one: ResultFile, width: int) -> list[int]:
    """Rows of the messages of that width, ascending."""
    names = {row.case for row in one.rows if row.case.startswith("one-shot") and f" w{width} " in row.case}
    return sorted(int(name.split()[1].removeprefix("m")) for name in names)


def exchange_table() -> str:
    """By the size of a message: ours, the norm alone, NCCL."""
    one = report(EXCHANGE)
    lines: list[Cells] = []
    for width in WIDTHS:
        for count in _sizes(one, width):
            case, other = (f"{kind} m{count} w{width} bfloat16" for kind in ("one-shot", "two-shot"))
            fused, norm = one(case, "exchange_us"), one(case, "norm_us")
            lines.append(
                (
                    f"{2 * count * width / 1024:,.0f}",
                    f"{count} x {width}",
                    f"{fused:.1f}",
                    f"{norm:.1f}",
                    f"{fused - norm:.1f}",
                    one.cell(other, "exchange_us", ".1f") if (other, "exchange_us") in one else "",
                    one.cell(case, "sum_us", ".1f"),
                    one.cell(case, "NCCL_and_norm_us", ".1f"),
                )
            )
    head = (
        "KiB",
        "rows",
        "sum, residual and norm, us",
        "norm alone",
        "difference",
        "by two shots",
        "sum alone",
        "NCCL, then residual and norm",
    )
    joins = [
        (f"{count}", *(one.cell(JOINED.format(count), name, ".1f") for name in ("exchange_us", "NCCL_us")))
        for count in (1, 8, 32)
    ]
    checked = [row.value for row in one.rows if row.metric == "repetitions"]
    wrong = sum(row.value for row in one.rows if row.metric == "wrong_numbers")
    words = f"{sum(checked):,.0f} repetitions with random delays, {wrong:.0f} wrong numbers."
    aims = [("72 KiB, two ranks, us", "at most", 8.0, [("", one("one-shot m9 w4096 bfloat16", "exchange_us"))])]
    logits = table(("rows of logits, 64,128 columns a rank", "joined, us", "NCCL's all-gather, us"), joins)
    return f"{one.source()}\n\n{words}\n\n{table(head, lines)}\n\n{logits}\n\n{targets(aims)}"


def served_table() -> str:
    """Two ranks beside one, plain and with the 135M draft inside the rounds."""
    one = report("ranks_8b_h100x2")
    lines, aims = [], []
    for batch in (1, 16, 64):
        cells: list[str] = []
        for how in ("plain", "standalone"):
            alone, both = (f"llama-8b {how} {ranks} b{batch} bf16 greedy" for ranks in ("tp1", "tp2 peer"))
            over = one(both) / one(alone)
            cells += [*(one.cell(case, "tokens_per_second", ",.0f") for case in (alone, both)), f"{over:.2f}"]
            cells += [one.cell(case, "round_gpu_ms" if how == "plain" else "accept_length") for case in (alone, both)]
            aims += (
                [("two ranks over one, batch 1", "at least", 1.55, [("", over)])]
                if (how, batch) == ("plain", 1)
                else []
            )
        lines.append((f"{batch}", *cells))
    head = (
        "requests",
        "one rank, tokens/s",
        "two",
        "over one",
        "round on the GPU, ms",
        "of two, ms",
        "135M draft inside, one rank, tokens/s",
        "two",
        "over one",
        "accept length",
        "of two",
    )
    return f"{one.source()}\n\n{table(head, lines)}\n\n{targets(aims)}"


def head_table() -> str:
    """An EAGLE-3 head inside the rounds of two ranks: rank 0's alone, and cut."""
    whole, cut = report("ranks_eagle3_alone_h200x2"), report("ranks_eagle3_cut_h200x2")
    lines, gains = [], []
    for batch in (1, 16):
        plain, head = (f"llama-8b {how} tp2 peer b{batch} bf16 greedy" for how in ("plain", "eagle3"))
        over = whole(head, "round_ms") / cut(head, "round_ms")
        gains.append((f"{batch}", over))
        cells = [cut.cell(plain, "tokens_per_second", ",.0f")]
        cells += [one.cell(head, "tokens_per_second", ",.0f") for one in (whole, cut)]
        cells += [one.cell(head, name) for name in ("accept_length", "round_ms") for one in (whole, cut)]
        lines.append((f"{batch}", *cells, f"{over:.2f}"))
    head_line = (
        "requests",
        "plain, tokens/s",
        "head on rank 0 alone",
        "cut",
        "accept length, alone",
        "cut",
        "round, ms, alone",
        "cut",
        "alone over cut",
    )
    aims = [("round on rank 0 alone over cut", "at least", 1.0, gains)]
    return f"{whole.source()}\n\n{cut.source()}\n\n{table(head_line, lines)}\n\n{targets(aims)}"


def large_table() -> str:
    """A 70B target on two and four ranks, plain and with the 135M draft inside its rounds."""
    lines, drafted, read = [], [], []
    for name, label, gpu, ranks, batches in LARGE:
        one, form = report(name), "fp8" if "fp8" in label else "bf16"
        num_bytes = LARGE_MATRICES * (1 if form == "fp8" else 2) + LARGE_HEAD_BYTES
        floor = 1e3 * num_bytes / ranks / BYTES_PER_SECOND[gpu]
        for batch in batches:
            plain, draft = (f"{label} {how} tp{ranks} peer b{batch} bf16 greedy" for how in ("plain", "standalone"))
            over, ms = one(draft) / one(plain), one(plain, "round_gpu_ms")
            if batch == 1:
                read.append((f"{form}, {ranks} {gpu}s", ms / floor))
                drafted.append((f"{form}, {ranks} {gpu}s", over))
            cells = [one.cell(plain, "tokens_per_second", ",.0f"), f"{ms:.2f}", f"{floor:.1f}", f"{ms / floor:.2f}"]
            cells += [one.cell(draft, "tokens_per_second", ",.0f"), f"{over:.2f}", one.cell(draft, "accept_length")]
            lines.append((form, f"{ranks} {gpu}s", f"{batch}", *cells))
    head = (
        "weights",
        "GPUs",
        "requests",
        "plain, tokens/s",
        "round on the GPU, ms",
        "its weights, read once",
        "over that",
        "135M draft inside, tokens/s",
        "over plain",
        "accept length",
    )
    aims = [
        ("plain, one request, over bytes by bandwidth", "at most", 1.25, read),
        ("with the 135M draft over plain, one request", "at least", 2.2, drafted),
    ]
    sources = "\n\n".join(report(name).source() for name, *_ in LARGE)
    return f"{sources}\n\n{table(head, lines)}\n\n{targets(aims)}"


def exchange_us(one: ResultFile, count: int, ranks: int) -> float:
    """Of `count` rows of HIDDEN between `ranks`: measured for two; for more, two's and the further bytes' time."""
    two_shot = two_shot_pays(2 * count * HIDDEN, ranks)
    kind = "two-shot" if two_shot else "one-shot"
    messages = 2 * (ranks - 1) / ranks if two_shot else ranks - 1
    few, many = (f"one-shot m{size} w{HIDDEN} bfloat16" for size in (32, 128))
    us_a_row = (one(many, "exchange_us") - one(few, "exchange_us")) / 96
    return one(f"{kind} m{count} w{HIDDEN} bfloat16", "exchange_us") + (messages - 1) * count * us_a_row


def cut_table() -> str:
    """Milliseconds of a round of a 70B target, by ranks and tokens."""
    cut, exchange = report(CUT), report(EXCHANGE)
    lines: list[Cells] = []
    for ranks in (1, 2, 4, 8):
        for count in (1, 8, 32, 64):
            case = f"tp{ranks} m{count}"
            products = LAYERS * sum(cut(case, f"{name}_us") for name in ("qkv", "output", "gate_up", "down"))
            attention = [LAYERS * cut(f"{case} ctx{context}k", "attention_us") for context in (1, 4)]
            between = cut(f"m{count}", "norm_us") if ranks == 1 else exchange_us(exchange, count, ranks)
            parts = [products, attention[0], 2 * LAYERS * between, cut(case, "head_us")]
            total = sum(parts)
            cells = [f"{part / 1000:.2f}" for part in (*parts, total, total - attention[0] + attention[1])]
            lines.append((f"{ranks}", f"{count}", *cells, f"{1e6 / total:.0f}"))
    head = (
        "ranks",
        "tokens",
        "products, ms",
        "attention over 1k",
        "exchange and norms",
        "logits",
        "sum",
        "sum over 4k",
        "rounds a second over 1k",
    )
    return f"{cut.source()}\n\n{table(head, lines)}"
