"""The code of kernels.cpu.head_step: what a step of a draft head does before its layers and behind them."""

from __future__ import annotations

from typing import Any

from kernels.cpu.code import F32, I64, Code, Module
from kernels.cpu.layout import COUNTERS, GROUP, HEAD, LANES, RUN, TILE, StackShape
from kernels.cpu.norm import float_bits, norm_row


def write_ends(module: Module, shape: StackShape) -> None:
    """`begin_draft` and `end_draft`: of the fields of a run and of a head, and counters; the latter of a thread's own
    memory, too."""
    _write_begin(Code(module, "begin_draft", ["run", "head", "counters"]), shape)
    code = Code(module, "end_draft", ["run", "head", "counters", "scratch"])
    run, head = code.fields(code.args["run"], RUN), code.fields(code.args["head"], HEAD)
    _write_logits(code, shape, run, head)
    _write_candidates(code, shape, run, head)
    code.done()


def _write_begin(code: Code, shape: StackShape) -> None:
    """Of each row the normed embedding and the normed feature, side by side, and the stream."""
    run, head = code.fields(code.args["run"], RUN), code.fields(code.args["head"], HEAD)
    size = 2 * shape.hidden
    with code.chunks(run["rows"], code.args["counters"]) as row:
        number = code.times(row, 8)
        token, feature = (
            code.plus(head[of], code.times(code.load_number(head[name], number), size))
            for name, of in (("tokens", "embedding"), ("taken", "features"))
        )
        given = code.plus(run["given"], code.times(row, 2 * size))
        normed = code.plus(given, size)
        for source, target, weight in ((token, given, "token_norm"), (feature, normed, "hidden_norm")):
            norm_row(code, source, target, head[weight], I64(shape.hidden), F32(shape.eps))
        is_normed = code.build.icmp_signed("!=", head["starts_normed"], I64(0))
        source = code.build.select(is_normed, normed, feature)
        code.copy(source, code.plus(run["stream"], code.times(row, size)), size)
    code.done()


def _write_logits(code: Code, shape: StackShape, run: dict[str, Any], head: dict[str, Any]) -> None:
    """The stream normed, times the output matrix."""
    size, blocks = 2 * shape.hidden, shape.hidden // GROUP
    normed = code.args["scratch"]
    prepared = code.plus(normed, run["at_prepared"])

    def prepare() -> None:
        code.run("norm", run["stream"], head["final_norm"], normed, run["rows"], shape.hidden, float_bits(shape.eps))
        with code.when(code.build.icmp_signed("!=", head["prepare"], I64(0))):
            code.run_at(head["prepare"], normed, size, blocks, run["rows"], prepared)

    with code.chunks(head["num_chunks"], code.plus(code.args["counters"], COUNTERS), prepare) as chunk:
        bounds = code.bounds(chunk, head["chunk"], head["num_tiles"])
        width = code.times(head["num_tiles"], 4 * TILE)
        code.run_at(
            head["tiles"], normed, size, head["output"], head["logits"], width, blocks, *bounds, run["rows"], prepared
        )


def _write_candidates(code: Code, shape: StackShape, run: dict[str, Any], head: dict[str, Any]) -> None:
    """Of each row what it leaves to its children, and the best of its logits, divided, unless none is wanted."""
    size, build = 2 * shape.hidden, code.build
    num_out = code.times(head["num_tiles"], TILE)
    with code.chunks(run["rows"], code.plus(code.args["counters"], 2 * COUNTERS)) as row:
        stream = code.plus(run["stream"], code.times(row, size))
        place = code.load_number(head["left"], code.times(row, 8))
        target = code.plus(head["features"], code.times(place, size))
        is_normed = build.icmp_signed("!=", head["leaves_normed"], I64(0))
        with build.if_else(is_normed) as (normed, plain):
            with normed:
                norm_row(code, stream, target, head["final_norm"], I64(shape.hidden), F32(shape.eps))
            with plain:
                code.copy(stream, target, size)
        with code.when(build.icmp_signed(">", head["best"], I64(0))):
            logits = code.plus(head["logits"], code.times(code.times(row, num_out), 4))
            divisor = code.load_same(head["divisors"], code.times(row, 4))
            with code.loop(0, num_out, LANES) as first:
                at = code.times(first, 4)
                code.store(build.fdiv(code.load_vector(logits, at), divisor), logits, at)
            skipped = code.times(code.times(row, head["best"]), 4)
            results = (code.plus(head[name], skipped) for name in ("found", "scores"))
            code.run_at(head["ranks"], logits, 1, num_out, head["ids"], *results, head["best"])
