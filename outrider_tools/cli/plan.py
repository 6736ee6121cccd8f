"""`outrider plan`: what a configuration takes and how fast it can be, from config.json alone. See docs/tools.md."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from outrider.cli.options import add_service_options, parse_service_options, whole_number
from outrider.cli.terminal import make_console
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.capacity import CONTEXT_BYTES, DRAFT_REGION, DRAFT_ROWS, DRAFT_WORK_BYTES, GIB
from outrider.models.config import ModelConfig, read_json
from outrider.models.drafters.config import HeadConfig, eagle3_config, eagle_config, mtp_config
from outrider.models.shipped import choose_drafters
from outrider.models.store import config_folder
from outrider_tools.capacity import (
    GPUS,
    ITEM_BYTES,
    Capacity,
    Elements,
    Gpu,
    head_elements,
    kv_elements,
    model_elements,
    parse_size,
    plan_target,
)


@dataclass(frozen=True)
class DraftPlan:
    """A draft model in bytes."""

    algorithm: str
    weights: int
    kv_per_token: int
    tree_slots: int
    """KV and features of all tree slots."""
    features_per_token: int
    """Elements that verify stores of a token for it."""
    read: int
    """Bytes that a draft step reads."""

    @property
    def fixed(self) -> int:
        """What it takes before any context."""
        return self.weights + self.tree_slots + DRAFT_WORK_BYTES + CONTEXT_BYTES


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--gpu", metavar="NAME", help=f"Memory and bandwidth of a known GPU: {', '.join(GPUS)}.")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="Memory of the GPU, like 80GiB.")
    parser.add_argument("--bandwidth", metavar="SIZE", help="Bytes of its memory that it reads a second, like 3.35TB.")
    parser.add_argument(
        "--request-tokens",
        type=whole_number(1, 1 << 30),
        help="Prompt and output of a request; how many such fit. Default: the longest that may be.",
    )
    parser.add_argument("--colocated", action="store_true", help="The draft model is on the same GPU.")
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON, in bytes and seconds.")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 1 if the model does not fit."""
    options = parse_service_options(arguments)
    verify, draft = cast(VerifyOptions, options["verify"]), cast(DraftOptions, options["draft"])
    gpu = _gpu(arguments)
    folder = config_folder(verify.model)
    config = ModelConfig.from_folder(folder)
    dtype = _dtype(verify.dtype, config)
    drafter = plan_draft(choose_drafters(draft, verify.model, lambda text: None), config, folder)
    beside = float(drafter.fixed) if drafter is not None and arguments.colocated else 0.0
    features = drafter.features_per_token if drafter is not None else 0
    plan = plan_target(config, dtype, verify, gpu.memory, features, beside)
    if arguments.json:
        print(json.dumps(_as_json(plan, drafter, dtype, gpu, arguments), indent=1))
    else:
        _show(make_console(color=not arguments.no_color), plan, drafter, dtype, gpu, arguments)
    return 1 if gpu.memory and not plan.kv_tokens else 0


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Memory and bandwidth; 0 where nothing is said."""
    found = Gpu(0, 0.0)
    if arguments.gpu:
        name = arguments.gpu.upper()
        if name not in GPUS:
            raise ConfigError(f"--gpu: {arguments.gpu!r} is not known; use one of {', '.join(GPUS)}, or --gpu-memory")
        found = GPUS[name]
    memory = int(parse_size(arguments.gpu_memory, "--gpu-memory")) if arguments.gpu_memory else found.memory
    bandwidth = parse_size(arguments.bandwidth, "--bandwidth") if arguments.bandwidth else found.bandwidth
    return Gpu(memory, bandwidth)


def _dtype(word: str, config: ModelConfig) -> str:
    """As a GPU would have it."""
    if word != "auto":
        return word
    return "float16" if config.dtype == "float16" else "bfloat16"


def plan_draft(options: DraftOptions, target: ModelConfig, target_folder: Path) -> DraftPlan | None:
    """The draft model that the options name, from its config.json; None for n-grams alone. Raises ConfigError."""
    algorithm = next((name for name in options.speculative_algorithm if name not in ("NGRAM", "AUTO")), "")
    if not algorithm:
        return None
    name = options.speculative_draft_model_path
    if not name and algorithm != "NEXTN":
        raise ConfigError(f"--speculative-draft-model-path: {algorithm} needs a draft model; give its folder or hub id")
    folder = config_folder(name) if name else target_folder
    if algorithm == "STANDALONE":
        config = ModelConfig.from_folder(folder)
        return _draft_plan(algorithm, model_elements(config), config, options, 0, 0)
    head = _head(algorithm, folder, target)
    features = len(head.feature_layers) * head.target_hidden_size
    # A head that multiplies features first lets verify do that, and store the product.
    stored = head.decoder.hidden_size if algorithm == "EAGLE3" and head.projects else features
    elements = head_elements(algorithm, head)
    return _draft_plan(algorithm, elements, head.decoder, options, stored, head.decoder.hidden_size)


def _head(algorithm: str, folder: Path, target: ModelConfig) -> HeadConfig:
    """What config.json says; biases and norms that only tensors tell of are left out."""
    if algorithm == "NEXTN":
        return mtp_config(ModelConfig.from_folder(folder), ("input_proj.weight",))
    fields = read_json(folder / "config.json")
    if algorithm == "EAGLE":
        return eagle_config(fields, (), target.num_layers, target.hidden_size)
    return eagle3_config(fields, ("fc.weight",), target.num_layers, target.hidden_size)


def _draft_plan(
    algorithm: str, elements: Elements, config: ModelConfig, options: DraftOptions, stored: int, feature_size: int
) -> DraftPlan:
    item = ITEM_BYTES[_dtype(options.dtype, config)]
    per_token = kv_elements(config) * item
    slots = min(options.max_requests, DRAFT_ROWS) * DRAFT_REGION
    return DraftPlan(
        algorithm=algorithm,
        weights=elements.total * item,
        kv_per_token=per_token,
        tree_slots=slots * (per_token + feature_size * item),
        features_per_token=stored,
        read=(elements.read if algorithm == "STANDALONE" else elements.layers + elements.output) * item,
    )


def _as_json(
    plan: Capacity, drafter: DraftPlan | None, dtype: str, gpu: Gpu, arguments: argparse.Namespace
) -> dict[str, Any]:
    told: dict[str, Any] = asdict(plan) | {"dtype": dtype, "parameters": plan.elements.total}
    told |= {"kv_per_page": plan.kv_per_token * plan.page_size, "warnings": _warnings(plan, drafter)}
    if gpu.memory:
        each = min(arguments.request_tokens or plan.context, plan.context)
        told |= {"request_tokens": each, "requests": _requests(plan, each), "fits": plan.kv_tokens > 0}
    if gpu.bandwidth:
        told["round_floor_seconds"] = plan.round_seconds(gpu.bandwidth)
    if drafter is not None:
        told["draft"] = asdict(drafter) | {
            "step_floor_seconds": drafter.read / gpu.bandwidth if gpu.bandwidth else None
        }
    return told


def _requests(plan: Capacity, tokens: int) -> int:
    return min(plan.kv_tokens // max(tokens, 1), plan.max_running)


def _warnings(plan: Capacity, drafter: DraftPlan | None) -> list[str]:
    """What would go wrong, and what to do."""
    found = []
    if plan.memory and not plan.kv_tokens:
        found.append("weights and KV do not fit; choose a larger GPU, a smaller model or a half format")
        return found
    if not plan.memory:
        return found
    needs = CONTEXT_BYTES + plan.graphs
    stored = plan.features_per_token * plan.kv_tokens
    if needs > plan.outside:
        found.append("--mem-fraction-static leaves too little for CUDA and graphs; lower it")
    elif drafter is not None and stored and needs + stored > plan.outside:
        found.append(
            f"features for every token take {stored / GIB:.1f} GiB, {(plan.outside - needs) / GIB:.1f} GiB are left: "
            "lower --mem-fraction-static or --max-total-tokens, or the head is not used"
        )
    return found


def _show(
    console: Console, plan: Capacity, drafter: DraftPlan | None, dtype: str, gpu: Gpu, arguments: argparse.Namespace
) -> None:
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for cells in _lines(plan, drafter, dtype, gpu, arguments):
        table.add_row(*cells)
    console.print(table, width=max(console.width, 110), soft_wrap=True)
    for text in _warnings(plan, drafter):
        console.print(f"warning: {text}", soft_wrap=True)


def _lines(
    plan: Capacity, drafter: DraftPlan | None, dtype: str, gpu: Gpu, arguments: argparse.Namespace
) -> list[tuple[str, str, str]]:
    lines = [
        ("weights", _size(plan.weights), f"{plan.elements.total / 1e6:.1f} M parameters in {dtype}"),
        ("KV of a token", _size(plan.kv_per_token), ""),
        ("KV of a page", _size(plan.kv_per_token * plan.page_size), f"{plan.page_size} tokens"),
        ("logits and sampling", _size(plan.scratch), "scratch for every token slot of a round"),
        ("CUDA graphs, about", _size(plan.graphs), f"{plan.num_graphs} rounds"),
    ]
    if plan.features_per_token:
        lines.insert(3, ("features of a token", _size(plan.features_per_token), "kept for the draft, beside the KV"))
    if gpu.memory:
        each = min(arguments.request_tokens or plan.context, plan.context)
        lines += [
            ("GPU", _size(gpu.memory), f"{_size(plan.budget)} for weights, KV and scratch"),
            ("KV cache", _size(plan.kv_tokens * plan.kv_per_token), f"{plan.kv_tokens} tokens, {plan.num_pages} pages"),
            ("longest request", str(plan.context), "tokens of prompt and output"),
            (
                "requests at once",
                str(_requests(plan, each)),
                f"of {each} tokens; or {plan.max_running} of {plan.tokens_each}",
            ),
        ]
    if gpu.bandwidth:
        floor = plan.round_seconds(gpu.bandwidth)
        lines.append(("a round, at least", f"{floor * 1e3:.2f} ms", f"{1 / floor:.0f} plain tokens/s for one request"))
        if plan.kv_tokens:
            full = plan.round_seconds(gpu.bandwidth, plan.max_running, plan.tokens_each)
            what = f"{plan.max_running} requests of {plan.tokens_each} tokens"
            lines.append(("  with the cache full", f"{full * 1e3:.2f} ms", what))
    if drafter is None:
        return [*lines, ("draft", "", "n-grams: no draft model")]
    where = "on the same GPU" if arguments.colocated else "on a GPU of its own, or the CPU"
    lines += [
        (f"draft ({drafter.algorithm})", _size(drafter.weights), f"weights, {where}"),
        ("  KV of a token", _size(drafter.kv_per_token), ""),
        ("  tree slots", _size(drafter.tree_slots), "KV and features of growing trees, on a GPU"),
    ]
    if gpu.bandwidth:
        lines.append(
            ("  a step, at least", f"{drafter.read / gpu.bandwidth * 1e3:.3f} ms", "on a GPU of this bandwidth")
        )
    return lines


def _size(num_bytes: float) -> str:
    """In the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
