"""Tables of ranks: two ranks and a split on the same GPUs, the exchange between ranks, and a 70B target."""

from __future__ import annotations

from benchmarks.results_page.reports import Cells, ResultFile, report, table, targets
from benchmarks.results_page.split_tables import PLAIN

EXCHANGE = "exchange_h100x2"
WIDTHS = (4096, 8192)
JOINED = "join m{} w64128 float32"
HIDDEN, LAYERS = 8192, 80
LARGE = (
    ("ranks_70b_tp2_h100x4", "llama-70b", "H100", 2, (1, 16)),
    ("ranks_70b_tp4_h100x4", "llama-70b", "H100", 4, (1, 16)),
    ("ranks_70b_fp8_tp2_h200x2", "llama-70b-fp8", "H200", 2, (1, 16)),
    ("ranks_70b_fp8_tp4_h200x4", "llama-70b-fp8", "H200", 4, (1,)),
)
"""Report, label, GPU, ranks, requests at once."""
LARGE_MATRICES = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * 1024 + 3 * HIDDEN * 28672)
LARGE_HEAD_BYTES = 2 * 49152 * HIDDEN
"""Bytes of the output matrix, which stays in bf16."""
SPEED = "tokens_per_second"
TWO_GPUS_COLUMNS = ((SPEED, ",.0f"), ("accept_length", ".2f"))
BYTES_PER_SECOND = {"H100": 3.35e12, "H200": 4.8e12}
"""Memory bandwidth by the vendor's datasheet."""


def _sizes(one: ResultFile, width: int) -> list[int]:
    """Return the numbers of rows of the messages with this width, ascending."""
    names = {row.case for row in one.rows if row.case.startswith("one-shot") and f" w{width} " in row.case}
    return sorted(int(name.split()[1].removeprefix("m")) for name in names)


def exchange_table() -> str:
    """Return the table of exchanges by size of message: ours, the norm alone, NCCL."""
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
        "two-shot",
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
    logits = table(("rows of logits, 64,128 columns per rank", "ours, us", "NCCL's all-gather, us"), joins)
    return f"{one.source()}\n\n{words}\n\n{table(head, lines)}\n\n{logits}\n\n{targets(aims)}"


def two_gpus_table() -> str:
    """Return the table of two GPUs as two ranks that draft inside their rounds, and as a split."""
    ranks, split, split_80 = report("split_ranks_h200x2"), report("split_6_h200x2"), report("split_80_h200x2")
    inside, apart = "llama-8b {} colocated {} bf16 greedy", "llama-8b {} split {} bf16 greedy"
    draft, eagle3 = "standalone", "eagle3"
    compared = (
        ("plain, one request", split, PLAIN, PLAIN),
        ("135M draft, six questions", split, apart.format(draft, "b1"), inside.format(draft, "b1")),
        ("135M draft, all 80", split, apart.format(draft, "b1 n80"), inside.format(draft, "b1 n80")),
        ("135M draft, 16 requests", split, apart.format(draft, "b16"), inside.format(draft, "b16")),
        ("EAGLE-3, six questions", split, apart.format(eagle3, "b1"), inside.format(eagle3, "b1")),
        ("EAGLE-3, all 80", split_80, apart.format(eagle3, "b1"), inside.format(eagle3, "b1 n80")),
    )
    lines: list[Cells] = []
    speeds: dict[str, tuple[float, float]] = {}
    for title, source, of_split, of_ranks in compared:
        cases = ((source, of_split), (ranks, of_ranks))
        cells = [one.cell(case, name, form) for one, case in cases for name, form in TWO_GPUS_COLUMNS]
        speeds[title] = source(of_split), ranks(of_ranks)
        lines.append((title, *cells, f"{speeds[title][1] / speeds[title][0]:.2f}"))
    cells = [ranks.cell(inside.format(eagle3, "b16"), name, form) for name, form in TWO_GPUS_COLUMNS]
    lines.append(("EAGLE-3, 16 requests", "", "", *cells, ""))
    head = ("", "split, tokens/s", "accept length", "two ranks, tokens/s", "accept length", "ranks over split")
    sources = "\n\n".join(one.source() for one in (ranks, split, split_80))

    def both(title: str) -> list[tuple[str, float]]:
        six, (split_all, ranks_all) = speeds[f"{title}, six questions"], speeds[f"{title}, all 80"]
        return [("split, 80", split_all), ("ranks, six", six[1]), ("ranks, 80", ranks_all)]

    one_gpu, two_ranks = speeds["plain, one request"]
    aims = [
        ("tokens/s, 135M draft", "at least", 850, both("135M draft")),
        ("tokens/s, EAGLE-3", "at least", 700, both("EAGLE-3")),
        ("speedup of two ranks over one GPU, plain decoding", "at least", 1.55, [("", two_ranks / one_gpu)]),
    ]
    return f"{sources}\n\n{table(head, lines)}\n\n{targets(aims)}"


def large_table() -> str:
    """Return the table of a 70B target on two and four ranks, plain and with the 135M draft inside its rounds."""
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
        "reading its weights once, ms",
        "ratio",
        "135M draft inside, tokens/s",
        "speedup over plain",
        "accept length",
    )
    aims = [
        ("plain, one request, ratio to reading the weights once", "at most", 1.25, read),
        ("speedup of the 135M draft over plain, one request", "at least", 2.2, drafted),
    ]
    sources = "\n\n".join(report(name).source() for name, *_ in LARGE)
    return f"{sources}\n\n{table(head, lines)}\n\n{targets(aims)}"
