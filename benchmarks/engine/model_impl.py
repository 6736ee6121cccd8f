"""Rounds of one model with our decoder and through transformers (--model-impl), and whether both give the same text.

    python -m benchmarks.engine.model_impl --model FOLDER --out FILE.json

On a GPU, whole rounds of CudaExecutor as graphs, by the device's clock; on a CPU, forwards with logits, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.engine.rounds import GREEDY, MeasuredRounds
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.device import choose_device
from outrider.models.base import LanguageModel
from outrider.models.loader import load_model
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider.protocol.generation import GenerationRequest
from outrider_tools.bench.report import Row, cpu_name, write_report
from verify_service.engine.request import Request
from verify_service.engine.round import Entry
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.cuda import CudaExecutor

IMPLS = ("outrider", "transformers")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PAGE_SIZE = 16
CONTEXT = 1024
TEXT = "The lighthouse keeper climbed the stairs every evening at dusk. One night"


def text_of(executor: CudaExecutor, prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """Return greedy tokens from rounds of the executor, in its first pages."""
    asked = GenerationRequest("text", prompt, GREEDY, max_tokens=1 << 20)
    request = Request.begin(asked, lambda update: None, vocab_size)
    request.pages.extend(range(-(-(len(prompt) + count) // PAGE_SIZE)))
    executor.launch([Entry(request, len(prompt) - 1)]).wait()
    request.cached_len = len(prompt) - 1
    for _ in range(count):
        (result,) = executor.launch([Entry(request, 1)]).wait()
        request.tokens.append(result.token_ids[0])
        request.cached_len += 1
    executor.forget(request)
    return request.tokens[len(prompt) :]


def on_gpu(
    model: LanguageModel, widths: list[int], prompt: list[int], count: int
) -> tuple[dict[int, float], list[int]]:
    """Return the milliseconds of a round by tokens, and the text."""
    vocab_size = model.config.vocab_size
    num_pages = (CONTEXT + 512) // PAGE_SIZE
    limits = EngineLimits(
        vocab_size=vocab_size,
        context_length=CONTEXT + 512,
        max_running=1,
        max_round_tokens=max(widths),
        chunk_size=CONTEXT,
        root_apart=True,
    )
    executor = CudaExecutor(model, num_pages, PAGE_SIZE, limits, TritonAttention())
    executor.graphs.capture(sorted({executor.buckets.fit(width, 1) for width in widths}, reverse=True), together=True)
    text = text_of(executor, prompt, count, vocab_size)
    rounds = MeasuredRounds(executor, vocab_size, num_pages, CONTEXT)
    rounds.prepare(1, CONTEXT, 256)
    return {width: rounds.measure(width).gpu for width in widths}, text


def chain_forward(model: LanguageModel, context: Tensor, tokens: Tensor) -> Callable[[], object]:
    """Return a repeatable forward of `tokens` as a chain below `context`, whose KV is computed here."""
    kv, attention = model.new_kv(context.numel() + tokens.numel()), TorchAttention()
    slots = torch.arange(context.numel() + tokens.numel())
    positions = slots.clone()
    prompt = Segment(context.numel(), slots[: context.numel()])
    model.forward(ForwardBatch(context, positions[: context.numel()], [prompt]), kv, attention)
    batch = ForwardBatch(tokens, positions[context.numel() :], [Segment(tokens.numel(), slots)])
    return lambda: model.logits(model.forward(batch, kv, attention))


def greedy(model: LanguageModel, prompt: Tensor, count: int) -> Tensor:
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


def main() -> int:
    """Parse options, measure, print and write. Return exit code 1 if the texts differ in float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or folder, as for the services")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(SHORT))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder, device = resolve_model(options.model), choose_device(options.device)
    dtype = getattr(torch, options.dtype)
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    texts: dict[str, list[int]] = {}
    times: dict[int, list[float]] = {width: [] for width in options.tokens}
    with torch.inference_mode():
        if device.type == "cuda":
            for impl in IMPLS:
                model = load_model(folder, dtype, device, impl=impl)
                found, texts[impl] = on_gpu(model, options.tokens, prompt, options.new_tokens)
                for width, ms in found.items():
                    times[width].append(ms)
                del model
                torch.cuda.empty_cache()
        else:
            models = {impl: load_model(folder, dtype, device, impl=impl) for impl in IMPLS}
            for impl, model in models.items():
                texts[impl] = greedy(model, torch.tensor(prompt), options.new_tokens).tolist()
            context = torch.arange(256) * 7 % 4096
            for width in options.tokens:
                runs = [chain_forward(model, context, torch.arange(width) + 11) for model in models.values()]
                times[width] = [seconds * 1e3 for seconds in race(runs, options.repeats)]
    rows: list[Row] = []
    print(f"tokens  {'  '.join(IMPLS)}  ratio")
    for width, (ours, theirs) in times.items():
        case = f"{folder.name.lower()} plain engine b1 m{width} {SHORT[options.dtype]} greedy"
        rows.append(Row(case, "round_gpu_ms" if device.type == "cuda" else "round_ms", ours, "ms"))
        rows.append(Row(f"transformers {case}", rows[-1].metric, theirs, "ms"))
        rows.append(Row(case, "transformers_over_outrider", theirs / ours, "ratio"))
        print(f"{width:6d}{ours:10.3f}{theirs:12.3f}{theirs / ours:9.3f}")
    count, pairs = options.new_tokens, list(zip(*texts.values(), strict=True))
    equal = next((place for place, (one, other) in enumerate(pairs) if one != other), count)
    rows.append(Row(f"{folder.name.lower()} {SHORT[options.dtype]} greedy", "equal_tokens", equal, "tokens"))
    print(f"the first {equal} of {count} tokens are equal" + ("" if equal == count else f": {texts}"))
    if options.out:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        write_report(options.out, "model_impl", name, rows, ("torch", "transformers", "triton"))
    # In half precision a near tie may fall either way, since the two round at different places.
    return 0 if equal == count or options.dtype != "float32" else 1


if __name__ == "__main__":
    raise SystemExit(main())
