"""Train small drafters of the other kinds for one target at small cost, and measure all of them.

python -m benchmarks.train_drafters --text heads/smollm2 --out heads --eval-prompts mt_bench.jsonl --minutes 2 \
    --results benchmarks/results/train_drafters_h200.json

`--text` is the folder of an earlier `outrider train`: its text is used again, and its own head is measured, too.
A drafter that exists already is not trained again; `--only EAGLE,NEXTN` picks some.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from outrider_tools.bench.report import Row, cpu_name, write_report

KINDS = ("EAGLE", "NEXTN", "STANDALONE")
PACKAGES = ("torch", "triton")


def main() -> None:
    """Train, measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, required=True, help="an earlier run's --out")
    parser.add_argument("--eval-prompts", type=Path, required=True, help="JSONL, MT-bench for instance")
    parser.add_argument("--out", type=Path, required=True, help="drafters go to folders in it")
    parser.add_argument("--results", type=Path, required=True, help="the report's file")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, each; default 2")
    parser.add_argument("--steps", type=int, help="in place of --minutes")
    parser.add_argument("--only", default=",".join(KINDS), help="which kinds, with commas between them")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to train on; default 1")
    parser.add_argument("more", nargs="*", help="further options of outrider train, behind --")
    options = parser.parse_args()
    folders = {"EAGLE3": options.text} if (options.text / "model.safetensors").is_file() else {}
    for kind in options.only.split(","):
        folders[kind] = options.out / kind.lower()
        if not (folders[kind] / "training.json").is_file():
            train(kind, folders[kind], options)
    rows = [row for kind, folder in folders.items() for row in measure(kind, folder, options)]
    write_report(options.results, "train_drafters", device_name(options.device), rows, PACKAGES)


def train(kind: str, folder: Path, options: argparse.Namespace) -> None:
    """Train one drafter in its own process, so that it begins with an empty device."""
    length = ["--minutes", str(options.minutes)] if options.steps is None else ["--steps", str(options.steps)]
    run("train", "--algorithm", kind, "--model", options.model, "--out", folder, "--text", options.text, *length,
        "--eval-prompts", options.eval_prompts, "--device", options.device, "--gpus", options.gpus,
        *options.more)  # fmt: skip


def measure(kind: str, folder: Path, options: argparse.Namespace) -> list[Row]:
    """Return the figures of `outrider evaluate-draft`, and what the training took."""
    path = folder / "evaluation.json"
    run("evaluate-draft", "--model", options.model, "--draft", folder, "--algorithm", kind,
        "--prompts", options.eval_prompts, "--device", options.device, "--json", path)  # fmt: skip
    found = json.loads(path.read_text("utf-8"))
    name = f"{Path(options.model).name.lower()} {kind.lower()}"
    rows = []
    for evaluation in found["evaluation"]:
        heat = evaluation["temperature"]
        case = f"{name} {'bf16' if found['dtype'] == 'bfloat16' else 'fp32'} {f't{heat:g}' if heat else 'greedy'}"
        for group, figures in grouped(evaluation):
            rows += figure_rows(f"{case}{group}", figures, found["tree"])
    record = folder / "training.json"
    return rows + (training_rows(name, json.loads(record.read_text("utf-8"))) if record.is_file() else [])


def grouped(evaluation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return figures of all answers, of those with and without loops, and by category, with words for the case."""
    parts = [("", evaluation["all"]), (" loops", evaluation["loops"]), (" no loops", evaluation["without_loops"])]
    parts += [(f" {name}", figures) for name, figures in evaluation["categories"].items()]
    return [(name, figures) for name, figures in parts if figures is not None]


def figure_rows(case: str, figures: dict[str, Any], tree: dict[str, int]) -> list[Row]:
    """Return rows with accept lengths, accept rates by depth, and the number of answers."""
    shape = f"tree {tree['nodes']} nodes depth {tree['depth']}"
    rates = enumerate(figures["rates"], 1)
    return [
        Row(f"{case} chain", "accept_length", figures["chain"]["accept_length"], "tokens"),
        Row(f"{case} {shape}", "accept_length", figures["tree"]["accept_length"], "tokens"),
        *(Row(case, f"accept_rate_depth_{depth}", rate, "ratio") for depth, rate in rates),
        Row(case, "accept_rate_depth_6_over_depth_1", figures["deep_over_first"], "ratio"),
        Row(case, "answers", figures["answers"], "answers"),
        Row(case, "answer_tokens", figures["tokens"], "tokens"),
    ]


def training_rows(case: str, record: dict[str, Any]) -> list[Row]:
    """Return rows on a drafter's training."""
    return [
        Row(case, "training_seconds", record["training"]["seconds"], "s"),
        Row(case, "training_steps", record["training"]["total_steps"], "steps"),
        Row(case, "batch_tokens", record["options"]["trainer"]["batch_tokens"], "tokens"),
        Row(case, "training_answer_tokens", record["answer_tokens"], "tokens"),
        Row(case, "trained_parameters", record["trained_parameters"], "weights"),
        Row(case, "weight_bytes", record["weight_bytes"], "bytes"),
    ]


def device_name(device: str) -> str:
    """Return the GPU's name, or the processor's."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return cpu_name()


def run(*words: object) -> None:
    """Run an `outrider` command. If it fails, the script ends."""
    subprocess.run([sys.executable, "-m", "outrider.cli", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
