"""Tables of quantized targets: effect of formats on text, rounds, tokens per second and drafts."""

from __future__ import annotations

from benchmarks.results_page.reports import Cells, report, table, targets

TEXT, ENGINE = "quantized_text", "engine_quantized_h200"
LONG_ENGINE = "engine_quantized_h100"
SPEC = {"fp8": "split_fp8_growth_h200", "bf16": "split_bf16_growth_h200"}
TEXT_CASES = {
    "fp8": "fp8 per channel",
    "fp8-block": "fp8 in blocks",
    "int4 g64": "int4, groups of 64",
    "mxfp4": "MXFP4",
}
FORMATS = {"fp8": "fp8", "block": "block-fp8", "int4": "int4"}
ROUNDS = ((1, 1), (1, 8), (1, 32), (1, 64), (16, 16), (64, 64))
PLAIN = (1, 16, 64)
DETERMINISTIC = {"fp8": ("plain", "ngram", "eagle3 colocated"), "int4": ("plain", "ngram")}
LONG = "plain engine b16 m16 ctx16k"
EXPERTS = {"bf16": "experts_h100", "fp8": "experts_fp8_h100"}
EXPERT_BATCHES = (1, 8, 16)
PRODUCTS = {
    "qwen3-30b-a3b": {
        "bf16": "bf16",
        "fp8": "fp8 per channel",
        "block": "fp8 in blocks",
        "int4": "int4",
        "mxfp4": "MXFP4",
    },
    "gpt-oss-20b": {"mxfp4": "MXFP4"},
}
PRODUCT_TOKENS = (1, 8, 16, 32, 64)


def text_table() -> str:
    """Return the table of perplexity by format, rounded to the nearest and calibrated."""
    one = report(TEXT)
    lines: list[Cells] = []
    for name, words in TEXT_CASES.items():
        cells = []
        for calibration in ("nearest", "own"):
            case = f"smollm2-135m {name} {calibration}"
            cells.append(
                f"{one(case, 'perplexity_over_unquantized'):.3f} ± {one(case, 'standard_error'):.3f} "
                f"({one(case, 'same_likeliest_token'):.0%})"
            )
        lines.append((words, *cells))
    head = ("format", "rounded to nearest", "calibrated with the model's own text")
    aims = [
        (
            "perplexity of fp8 over unquantized",
            "at most",
            1.01,
            [
                (words, one(f"smollm2-135m {name} own", "perplexity_over_unquantized"))
                for name, words in list(TEXT_CASES.items())[:2]
            ],
        )
    ]
    return f"{one.source()}\n\n{table(head, lines)}\n\n{targets(aims)}"


def _case(num_rows: int, num_tokens: int) -> str:
    return f"llama-8b {'plain' if num_tokens == num_rows else 'tree'} engine b{num_rows} m{num_tokens} ctx1k"


def engine_table() -> str:
    """Return the table of rounds and plain decoding by format."""
    one = report(ENGINE)
    labels = {"bf16": "bf16", **FORMATS}
    lines: list[Cells] = []
    for num_rows, num_tokens in ROUNDS:
        case = _case(num_rows, num_tokens)
        cells = [
            f"{one(f'{case} {label}', 'round_gpu_ms'):.2f} ({one(f'{case} {label}', 'round_gpu_over_gemm'):.2f})"
            for label in labels
        ]
        lines.append((f"{num_rows}", f"{num_tokens}", *cells))
    rounds = table(("requests", "tokens", *(f"{name}, ms" for name in labels.values())), lines)
    lines = []
    for num_rows in PLAIN:
        case = _case(num_rows, num_rows)
        cells = [
            f"{one(f'{case} {label}'):,.0f} ({one(f'{case} {label}', 'tokens_per_second_over_bf16'):.2f})"
            for label in FORMATS
        ]
        lines.append((f"{num_rows}", f"{one(f'{case} bf16'):,.0f}", *cells))
    speeds = table(("requests", "bf16, tokens/s", *FORMATS.values()), lines)
    over = "tokens_per_second_over_bf16"
    aims = [
        ("one request, fp8 over bf16", "at least", 1.6, [("", one(f"{_case(1, 1)} fp8", over))]),
        ("one request, block-fp8", "at least", 1.5, [("", one(f"{_case(1, 1)} block", over))]),
        ("one request, int4", "at least", 2.0, [("", one(f"{_case(1, 1)} int4", over))]),
        ("16 requests, fp8", "at least", 1.4, [("", one(f"{_case(16, 16)} fp8", over))]),
        ("64 requests, fp8", "at least", 1.25, [("", one(f"{_case(64, 64)} fp8", over))]),
        (
            "round of 32 tree tokens, ratio to its bare products",
            "at most",
            1.25,
            [(FORMATS[label], one(f"{_case(1, 32)} {label}", "round_gpu_over_gemm")) for label in ("fp8", "int4")],
        ),
    ]
    return (
        f"{one.source()}\n\nMilliseconds per round, and in brackets the ratio to the bare products with the same "
        f"weights:\n\n{rounds}\n\nPlain decoding in tokens/s, and in brackets the ratio to bf16:\n\n"
        f"{speeds}\n\n{targets(aims)}"
    )


