"""What a draft of a block head costs on a GPU: its block alone, and a tree of eight levels read from it.

One *outcome* is a root whose block is run; several are so many requests in one batch. Times are those of the device for
a burst, the choice of nodes and the proposals included. An EAGLE-3 head's eight steps stand beside.

python -m benchmarks.split.block_draft --layers 1 2 5 --out benchmarks/results/block_draft_h200.json
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.split.bursts import RowState, row_states, seeds_of
from benchmarks.split.draft_step import HEAD_8B, fill_random, random_head
from outrider.attention.triton_backend import TritonAttention
from outrider.drafting.model.burst import FORCED, Burst, BurstShape
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.drafting.model.runner import RunnerOptions
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.block import BlockHead
from outrider.models.drafters.config import MARKOV_INPUT, block_config
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, write_report

PAGE_SIZE, WIDTH = 16, 8
LEVELS = 8


def random_block_head(num_layers: int, device: torch.device) -> BlockHead:
    """A DSPARK head of random weights at the shape of an 8B model, with blocks of eight."""
    fields = {
        **HEAD_8B,
        "num_hidden_layers": num_layers,
        "block_size": LEVELS,
        "mask_token_id": 1,
        "target_layer_ids": [1, 15, 28],
        "markov_rank": 256,
    }
    config = block_config(fields, {MARKOV_INPUT}, 32, 4096)
    ids = torch.arange(0, 4 * config.draft_vocab_size, 4, dtype=torch.int32, device=device)
    head = BlockHead(config, torch.bfloat16, device, ids)
    fill_random(head)
    return head


class BlockDraftBench:
    """Requests of a runner, each with a root that is run with the target's feature."""

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
        )
        self._runner = CudaRunner(model, shape, TritonAttention(), RunnerOptions())
        self._runner.capture()
        self._outcomes, self._context = outcomes, context
        for row in range(outcomes):
            self._runner.open(row, SamplingParams(temperature=0.0))
            self._runner.set_pages(row, range(row * pages, (row + 1) * pages))
        self._features = torch.randn(outcomes, model.feature_size, dtype=model.dtype, device=model.device)

    def measure(self, num_steps: int, repeats: int) -> float:
        """Milliseconds of the device for a burst of so many steps, the first of which runs the roots."""
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
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        pending = self._runner.launch(burst)
        end.record()
        result = pending.wait()
        wanted = count + (num_steps - 1) * WIDTH * count
        if (result.picked >= 0).sum() < wanted:
            raise RuntimeError(f"{(result.picked >= 0).sum()} nodes were run instead of {wanted}")
        return float(start.elapsed_time(end))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 2, 5])
    parser.add_argument("--outcomes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    models: list[tuple[str, DraftModel]] = [
        (f"dspark-{layers}-layers", random_block_head(layers, device)) for layers in options.layers
    ]
    models.append(("eagle3", random_head(device, torch.bfloat16)))
    rows = []
    for name, model in models:
        for outcomes in options.outcomes:
            bench = BlockDraftBench(model, outcomes, options.context)
            case = f"llama-8b {name} split b{outcomes} m{WIDTH} ctx{options.context / 1024:g}k bf16 greedy"
            for metric, steps in (("draft_first_ms", 1), ("draft_tree_ms", LEVELS)):
                found = bench.measure(steps, options.repeats)
                print(f"{case:60s}{metric:16s}{found:8.3f}", flush=True)
                rows.append(Row(case, metric, found, "ms"))
    if options.out:
        write_report(options.out, "block_draft", torch.cuda.get_device_name(), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
