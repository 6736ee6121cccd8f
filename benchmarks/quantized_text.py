"""Effect of quantized weights on text: perplexity, and how often the likeliest token is the unquantized model's.

    python -m benchmarks.quantized_text --formats fp8 fp8-block int4 mxfp4 --group-size 64

Makes each format of a checkpoint with `outrider quantize`, and reads texts of this repository: on the CPU in float32,
with --device cuda in bfloat16 with our kernels, 64 tokens at a time. --calibrations are those of `outrider quantize`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import device_name
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.loader import load_model
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.inflate.folder import tokenize
from outrider_tools.quantize import FORMATS, quantize

ROOT = Path(__file__).resolve().parents[1]
STEP = 64
TEXTS = ("docs/architecture.md", "docs/reliability.md", "docs/drafters.md")


@torch.inference_mode()
def read(folder: Path, texts: list[list[int]], dtype: torch.dtype, step: int, device: str = "cpu") -> list[Tensor]:
    """Return logits, float32 [tokens, vocabulary] of each text, read `step` tokens a forward."""
    model, found = load_model(folder, dtype, device), []
    for ids in texts:
        kv, attention, parts = model.new_kv(len(ids)), TorchAttention(), []
        for start in range(0, len(ids), step):
            end = min(start + step, len(ids))
            places = torch.arange(end, device=device)
            tokens = torch.tensor(ids[start:end], device=device)
            batch = ForwardBatch(tokens, places[start:], [Segment(end - start, places)])
            parts.append(model.logits(model.forward(batch, kv, attention)).cpu())
        found.append(torch.cat(parts))
    return found


def losses(logits: list[Tensor], texts: list[list[int]]) -> Tensor:
    """Return the loss of all tokens but the first of each text, float32."""
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(ids[1:]), reduction="none")
            for rows, ids in zip(logits, texts, strict=True)
        ]
    )


def compared(case: str, over: str, found: list[Tensor], plain: list[Tensor], texts: list[list[int]]) -> list[Row]:
    """Return rows that compare logits with `plain`, the reference named `over`, and print them."""
    more = losses(found, texts) - losses(plain, texts)
    ratio, error = math.exp(float(more.mean())), float(more.std()) / len(more) ** 0.5
    agree = float((torch.cat(found).argmax(1) == torch.cat(plain).argmax(1)).float().mean())
    print(f"{case:32} perplexity x{ratio:.4f} +- {error:.4f}  same likeliest token {agree:.1%}", flush=True)
    return [
        Row(f"smollm2-135m {case}", f"perplexity_over_{over}", ratio, "ratio"),
        Row(f"smollm2-135m {case}", "standard_error", error, "ratio"),
        Row(f"smollm2-135m {case}", "same_likeliest_token", agree, "ratio"),
    ]


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["fp8", "fp8-block", "int4", "mxfp4"])
    parser.add_argument("--group-size", type=int, default=64, help="of int4")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calibrations", nargs="+", default=["own"], metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=1200, help="of each text")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    source = resolve_model(options.model)
    texts = [tokenize(source, (ROOT / name).read_text("utf-8"))[: options.tokens] for name in TEXTS]
    on_gpu = options.device == "cuda"
    how = (torch.bfloat16, STEP, "cuda") if on_gpu else (torch.float32, max(map(len, texts)))
    plain = read(source, texts, *how)
    base = losses(plain, texts)
    rows = [Row("smollm2-135m unquantized", "perplexity", math.exp(float(base.mean())), "")]
    print(f"{'unquantized':32} perplexity {rows[0].value:8.3f} over {len(base)} tokens")
    for name, calibration in itertools.product(options.formats, options.calibrations):
        with tempfile.TemporaryDirectory() as folder:
            made, device = Path(folder) / name, torch.device(options.device)
            quantize(source, made, name, options.group_size, device, 1 << 31, lambda *_: None, calibration)
            found = read(made, texts, *how)
        case = name + (f" g{options.group_size}" if name in ("int4", "awq", "gptq") else "")
        case += " nearest" if calibration == "none" else f" {Path(calibration).name}"
        rows += compared(case, "unquantized", found, plain, texts)
    if options.out:
        write_report(options.out, "quantized_text", device_name() if on_gpu else cpu_name(), rows, ("torch",))


if __name__ == "__main__":
    main()
