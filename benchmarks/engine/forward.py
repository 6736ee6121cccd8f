"""Time of a forward with logits by its number of tokens, and of greedy decoding: ours and transformers' in one run.

python -m benchmarks.engine.forward --out benchmarks/results/forward.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def our_forward(model: CausalLM, context: Tensor, tokens: Tensor) -> Callable[[], object]:
    """Return a repeatable forward of `tokens` as a chain below `context`, whose KV is computed here."""
    kv, attention = model.new_kv(context.numel() + tokens.numel()), TorchAttention()
    slots = torch.arange(context.numel() + tokens.numel())
    positions = slots.clone()
    prompt = Segment(context.numel(), slots[: context.numel()])
    model.forward(ForwardBatch(context, positions[: context.numel()], [prompt]), kv, attention)
    batch = ForwardBatch(tokens, positions[context.numel() :], [Segment(tokens.numel(), slots)])
    return lambda: model.logits(model.forward(batch, kv, attention))


def their_forward(model: Any, context: Tensor, tokens: Tensor) -> Callable[[], object]:
    """Return the same forward in transformers. Each run crops what it has added to the cache."""
    cache = transformers.DynamicCache()
    model(context[None], past_key_values=cache, use_cache=True)

    def forward() -> object:
        logits = model(tokens[None], past_key_values=cache, use_cache=True).logits
        cache.crop(-tokens.numel())
        return logits

    return forward


def our_greedy(model: CausalLM, prompt: Tensor, count: int) -> Tensor:
    """Decode greedily, without an end-of-sequence check."""
    kv, attention = model.new_kv(prompt.numel() + count), TorchAttention()
    slots = torch.arange(prompt.numel() + count)
    chunk, length, generated = prompt, prompt.numel(), []
    for _ in range(count):
        segment = Segment(chunk.numel(), slots[:length])
        hidden = model.forward(ForwardBatch(chunk, slots[length - chunk.numel() : length], [segment]), kv, attention)
        chunk = model.logits(hidden[-1:]).argmax(-1)
        generated.append(chunk)
        length += 1
    return torch.cat(generated)


def their_greedy(model: Any, prompt: Tensor, count: int) -> Tensor:
    """Call `generate` for exactly `count` tokens."""
    ids = prompt[None]
    output: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False
    )
    return output[0, prompt.numel() :]


def race(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median seconds of each run. Runs take turns, so that a busy machine slows all of them alike."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(repeats + 2):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if number >= 2:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def measure(folder: Path, dtype_name: str, options: argparse.Namespace) -> list[Row]:
    """Return all rows of one dtype."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    ours = load_model(folder, dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(0, ours.config.vocab_size, (options.context,), generator=generator)
    rows: list[Row] = []
    name, end = folder.name.lower(), f"ctx{options.context / 1000:g}k {SHORT[dtype_name]}"
    print(f"\n{dtype_name}: ms a forward with {options.context} cached tokens\ntokens  outrider  transformers  ratio")
    for num_tokens in options.tokens:
        tokens = torch.randint(0, ours.config.vocab_size, (num_tokens,), generator=generator)
        runs = [our_forward(ours, context, tokens), their_forward(theirs, context, tokens)]
        our_seconds, their_seconds = race(runs, options.repeats)
        print(f"{num_tokens:6d}{our_seconds * 1e3:10.1f}{their_seconds * 1e3:14.1f}{their_seconds / our_seconds:7.2f}")
        case = f"{name} plain b1 m{num_tokens} {end}"
        rows += [
            Row(case, "round_ms", our_seconds * 1e3, "ms"),
            Row(f"transformers {case}", "round_ms", their_seconds * 1e3, "ms"),
            Row(case, "speedup_over_transformers", their_seconds / our_seconds, "ratio"),
        ]
    count = options.new_tokens
    runs = [lambda: our_greedy(ours, context, count), lambda: their_greedy(theirs, context, count)]
    our_seconds, their_seconds = race(runs, 3)
    ratio = their_seconds / our_seconds
    print(
        f"greedy, {count} tokens: {count / our_seconds:.1f} against {count / their_seconds:.1f} tokens/s ({ratio:.2f}x)"
    )
    case = f"{name} plain b1 m1 {end} greedy"
    return [
        *rows,
        Row(case, "tokens_per_second", count / our_seconds, "tokens/s"),
        Row(f"transformers {case}", "tokens_per_second", count / their_seconds, "tokens/s"),
        Row(case, "speedup_over_transformers", ratio, "ratio"),
    ]


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or folder, as for the services")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=sorted(SHORT))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--context", type=int, default=200, help="cached tokens before the forward")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of the greedy comparison")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    folder = resolve_model(options.model)
    with torch.inference_mode():
        rows = [row for dtype in options.dtypes for row in measure(folder, dtype, options)]
    if options.out:
        device = f"{cpu_name()}, {options.threads} threads"
        write_report(options.out, "forward", device, rows, ("torch", "transformers", "numpy"))


if __name__ == "__main__":
    main()
