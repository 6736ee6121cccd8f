"""Products with few rows on a GPU: ways to cut them, and a model's chain of them, against cuBLAS.

python benchmarks/kernels_gemm.py --out benchmarks/results/kernels_gemm.json

Weights are read from memory: each graph goes through more than 500 MB of distinct ones. First many cuts are tried at 32
rows, then the best of them at other row counts, then neighbours of the winners. The winners are printed as Python, for
kernels/gemm_configs.py. A cut that does not compile, does not fit or computes something else is counted and left out.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from engine_timing import copy_rate
from gemm_chains import CHAINS, chain_kernels, model_chain
from gemm_cuts import LAYER, SHAPES, SMALL, Shape
from gemm_sweep import Compiler, Timer, sweep
from gemm_timing import time_graph
from report import Row, write_report

from kernels.gemm_configs import tile_rows


def print_winners(timer: Timer, shapes: list[Shape], row_counts: list[int]) -> list[Row]:
    """A table, the winners as Python, and rows for the report."""
    rows: list[Row] = []
    literal: dict[object, str] = {}
    print(f"\n{'product':>9}{'M':>5}{'cuBLAS':>9}{'ours':>9}{'ratio':>7}  TB/s of weights, best cut")
    for shape in shapes:
        for num_rows in row_counts:
            best = timer.best(shape, num_rows, 1)
            if not best:
                continue
            cublas = timer.cublas(shape, num_rows)
            model = "smollm2-135m" if shape in SMALL else "llama-8b"
            found, case = best[0], f"{model} {shape.name} m{num_rows} bf16"
            rates = [shape.bytes / seconds / 1e12 for seconds in (cublas, found.seconds)]
            cut = ", ".join(f"{name}={value}" for name, value in asdict(found.config).items())
            print(f"{shape.name:>9}{num_rows:5d}{rates[0]:9.2f}{rates[1]:9.2f}{rates[1] / rates[0]:7.2f}  {cut}")
            key = (shape.num_out, shape.size, shape.gated, tile_rows(num_rows))
            literal[key] = f"    {key}: {found.config!r},"
            rows += [
                Row(case, "weight_bandwidth", rates[1], "TB/s"),
                Row(f"cublas {case}", "weight_bandwidth", rates[0], "TB/s"),
                Row(case, "gemm_us", found.seconds * 1e6, "us"),
                Row(case, "speedup_over_cublas", cublas / found.seconds, "ratio"),
            ]
    print("\n".join(["", "_TUNED = {", *literal.values(), "}"]))
    return rows


def print_chains(timer: Timer, row_counts: list[int], num_layers: int) -> list[Row]:
    """Milliseconds of all products of a model, run in each of the ways."""
    rows: list[Row] = []
    size = num_layers * sum(shape.bytes for shape in LAYER) + SHAPES["head"].bytes
    print(f"\nms for {num_layers} layers and the head ({size / 1e9:.2f} GB of weights) without attention")
    print(f"{'':>24}" + "".join(f"{f'M={num_rows}':>9}" for num_rows in row_counts))
    for chain in CHAINS:
        times = []
        for num_rows in row_counts:
            best = {s.name: found[0].config for s in SHAPES.values() if (found := timer.best(s, num_rows, 1))}
            try:
                run = model_chain(chain, num_rows, num_layers, best)
                run()
                times.append(time_graph(run))
            except Exception as error:
                print(f"  {chain.name} M={num_rows}: {type(error).__name__}: {str(error)[:150]}")
                times.append(float("nan"))
                continue
            case = f"llama-8b chain {chain.name} m{num_rows} bf16"
            rows += [
                Row(case, "gemms_ms", times[-1] * 1e3, "ms"),
                Row(case, "weight_bandwidth", size / times[-1] / 1e12, "TB/s"),
            ]
        print(f"{chain.name:>24}" + "".join(f"{seconds * 1e3:9.3f}" for seconds in times), flush=True)
    return rows


def main() -> None:
    """Parse options, sweep, run the chains, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", default=["qkv", "o", "gate_up", "down", "head"], choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=32, help="of the chain that is timed; 0 for none")
    parser.add_argument("--limit", type=int, default=200, help="cuts of the coarse sweep for each product")
    parser.add_argument("--seconds", type=float, default=110, help="time for the sweep")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--dump", type=Path, help="JSON file for every cut that was timed")
    options = parser.parse_args()
    shapes = [SHAPES[name] for name in options.shapes]
    compiler, timer = Compiler(options.workers), Timer()
    sweep(shapes, options.rows, timer, compiler, options.limit, options.seconds)
    rows = print_winners(timer, shapes, options.rows)
    if options.layers:
        compiler.compile(chain_kernels(timer, options.rows), time.perf_counter() + 30)
    compiler.pool.shutdown(wait=False, cancel_futures=True)
    timer.close()
    if options.dump:
        options.dump.write_text(json.dumps([asdict(found) for found in timer.outcomes]) + "\n", encoding="utf-8")
    rate = copy_rate(torch.device("cuda"))
    print(f"\ndevice copy: {rate / 1e12:.2f} TB/s")
    rows.append(Row("copy", "copy_bandwidth", rate / 1e12, "TB/s"))
    if options.layers:
        rows += print_chains(timer, options.rows, options.layers)
    if options.out:
        write_report(options.out, "kernels_gemm", torch.cuda.get_device_name(), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
