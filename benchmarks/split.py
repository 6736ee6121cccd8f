"""Drafting on one GPU while another verifies: speed, accept length, hits, and where a round's time goes.

python benchmarks/split.py --model /models/llama-8b --prompts mt_bench.jsonl --verify-device cuda:0 \
    --draft-device cuda:1 --draft standalone=/models/noisy-0.10 --draft eagle3=/models/eagle3 \
    --cases plain standalone standalone,lockstep,steps=4,topk=1 standalone,lockstep,steps=8,topk=4,nodes=32 ngram \
    eagle3 standalone,t=0.8 standalone,t=0.8,rank_by_noise=false plain,b=16 standalone,b=16 \
    --out benchmarks/results/split_h200.json

A case is `plain`, or drafters as in --speculative-algorithm in small letters, joined by `+`, and `@LABEL` after one
that takes another model than the one given as --draft NAME=PATH. Behind it, after commas: `lockstep`, `b=` requests
at once, `t=` temperature, and options of the draft service (`steps`, `topk`, `nodes` for the speculative ones).
Verify stays up between cases; lockstep has a verify service of its own on the same GPU. Draft services are started
anew for every case, several at a time, but nothing starts while a case is measured. The first `--limit` prompts are
answered, in a batch at least two for each place; `--max-tokens` tokens each, past the end of sequence, through the
gateway. Texts are compared with plain decoding's in the same batch: on a GPU without --deterministic rounding may
part them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from service_options import add_service_arguments
from split_bench import Bench
from split_figures import table


def parse_arguments(argv: Iterable[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", help="the number format's name in results")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--warm-tokens", type=int, default=96)
    parser.add_argument("--draft", action="append", default=[], metavar="LABEL=PATH")
    parser.add_argument("--cases", nargs="+", default=["plain", "ngram"])
    parser.add_argument("--drafts-at-once", type=int, default=1, help="draft services started together")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which no case begins")
    add_service_arguments(parser, "llama-8b")
    return parser.parse_args(None if argv is None else list(argv))


def main() -> int:
    """Run and report."""
    bench = Bench(parse_arguments())
    start = time.perf_counter()
    bench.run()
    print(f"\n{table(bench.runs)}\n{time.perf_counter() - start:.0f} s in all")
    for text in bench.failed:
        print("FAILED", text[:300])
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
