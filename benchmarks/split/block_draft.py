"""Cost of drafting with a block head: of its block alone, and with a tree of eight levels read from the block.

One *outcome* is a root whose block is run; several are as many requests in one batch. Times are device times of a
burst, with the choice of nodes and the proposals. For comparison, an EAGLE-3 head runs eight steps. On a GPU, heads
have the shape of an 8B model; on a CPU that of the shipped head (a block head of two layers has as many weights).
All weights are random.

python -m benchmarks.split.block_draft --layers 1 2 5 --out benchmarks/results/block_draft_h200.json
python -m benchmarks.split.block_draft --device cpu --layers 2 --outcomes 1 --context 320
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.split.bursts import RowState, row_states, seeds_of
from benchmarks.split.draft_step import HEAD_8B, fill_random, random_eagle3, some_ids, start_runner
from outrider.drafting.model.burst import FORCED, Burst, BurstShape
from outrider.drafting.model.runner import RunnerOptions
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import MARKOV_INPUT, block_config
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report

PAGE_SIZE, WIDTH = 16, 8
LEVELS = 8


SMALL = {
    "hidden_size": 576,
    "intermediate_size": 2560,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
}
"""Sizes of the shipped head."""
SMALL_BLOCK = {"intermediate_size": 640, "markov_rank": 32}


def random_block_head(num_layers: int, sizes: dict[str, Any], device: torch.device) -> BlockHead:
    """Return a DSPARK head of random weights, with blocks of eight."""
    block = {"block_size": LEVELS, "mask_token_id": 1, "target_layer_ids": [1, 15, 28], "markov_rank": 256}
    fields = {**HEAD_8B, **block, **sizes, "num_hidden_layers": num_layers}
    config = block_config(fields, {MARKOV_INPUT}, 32)
    head = BlockHead(config, torch.bfloat16, device, some_ids(config.draft_vocab_size, device))
    fill_random(head)
    return head


class BlockDraftBench:
    """Requests of a runner; each root is run with the target's feature."""

    def __init__(self, model: DraftModel, outcomes: int, context: int) -> None:
        pages = -(-context // PAGE_SIZE)
        shape = BurstShape(
            num_rows=outcomes,
            region=256,
            branching=8,
            max_seeds=64,
            max_steps=LEVELS,
            max_width=WIDTH * outcomes,
            page_size=PAGE_SIZE,
            num_pages=outcomes * pages,
            max_context=context,
            feature_size=model.feature_size,
            has_blocks=model.block_bytes > 0,
        )
        self._runner = start_runner(model, shape, RunnerOptions())
        self._outcomes, self._context = outcomes, context
        for row in range(outcomes):
            self._runner.open(row, SamplingParams(temperature=0.0))
            self._runner.set_pages(row, range(row * pages, (row + 1) * pages))
        self._features = torch.randn(outcomes, model.feature_size, dtype=model.dtype, device=model.device)

    def measure(self, num_steps: int, repeats: int) -> float:
        """Return the milliseconds of a burst of `num_steps` steps. The first step runs the roots."""
        return statistics.median(self._run(num_steps) for _ in range(repeats))

    def _run(self, num_steps: int) -> float:
        count = self._outcomes
        ints = np.arange(count, dtype=np.int32)
        seeds = seeds_of(
            rows=ints,
            parents=np.full(count, -1, np.int32),
            tokens=ints + 7,
            positions=np.full(count, self._context, np.int32),
            scores=np.full(count, FORCED, np.float32),
            slots=np.zeros(count, np.int32),
            features=ints,
        )
        live = np.zeros(self._runner.shape.region, np.bool_)
        free = range(1, self._runner.shape.region)
        # The root's own key is the last one of its context.
        rows = row_states([RowState(row, self._context - 1, live, free) for row in range(count)], len(live))
        burst = Burst(rows, seeds, num_steps, WIDTH * count, -1e9, [self._features])
        on_gpu = self._features.is_cuda
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
        began = time.perf_counter()
        pending = self._runner.launch(burst)
        if on_gpu:
            end.record()
        result = pending.wait()
        whole = (time.perf_counter() - began) * 1e3
        wanted = count + (num_steps - 1) * WIDTH * count
        if (result.picked >= 0).sum() < wanted:
            raise RuntimeError(f"{(result.picked >= 0).sum()} nodes were run instead of {wanted}")
        return float(start.elapsed_time(end)) if on_gpu else whole


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 2, 5])
    parser.add_argument("--outcomes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    on_gpu = options.device == "cuda"
    device, sizes, block = torch.device("cpu"), SMALL, SMALL | SMALL_BLOCK
    if on_gpu:
        device, sizes, block = torch.device("cuda", 0), {}, {}
    models: list[tuple[str, DraftModel]] = [("eagle3", random_eagle3(sizes, device))]
    models += [(f"dspark-{layers}-layers", random_block_head(layers, block, device)) for layers in options.layers]
    shape = "llama-8b" if on_gpu else "smollm2-135m"
    rows = []
    for name, model in models:
        for outcomes in options.outcomes:
            bench = BlockDraftBench(model, outcomes, options.context)
            case = f"{shape} {name} split b{outcomes} m{WIDTH} ctx{options.context / 1024:g}k bf16 greedy"
            for metric, steps in (("draft_first_ms", 1), ("draft_tree_ms", LEVELS)):
                found = bench.measure(steps, options.repeats)
                print(f"{case:60s}{metric:16s}{found:8.3f}", flush=True)
                rows.append(Row(case, metric, found, "ms"))
    if options.out:
        where = torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {options.threads} threads"
        write_report(options.out, "block_draft", where, rows, ("torch", "triton") if on_gpu else ("torch",))


if __name__ == "__main__":
    main()
