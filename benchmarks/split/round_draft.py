"""Device cost of drafting inside the round, with a block head and with an EAGLE-3 head.

Measured after a round that commits two tokens of each request: the draft model's work on them, steps and the choice of
nodes, without the round itself. Heads have the shape of an 8B model, and random weights, since only times matter;
`--small` takes the shape of the shipped head.

python -m benchmarks.split.round_draft --layers 1 2 5 --out benchmarks/results/round_draft_h100.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.split.block_draft import SMALL, SMALL_BLOCK, random_block_head
from benchmarks.split.draft_step import random_eagle3
from kernels.sampling_state import RoundTokens
from outrider.attention.triton_backend import TritonAttention
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.round_drafter import ChoiceShape, RoundDrafter, RoundResults, RoundShape
from outrider.models.capacity import ROUND_REGION
from outrider.models.drafters.base import DraftModel
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report

PAGE_SIZE, COMMITTED = 16, 2


class FixedRounds:
    """Rounds of `num_rows` requests; each request commits the same number of tokens after a context of `length`."""

    def __init__(self, model: DraftModel, num_rows: int, length: int, num_slots: int) -> None:
        device = model.device

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        rows, zeros = ints(*range(num_rows)), ints(*[0] * num_rows)
        tokens = RoundTokens(
            token_ids=zeros,
            positions=zeros + length - 1,
            parents=zeros,
            rows=rows,
            first=ints(*range(num_rows + 1)),
            root=rows,
            table_rows=rows,
            cached_len=zeros,
        )
        committed = ints(*[7] * num_rows * COMMITTED).view(num_rows, COMMITTED)
        self._results = RoundResults(tokens, zeros + COMMITTED, committed, zeros + 1)
        self._features = torch.randn(num_slots + 1, model.feature_size, dtype=model.dtype, device=device)

    def rows(self, slots: Tensor) -> Tensor:
        """See FeatureRows."""
        return self._features.index_select(0, slots)

    def results(self, shape: RoundShape) -> RoundResults:
        """See RoundExecutor."""
        return self._results

    def note_drafted(self) -> None:
        """See RoundExecutor."""


def measure(model: DraftModel, num_rows: int, context: int, steps: list[int], nodes: int, repeats: int) -> list[float]:
    """Return the milliseconds of drafting for each number of steps."""
    pages = -(-(context + 64) // PAGE_SIZE)
    shape = BurstShape(
        num_rows=num_rows,
        region=ROUND_REGION,
        branching=8,
        lone_branching=16,
        max_seeds=1,
        max_steps=max(steps),
        max_width=128,
        page_size=PAGE_SIZE,
        num_pages=num_rows * pages,
        max_context=pages * PAGE_SIZE,
        feature_size=model.feature_size,
    )
    rounds = FixedRounds(model, num_rows, context, num_rows * pages * PAGE_SIZE)
    round_shape = RoundShape(max(4, num_rows * COMMITTED), num_rows)
    drafter = RoundDrafter(
        model,
        shape,
        TritonAttention(),
        rounds,
        rounds.rows,
        max_round_tokens=round_shape.tokens,
        vocab_limit=model.target_vocab_size,
        floor=-1e9,
    )
    for row in range(num_rows):
        drafter.admit(row, SamplingParams(temperature=0.0))
        places = torch.arange(row * pages, (row + 1) * pages, dtype=torch.int32)
        drafter.memory.plan.page_tables[row, :pages] = places.to(model.device)
    if model.device.type == "cuda":
        drafter.capture([round_shape], [ChoiceShape(nodes, num_rows)])
    found = []
    for count in steps:
        drafter.grow(round_shape, count, nodes)
        if int((drafter.grown.order[:nodes] >= 0).sum()) < nodes:
            raise RuntimeError(f"fewer than {nodes} nodes grew in {count} steps")
        found.append(statistics.median(_time(drafter, round_shape, count, nodes) for _ in range(repeats)))
    return found


def _time(drafter: RoundDrafter, shape: RoundShape, num_steps: int, num_nodes: int) -> float:
    if drafter.memory.plan.page_tables.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        drafter.grow(shape, num_steps, num_nodes)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    drafter.grow(shape, num_steps, num_nodes)
    return (time.perf_counter() - began) * 1e3


@torch.inference_mode()
def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 2, 5])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--steps", nargs="+", type=int, default=[2, 5, 8])
    parser.add_argument("--nodes", type=int, default=16, help="chosen at the end")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    sizes, block = (SMALL, SMALL | SMALL_BLOCK) if options.small else ({}, {})
    models: list[tuple[str, DraftModel]] = [("eagle3", random_eagle3(sizes, device))]
    models += [(f"dspark-{layers}-layers", random_block_head(layers, block, device)) for layers in options.layers]
    rows = []
    for name, model in models:
        for batch in options.batches:
            case = f"{'smollm2-135m' if options.small else 'llama-8b'} {name} colocated b{batch} m{options.nodes}"
            case = f"{case} ctx{options.context / 1024:g}k bf16 greedy"
            found = measure(model, batch, options.context, options.steps, options.nodes, options.repeats)
            for steps, value in zip(options.steps, found, strict=True):
                print(f"{case:60s} {steps} steps {value:8.3f} ms", flush=True)
                rows.append(Row(case, f"draft_round_{steps}_steps_ms", value, "ms"))
    if options.out:
        where = torch.cuda.get_device_name() if on_gpu else cpu_name()
        write_report(options.out, "round_draft", where, rows, ("torch", "triton") if on_gpu else ("torch",))


if __name__ == "__main__":
    main()
