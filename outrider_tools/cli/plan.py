"""`outrider plan`: what a configuration takes and how fast it can be, from config.json alone. See docs/tools.md."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, cast

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from outrider.cli.options import add_service_options, check_options, parse_service_options, whole_number
from outrider.cli.placement import place_drafts
from outrider.cli.terminal import aligned, make_console
from outrider.config.draft import NAIVE_EAGLE, DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, under
from outrider.models.capacity import CONTEXT_BYTES, GIB
from outrider.models.config import ModelConfig, check_heads
from outrider.models.cuts import check_target, cut
from outrider.models.drafters.kinds import choose_drafters
from outrider.models.elements import target_elements
from outrider.models.fields import read_configs
from outrider.models.foreign import choose_impl, foreign_shape
from outrider.models.store import config_folder
from outrider_tools.plan import Capacity, DraftPlan, gpu_dtype, plan_draft, plan_inside, plan_target


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, and memory bandwidth in bytes a second, as the maker states them but for what ECC takes."""

    memory: int
    bandwidth: float


_WITH_ECC = 15 * GIB // 16
"""What a GiB of GDDR has for use on cards that come with ECC turned on; HBM has memory of its own for it."""

GPUS = {
    "B200": Gpu(180 * GIB, 8.0e12),
    "H200": Gpu(140 * GIB, 4.8e12),
    "H100": Gpu(80 * GIB, 3.35e12),
    "H100-PCIE": Gpu(80 * GIB, 2.0e12),
    "A100-80GB": Gpu(80 * GIB, 2.04e12),
    "A100-40GB": Gpu(40 * GIB, 1.56e12),
    "L40S": Gpu(48 * _WITH_ECC, 0.86e12),
    "A10": Gpu(24 * _WITH_ECC, 0.6e12),
    "L4": Gpu(24 * _WITH_ECC, 0.3e12),
    "RTX-5090": Gpu(32 * GIB, 1.79e12),
    "RTX-4090": Gpu(24 * GIB, 1.01e12),
    "RTX-3090": Gpu(24 * GIB, 0.94e12),
}


