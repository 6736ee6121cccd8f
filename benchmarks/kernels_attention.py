"""Attention, rotation and compaction of a decode round on a GPU: microseconds a layer, over tile configurations.

Every case is one CUDA graph over as many layers as the L2 cache cannot hold, each with its own KV.

python benchmarks/kernels_attention.py --out benchmarks/results/kernels_attention.json
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from report import Row, write_report
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.attention import prefill_attention, tree_attention
from kernels.attention_tiles import PATH_SPLITS, TileConfig, choose_splits, path_config, prefill_config, tree_config
from kernels.compact import compact
from kernels.rope import rope_write, rotary_angles
from kernels.tree import MAX_PATH, expand_tree

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DTYPE = torch.bfloat16
# Twice what an H200's L2 cache holds.
COLD_BYTES = 100 << 20
# Launches in a graph, at least: its start takes as long as a layer of the small cases.
GRAPH_STEPS = 24


@dataclass(frozen=True)
class Case:
    """`num_rows` requests of `row_tokens` tokens each behind `context` cached ones."""

    num_rows: int
    row_tokens: int
    context: int
    kind: str = "tree"

    def name(self) -> str:
        """As the rows of the report name it."""
        tokens = self.num_rows * self.row_tokens
        end = {"paths": " deterministic", "prefill": " prefill"}.get(self.kind, "")
        return f"heads32-8x128 plain b{self.num_rows} m{tokens} ctx{self.context / 1024:g}k bf16{end}"


CASES = [
    Case(1, 1, 1024),
    Case(1, 8, 4096),
    Case(1, 32, 1024),
    Case(1, 64, 1024),
    Case(1, 32, 16384),
    Case(1, 1, 16384),
    Case(16, 4, 1024),
    Case(64, 1, 1024),
    Case(1, 32, 1024, "paths"),
    Case(1, 1, 1024, "paths"),
    Case(1, 1, 16384, "paths"),
    Case(1, 2048, 0, "prefill"),
    Case(1, 512, 8192, "prefill"),
]


class Round:
    """A case's tensors on the device, and its launches for one layer."""

    def __init__(self, case: Case, layers: int | None = None) -> None:
        self.case = case
        tokens = case.num_rows * case.row_tokens
        pages = -(-(case.context + case.row_tokens) // PAGE)
        num_slots = case.num_rows * pages * PAGE
        self.kv_bytes = case.num_rows * (case.context + case.row_tokens) * KV_HEADS * DIM * DTYPE.itemsize * 2
        self.layers = layers or max(4, -(-COLD_BYTES // self.kv_bytes))
        shape = (self.layers, num_slots, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
        self.heads = torch.randn(self.layers, tokens, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device="cuda")
        self.q = torch.randn(tokens, HEADS, DIM, dtype=DTYPE, device="cuda")
        self.out = torch.empty(tokens, HEADS * DIM, dtype=DTYPE, device="cuda")
        self._describe(tokens, pages)

    def _describe(self, tokens: int, pages: int) -> None:
        """A binary tree in each row, or a chain."""
        case = self.case

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        places = range(case.row_tokens)
        tree = [(place - 1) // 2 if place else -1 for place in places]
        depths = [(place + 1).bit_length() - 1 for place in places]
        starts = [row * case.row_tokens for row in range(case.num_rows + 1)]
        self.first = ints(starts)
        self.parents = ints([start + parent if parent >= 0 else -1 for start in starts[:-1] for parent in tree])
        self.positions = ints([case.context + depth for _ in starts[:-1] for depth in depths])
        self.rows = ints([row for row in range(case.num_rows) for _ in places])
        self.cached_len = ints([case.context] * case.num_rows)
        self.table_rows = ints(list(range(case.num_rows)))
        # As wide as an engine's, which has room for the longest request.
        self.page_tables = torch.zeros(case.num_rows, 4096, dtype=torch.int32, device="cuda")
        shuffled = torch.randperm(case.num_rows * pages, device="cuda").int()
        self.page_tables[:, :pages] = shuffled.view(case.num_rows, pages)
        self.slots = ints([0] * tokens)
        self.mask = torch.zeros(tokens, -(-case.row_tokens // 32), dtype=torch.int32, device="cuda")
        self.path = torch.zeros(tokens, MAX_PATH, dtype=torch.int32, device="cuda")
        self.cos, self.sin = rotary_angles(self.positions, torch.rand(DIM // 2, device="cuda"), 1.0)
        if case.kind != "prefill":
            self.expand()
        else:
            self.slots.copy_(torch.arange(tokens))
        torch.cuda.synchronize()

    def expand(self) -> None:
        """What a round does once."""
        where = (self.first, self.cached_len, self.table_rows, self.page_tables)
        sizes = (PAGE, self.case.row_tokens)
        expand_tree(self.parents, self.rows, *where, self.positions, *sizes, self.slots, self.mask, self.path)

    def attend(self, layer: int, num_splits: int, config: TileConfig, pdl: bool, q: Tensor | None = None) -> None:
        """One layer's attention."""
        q = self.q if q is None else q
        where = (q, self.k[layer], self.v[layer], self.page_tables, self.table_rows, self.first, self.cached_len)
        shape = {"page_size": PAGE, "max_row_tokens": self.case.row_tokens, "scale": DIM**-0.5}
        options = {**shape, "out": self.out, "config": config, "pdl": pdl}
        if self.case.kind == "prefill":
            prefill_attention(*where, **options)  # type: ignore[arg-type]
        else:
            path = self.path if self.case.kind == "paths" else None
            tree_attention(*where, self.mask, num_splits=num_splits, path=path, **options)  # type: ignore[arg-type]

    def rotate(self, layer: int, pdl: bool) -> Tensor:
        """One layer's rotation and writing."""
        angles = (self.cos, self.sin, self.slots)
        return rope_write(self.heads[layer], *angles, self.k[layer], self.v[layer], HEADS, pdl=pdl)


def graph_us(step: Callable[[int], object], layers: int, repeats: int = 10) -> float:
    """Microseconds of `step` for a layer in a graph that goes over all layers; the median of replays."""
    step(0)
    torch.cuda.synchronize()
    steps = layers * -(-GRAPH_STEPS // layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(steps):
            step(number % layers)
    graph.replay()
    return median_us(graph.replay, repeats) / steps


def median_us(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of `work` on the device; the median."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def default_config(case: Case) -> TileConfig:
    """What the kernels choose for a case."""
    group = HEADS // KV_HEADS
    if case.kind == "prefill":
        return prefill_config(group, DIM, DTYPE)
    if case.kind == "paths":
        return path_config(group, DTYPE)
    return tree_config(case.row_tokens, group, DTYPE)


def configs(case: Case) -> list[TileConfig]:
    """The default, its neighbours, and the default with shorter and longer splits."""
    default = default_config(case)
    if case.kind == "prefill":
        tiles = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3)]
    elif case.kind == "paths":
        tiles = [(16, 32, 1, 3), (16, 32, 2, 3), (16, 64, 2, 4), (16, 64, 4, 3), (16, 128, 4, 3)]
    elif default.rows == 16:
        tiles = [(16, 64, 2, 3), (16, 64, 2, 4), (16, 64, 4, 3), (16, 128, 4, 3), (16, 32, 2, 4), (16, 32, 4, 4)]
    else:
        tiles = [(32, 64, 4, 3), (64, 32, 4, 5), (64, 64, 4, 2), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)]
    tried = [replace(default, rows=tile[0], keys=tile[1], num_warps=tile[2], num_stages=tile[3]) for tile in tiles]
    if default.rows == 64:
        # Two of these fit a processor: one works while the other waits.
        tried += [TileConfig(128, 32, 8, stages, max_registers=128) for stages in (3, 4)]
    keys = default.span * default.keys
    tried = [replace(config, span=max(keys // config.keys, 1)) for config in tried]
    spans = [] if case.kind == "prefill" else [default.span // 2, default.span + 1, default.span * 2]
    return list(dict.fromkeys([default, *tried, *(replace(default, span=span) for span in spans if span)]))


def splits(case: Case) -> list[int]:
    """What to try; the default comes first."""
    if case.kind == "prefill":
        return [1]
    if case.kind == "paths":
        return [PATH_SPLITS, 8]
    tokens = case.num_rows * case.row_tokens
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    default = choose_splits(tokens, case.num_rows, case.row_tokens, HEADS, KV_HEADS, processors)
    tried = [1, 2, 4] if case.num_rows > 1 else [8]
    return list(dict.fromkeys([default, *tried, *([16, 24, 32] if case.context > 4096 else [])]))


def compile_one(work: tuple[Case, TileConfig, bool]) -> None:
    """Fill Triton's cache on disk with one configuration, for every width of `combine`."""
    case, config, pdl = work
    small = Round(replace(case, context=min(case.context, 64)), layers=1)
    # One split has a kernel of its own, and so has each power of two of them in the sum.
    for num_splits in sorted({1 << (count - 1).bit_length() for count in splits(case)}):
        try:
            small.attend(0, num_splits, config, pdl)
        except OutOfResources as error:  # left out of the table, but named
            print(f"left out: {config}: {error}")
            return


def compile_all() -> None:
    """Compile in processes: each is bound to one core for seconds."""
    # The length of the context changes no kernel, but a long one has more splits tried.
    longest = {(case.num_rows, case.row_tokens, case.kind): case for case in sorted(CASES, key=lambda c: c.context)}
    work = dict.fromkeys((case, config, True) for case in longest.values() for config in configs(case))
    plain = dict.fromkeys((case, configs(case)[0], False) for case in longest.values())
    unprefetched = dict.fromkeys((case, replace(configs(case)[0], prefetch=False), True) for case in longest.values())
    processes = min(len(os.sched_getaffinity(0)), 16)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])
    with ProcessPoolExecutor(processes, context) as pool:
        list(pool.map(compile_one, [*work, *plain, *unprefetched]))


def show(config: TileConfig) -> str:
    """A configuration on a line of the table."""
    most = f" registers {config.max_registers}" if config.max_registers else ""
    tile = f"rows {config.rows:3d} keys {config.keys:3d} warps {config.num_warps} stages {config.num_stages}"
    return f"{tile} span {config.span}{most}"


def measure(case: Case, read_bytes_per_us: float) -> list[Row]:
    """The sweep of one case, and its default with and without early starts."""
    made, name = Round(case), case.name()
    floor = made.kv_bytes / read_bytes_per_us
    print(f"\n{name}: {made.layers} layers, KV read in {floor:.1f} us", flush=True)
    table: list[tuple[float, int, TileConfig]] = []
    for config, num_splits in itertools.product(dict.fromkeys(configs(case)), splits(case)):
        try:
            taken = graph_us(lambda layer, n=num_splits, c=config: made.attend(layer, n, c, True), made.layers)
        except OutOfResources:  # named by compile_one
            continue
        table.append((taken, num_splits, config))
    default = table[0]
    for taken, num_splits, config in [default, *sorted(table, key=lambda line: line[0])[:6]]:
        print(f"  {taken:8.2f} us  splits {num_splits:2d}  {show(config)}")
    _, num_splits, config = default
    best = min(table, key=lambda line: line[0])
    late = graph_us(lambda layer: made.attend(layer, num_splits, config, False), made.layers)
    cold = replace(config, prefetch=False)
    unasked = graph_us(lambda layer: made.attend(layer, num_splits, cold, True), made.layers)
    pair = graph_us(lambda layer: made.attend(layer, num_splits, config, True, made.rotate(layer, True)), made.layers)
    print(f"  default without PDL {late:.2f}, without prefetch {unasked:.2f}; with rope_write {pair:.2f}")
    rows = [
        Row(name, "attention_us_per_layer", default[0], "us"),
        Row(name, "attention_us_per_layer_best", best[0], "us"),
        Row(name, "attention_us_per_layer_without_pdl", late, "us"),
        Row(name, "rope_and_attention_us_per_layer", pair, "us"),
        Row(name, "attention_over_kv_read", default[0] / floor, "ratio"),
    ]
    if case.kind == "prefill":
        pairs = case.row_tokens * case.context + case.row_tokens * (case.row_tokens + 1) / 2
        rows.append(Row(name, "attention_tflops", pairs * 4 * HEADS * DIM / default[0] / 1e6, "TFLOP/s"))
        print(f"  {rows[-1].value:.0f} TFLOP/s")
    return rows


def measure_others() -> list[Row]:
    """Rotation, a round's tree, compaction of four nodes in 32 layers."""
    made = Round(Case(1, 32, 1024), layers=32)
    name = made.case.name()
    root = torch.zeros(1, dtype=torch.int32, device="cuda")
    accepted = torch.tensor([[2, 5, 11, 23]], dtype=torch.int32, device="cuda")
    count = torch.full((1,), 5, dtype=torch.int32, device="cuda")
    where = (made.first, made.cached_len, made.table_rows, made.page_tables, root, accepted, count)
    inv_freq = torch.rand(DIM // 2, device="cuda")
    steps: dict[str, tuple[Callable[[int], object], int]] = {
        "rope_write_us_per_layer": (lambda layer: made.rotate(layer, True), 32),
        "rotary_angles_us": (lambda _: rotary_angles(made.positions, inv_freq, 1.0), 32),
        "expand_tree_us": (lambda _: made.expand(), 32),
        "compact_us": (lambda _: compact(made.k, made.v, *where, PAGE), 8),
    }
    rows = [Row(name, metric, graph_us(step, count), "us") for metric, (step, count) in steps.items()]
    print()
    for row in rows:
        print(f"{row.metric:26s}{row.value:8.2f}")
    return rows


def read_rate() -> float:
    """Bytes a microsecond that a pass which only reads gets from memory; no graph, whose copies are slow."""
    source = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    total = torch.empty((), dtype=torch.float32, device="cuda")
    torch.sum(source, dim=0, out=total)
    return source.nbytes / median_us(lambda: torch.sum(source, dim=0, out=total), 10)


def main() -> None:
    """Parse options, compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    compile_all()
    rate = read_rate()
    device = torch.cuda.get_device_name(0)
    print(f"{device}: reads {rate / 1e6:.2f} TB/s")
    rows = [Row("device", "read_bytes_per_second", rate * 1e6, "B/s")]
    for case in CASES:
        rows += measure(case, rate)
    rows += measure_others()
    if options.out:
        write_report(options.out, "kernels_attention", device, rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
