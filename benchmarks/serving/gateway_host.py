"""Time of a gateway's Python for a message of an answer, part by part, without sockets and event loop.

Parts: decode verify's message, feed the answer (text, stop strings), meter it (Prometheus), encode the client's
message. Each figure is the fastest of several passes over one answer, in microseconds a message and a token.

python -m benchmarks.serving.gateway_host --out benchmarks/results/gateway_host_cpu.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gateway.core.answer import Answer
from gateway.core.metrics import AnswerMeter, GatewayMetrics
from gateway.core.request import Job
from gateway.core.tokenizer import Tokenizer
from gateway.servicer import encode_delta
from outrider.models.store import resolve_model
from outrider.protocol.generation import GenerationRequest, GenerationUpdate, RoundCounts, TokenOrigin
from outrider.protocol.generation_codec import UPDATE
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report

_TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while. "
_PARTS = ("decode", "feed", "meter", "encode")
_MESSAGES = 500

OutT = TypeVar("OutT")


def _timed(spent: list[float], step: Callable[..., OutT], *columns: Sequence[object]) -> list[OutT]:
    start = time.perf_counter()
    results = list(map(step, *columns))
    spent.append(time.perf_counter() - start)
    return results


def measure(tokenizer: Tokenizer, num_rounds: int, per_round: int, stop: tuple[str, ...], repeats: int) -> list[float]:
    """Return the seconds a message of each part, for messages with `num_rounds` rounds of `per_round` tokens."""
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    num_tokens = num_rounds * per_round
    origins = ([TokenOrigin.ACCEPTED] * (per_round - 1) + [TokenOrigin.BONUS]) * num_rounds
    rounds = [RoundCounts(4 * (per_round - 1), per_round - 1)] * num_rounds
    ids = [token_ids[i % len(token_ids)] for i in range(_MESSAGES * num_tokens)]
    sent = [
        UPDATE.encode(GenerationUpdate(ids[at : at + num_tokens], origins, rounds=rounds))
        for at in range(0, len(ids), num_tokens)
    ]
    passes: list[list[float]] = []
    for _ in range(repeats):
        request = GenerationRequest("bench", [1], SamplingParams(), max_tokens=len(ids) + 1)
        answer = Answer(Job(request, 1, stop, time.monotonic()), 0, tokenizer, place=0)
        meter = AnswerMeter(GatewayMetrics(), "model", answer)
        spent: list[float] = []
        chunks = _timed(spent, UPDATE.decode, sent)
        deltas = _timed(spent, answer.feed, chunks)
        _timed(spent, meter.chunk, chunks, deltas)
        _timed(spent, encode_delta, ["bench"] * len(deltas), deltas)
        passes.append(spent)
    return [min(part) / _MESSAGES for part in zip(*passes, strict=True)]


def main() -> None:
    """Measure, print and write the figures: see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="whose tokenizer is used")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(options.model))
    rows: list[Row] = []
    print("us a message " + "".join(f"{part:>9}" for part in (*_PARTS, "all", "a token")))
    for num_rounds, per_round, stop in ((1, 1, ()), (5, 1, ()), (1, 5, ()), (16, 1, ()), (5, 1, ("\n\n", "User:"))):
        seconds = measure(tokenizer, num_rounds, per_round, stop, options.repeats)
        case = f"gateway r{num_rounds} m{num_rounds * per_round}" + (" stop" if stop else "")
        values = [1e6 * part for part in seconds]
        rows += [Row(case, f"{part}_us", value, "us") for part, value in zip(_PARTS, values, strict=True)]
        rows.append(Row(case, "token_us", sum(values) / (num_rounds * per_round), "us"))
        shown = (*values, sum(values), sum(values) / (num_rounds * per_round))
        print(f"{case:<13}" + "".join(f"{value:9.1f}" for value in shown), flush=True)
    if options.out:
        write_report(options.out, "gateway_host", cpu_name(), rows, ("grpcio", "protobuf", "prometheus-client"))


if __name__ == "__main__":
    main()