def parse_size(text: str, option: str) -> float:
    """Bytes of "80GiB", "4.8TB", "512"; raises ConfigError, naming `option`."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text.strip().removesuffix("/s"))
        # What stands behind number and unit it takes no notice of.
        size = size if re.fullmatch(r"[\d.]+\s*[A-Za-z]*", text.strip().removesuffix("/s")) else ByteSize(0)
    except (ValidationError, OverflowError):
        size = ByteSize(0)
    if size <= 0:
        raise ConfigError(f"{option}: {text!r} is no size; write it like 80GiB or 4.8TB")
    return float(size)


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
    parser.add_argument(
        "--same-gpu", action="store_true", help="A remote draft model is on verify's GPU, in a process of its own."
    )
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON, in bytes and seconds.")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 1 if the model does not fit."""
    options = parse_service_options(arguments)
    verify, draft = cast(VerifyOptions, options["verify"]), cast(DraftOptions, options["draft"])
    gpu = _gpu(arguments)
    check_options("verify", verify)
    with under("--model"):
        folder = config_folder(verify.model)
    fields, generation = read_configs(folder)
    ours = choose_impl(fields, verify.model_impl) == "outrider"
    config = ModelConfig.from_fields(fields, generation) if ours else foreign_shape(fields, generation)
    check_target(folder, verify)
    if gpu.memory:
        check_heads(config)
    if (ranks := verify.tensor_parallel_size) > 1:
        config = cut(config, ranks)
    elements, dtype = target_elements(config, folder), gpu_dtype(verify.dtype, config)
    if verify.no_speculation:
        drafter = None
        plan = plan_target(config, elements, dtype, verify, gpu.memory)
    elif arguments.draft_placement == "colocated":
        verify = place_drafts(verify, draft, "colocated", 1, lambda text: None).verify
        check_options("verify", verify)
        drafter = plan_inside(verify, dtype, folder)
        plan = plan_target(config, elements, dtype, verify, gpu.memory, inside=drafter)
    else:
        draft = choose_drafters(draft, verify.model, lambda text: None)
        if NAIVE_EAGLE not in draft.speculative_algorithm:
            check_options("draft", draft)
        drafter = plan_draft(draft, folder)
        beside = float(drafter.fixed) if drafter is not None and arguments.same_gpu else 0.0
        features = drafter.features_per_token if drafter is not None else 0
        plan = plan_target(config, elements, dtype, verify, gpu.memory, features, beside)
    if plan.kv_tokens:
        verify.check_lengths(config.max_positions, plan.kv_tokens)
    each = arguments.request_tokens
    if plan.kv_tokens and each is not None and each > plan.context:
        raise ConfigError(f"--request-tokens: {each} is over {plan.context}, the longest request here; lower it")
    if arguments.json:
        print(json.dumps(_as_json(plan, drafter, dtype, gpu, arguments), indent=1))
    else:
        _show(make_console(color=not arguments.no_color), plan, drafter, dtype, gpu, arguments)
    return 1 if gpu.memory and not plan.kv_tokens else 0


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Memory and bandwidth; 0 where nothing is said."""
    found = Gpu(0, 0.0)
    if arguments.gpu is not None:
        name = arguments.gpu.upper()
        if name not in GPUS:
            raise ConfigError(f"--gpu: {arguments.gpu!r} is not known; use one of {', '.join(GPUS)}, or --gpu-memory")
        found = GPUS[name]
    memory = int(parse_size(arguments.gpu_memory, "--gpu-memory")) if arguments.gpu_memory is not None else found.memory
    bandwidth = parse_size(arguments.bandwidth, "--bandwidth") if arguments.bandwidth is not None else found.bandwidth
    return Gpu(memory, bandwidth)


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
        found.append(
            "weights and KV do not fit; choose a larger GPU, a smaller model, a half format, or another "
            "--max-total-tokens"
        )
        return found
    if not plan.memory:
        return found
    stored = plan.features_per_token * plan.kv_tokens
    left = plan.outside - plan.graphs
    if left < 0:
        found.append("--mem-fraction-static leaves too little for CUDA graphs; lower it")
    elif drafter is not None and stored > left:
        found.append(
            f"features for every token take {stored / GIB:.1f} GiB, {left / GIB:.1f} GiB are left: "
            "lower --mem-fraction-static or --max-total-tokens, or the head is not used"
        )
    return found


def _show(
    console: Console, plan: Capacity, drafter: DraftPlan | None, dtype: str, gpu: Gpu, arguments: argparse.Namespace
) -> None:
    console.print(aligned(_lines(plan, drafter, dtype, gpu, arguments), right=(1,)), soft_wrap=True)
    for text in _warnings(plan, drafter):
        console.print(f"warning: {text}", soft_wrap=True)


def _lines(
    plan: Capacity, drafter: DraftPlan | None, dtype: str, gpu: Gpu, arguments: argparse.Namespace
) -> list[tuple[str, str, str]]:
    words = f"{plan.quantization} and {dtype}" if plan.quantization else dtype
    words += f", on each of {plan.num_ranks} ranks" if plan.num_ranks > 1 else ""
    lines = [
        ("weights", _size(plan.weights), f"{plan.elements.total / 1e6:.1f} M parameters in {words}"),
        *(
            [("  read for a token", _size(plan.elements.read * plan.item_bytes), "experts and rows it takes")]
            if plan.elements.idle
            else []
        ),
        ("KV of a token", _size(plan.kv_per_token), "each token of prompt and answer takes it"),
        ("KV of a page", _size(plan.kv_per_token * plan.page_size), f"{plan.page_size} tokens"),
        ("logits and sampling", _size(plan.scratch), "scratch for every token slot of a round"),
        ("CUDA itself, about", _size(CONTEXT_BYTES), "context and libraries of a process"),
        ("CUDA graphs, about", _size(plan.graphs), f"{plan.num_graphs} rounds"),
    ]
    if plan.features_per_token:
        lines.insert(3, ("features of a token", _size(plan.features_per_token), "kept for the draft, beside the KV"))
    if plan.colocated_per_token:
        lines.insert(3, ("drafting, of a token", _size(plan.colocated_per_token), "KV and features of the draft model"))
    if gpu.memory:
        each = min(arguments.request_tokens or plan.context, plan.context)
        count, most = _requests(plan, each), (plan.max_running, plan.tokens_each)
        other = "; or {} of {}".format(*most) if plan.tokens_each and (count, each) != most else ""
        share = f"--mem-fraction-static gives {_size(plan.budget)} to weights, KV, scratch and CUDA itself"
        lines += [
            ("GPU memory", _size(gpu.memory), share),
            ("KV cache", _size(plan.kv_tokens * plan.kv_per_token), f"{plan.kv_tokens} tokens, {plan.num_pages} pages"),
        ]
        if plan.context:
            lines.append(("longest request", str(plan.context), "tokens of prompt and output"))
        lines.append(
            ("requests at once", str(count), f"of {each} tokens{other}" if plan.context else "it does not fit")
        )
    if gpu.bandwidth:
        floor = plan.round_seconds(gpu.bandwidth)
        lines.append(("a round, at least", f"{floor * 1e3:.2f} ms", f"{1 / floor:.0f} plain tokens/s for one request"))
        if plan.kv_tokens:
            full = plan.round_seconds(gpu.bandwidth, plan.max_running, plan.tokens_each)
            what = f"{plan.max_running} requests of {plan.tokens_each} tokens"
            lines.append(("  with all requests", f"{full * 1e3:.2f} ms", what))
    if drafter is None:
        return [*lines, ("draft", "", "n-grams: no draft model")]
    inside = arguments.draft_placement == "colocated"
    where = "on a GPU of its own, or the CPU"
    if inside or arguments.same_gpu:
        where = "inside verify's rounds" if inside else "on the same GPU"
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