def long_table() -> str:
    """Return the table of 16 requests of 16,384 tokens by the formats of weights and KV."""
    one = report(LONG_ENGINE)
    lines: list[Cells] = []
    for label in ("bf16", "fp8"):
        for kv, name in (("", "bf16"), (" kv-fp8", "fp8")):
            case, fit = f"llama-8b {LONG}{kv} {label}", f"llama-8b ctx16k{kv} {label}"
            figures = (f"{one(case):,.0f}", one.cell(case, "round_gpu_ms"), one.cell(fit, "requests_that_fit", ".0f"))
            lines.append((label, name, *figures))
    return table(("weights", "KV", "tokens/s", "round, ms", "requests that fit in 88 % of 80 GB"), lines)


def deterministic_table() -> str:
    """Return the table of --deterministic answers that equal those of plain decoding one at a time."""
    lines: list[Cells] = []
    for kind, drafters in DETERMINISTIC.items():
        one = report(f"deterministic_{kind}_h100")
        for drafter in drafters:
            cases = [
                f"llama-8b-{kind} {drafter} deterministic b{batch} bf16 {decoding}"
                for batch in (1, 8)
                for decoding in ("greedy", "t0.8")
            ]
            equal = (f"{one(case, 'equal_answers'):.0f} of 8" for case in cases)
            accepted = "" if drafter == "plain" else one.cell(cases[0], "accept_length")
            lines.append((kind, {"eagle3 colocated": "EAGLE-3 inside rounds"}.get(drafter, drafter), *equal, accepted))
    head = ("weights", "draft", "batch 1, greedy", "t0.8", "batch 8, greedy", "t0.8", "accept length, batch 1, greedy")
    return f"{report('deterministic_fp8_h100').source()}\n\n{table(head, lines)}"


def spec_table() -> str:
    """Return the table of the same drafts with a target in fp8 and in bf16."""
    lines: list[Cells] = []
    ratios = []
    for drafter, words in (
        ("plain b1 n6", "none"),
        ("standalone colocated b1", "135M draft"),
        ("eagle3 colocated b1", "EAGLE-3"),
    ):
        cases = {kind: (report(name), f"llama-8b {drafter} {kind} greedy") for kind, name in SPEC.items()}
        found = {kind: one(case) for kind, (one, case) in cases.items()}
        accept = [one.cell(case, "accept_length") for one, case in cases.values()]
        ratio = found["fp8"] / found["bf16"]
        lines.append((words, *(f"{value:.0f}" for value in found.values()), f"{ratio:.2f}", " / ".join(accept)))
        if words != "none":
            ratios.append((words, ratio))
    head = ("draft (inside rounds)", "fp8, tokens/s", "bf16, tokens/s", "ratio", "accept length, fp8 / bf16")
    aims = [("fp8 over bf16 with drafts", "at least", 1.3, ratios)]
    return f"{report(SPEC['fp8']).source()}\n\n{table(head, lines)}\n\n{targets(aims)}"


def experts_table() -> str:
    """Return the table of a model with experts, plain and with a draft inside, and of its weights' reading time."""
    lines: list[Cells] = []
    over: list[tuple[str, float]] = []
    sources = []
    for form, name in EXPERTS.items():
        one = report(name)
        sources.append(one.source())
        for batch in EXPERT_BATCHES:
            tail = f"b{batch} {form} greedy"
            plain, draft = f"qwen3-30b-a3b plain {tail}", f"qwen3-30b-a3b standalone colocated {tail}"
            ratio = one(draft, "speedup_over_plain")
            over.append((f"{form}, {batch}", ratio))
            lines.append(
                (
                    *(form, str(batch), f"{one(plain):,.0f}", one.cell(plain, "round_ms"), one.cell(plain, "floor_ms")),
                    *(f"{one(draft):,.0f}", f"{ratio:.2f}", one.cell(draft, "accept_length")),
                )
            )
    head = (
        "",
        "batch",
        "plain, tokens/s",
        "round, ms",
        "reading its weights, ms",
        "draft, tokens/s",
        "speedup over plain",
        "accept length",
    )
    aims = [("speedup of the draft over plain, by format and batch", "at least", 0.98, over)]
    return "\n\n".join((*sources, table(head, lines), targets(aims)))


def expert_products_table() -> str:
    """Return the table of both products of a layer of experts by number of tokens, ours and the library's."""
    one = report("expert_products_h100")
    lines: list[Cells] = []
    for model, kinds in PRODUCTS.items():
        for kind, words in kinds.items():
            cells = []
            for count in PRODUCT_TOKENS:
                case = f"{model} {kind} m{count}"
                ours = [(f"{case} {part} ours", "product_us") for part in ("gate_up", "down")]
                library = [(f"{case} {part}", "product_us") for part in ("gate_up library, gated", "down library")]
                us = sum(one(*row) for row in ours)
                text = f"{us:.0f}"
                if library[0] in one:
                    theirs = sum(one(*row) for row in library)
                    text += f", {theirs:.0f} ({theirs / us:.2f})"
                cells.append(text)
            lines.append((model, words, *cells))
    head = ("shape", "weights", *(f"{count} tokens" if count > 1 else "1 token" for count in PRODUCT_TOKENS))
    return f"{one.source()}\n\n{table(head, lines)}"
