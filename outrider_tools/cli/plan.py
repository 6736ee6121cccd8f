"""`outrider plan`: a configuration's memory and best speed, from config.json alone. See docs/tools.md.

The services compute with the same formulas.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ByteSize, TypeAdapter, ValidationError

from outrider.cli.options import add_service_options, parse_service_options, whole_number, with_our_flags
from outrider.cli.placement import place_drafts
from outrider.cli.terminal import aligned, make_console
from outrider.config.draft import NAIVE_EAGLE, DraftOptions
from outrider.config.verify import LEAST_SIZED_TOKENS, LEAST_TOKENS, VerifyOptions
from outrider.errors import ConfigError, count_of, under
from outrider.models.capacity import (
    CONTEXT_BYTES,
    DRAFT_REGION,
    DRAFT_ROWS,
    DRAFT_WORK_BYTES,
    GIB,
    ROUND_REGION,
    SCRATCH_BYTES,
    TOKEN_BUCKETS,
    row_buckets,
    width_buckets,
)
from outrider.models.config import ModelConfig, ModelShape, check_heads
from outrider.models.cuts import check_target, cut
from outrider.models.drafters.config import MARKOV_INPUT, HeadConfig, cut_head
from outrider.models.drafters.kinds import choose_drafters, head_config, model_algorithm
from outrider.models.elements import Elements, head_elements, kv_elements, model_elements, target_elements
from outrider.models.fields import read_configs, read_json
from outrider.models.foreign import choose_impl, foreign_shape
from outrider.models.store import config_folder


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes and bandwidth in bytes a second, as the maker states them, less the memory that ECC takes."""

    memory: int
    bandwidth: float


_WITH_ECC = 15 * GIB // 16
"""Usable bytes of a GiB of GDDR with ECC, which such cards have turned on by default. HBM keeps ECC bits elsewhere."""

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


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TENSORS = {"NEXTN": ("input_proj.weight",), "EAGLE3": ("fc.weight",), "DSPARK": (MARKOV_INPUT,)}
"""Tensors that a head's file is assumed to hold; the file is not read, so optional biases and norms are left out."""
GRAPH_BYTES = 4 << 20
"""Memory of a captured round: 48 of them took 194 MiB at the shape of an 8B model (docs/results.md)."""


def gpu_dtype(word: str, config: ModelShape) -> str:
    """Return the number format on a GPU: `word` of --dtype, or what auto chooses for the checkpoint."""
    if word != "auto":
        return word
    return "float16" if config.dtype == "float16" else "bfloat16"


@dataclass(frozen=True)
class Capacity:
    """Where a target's memory goes, in bytes, and what is left for tokens."""

    memory: float
    """Memory of the GPU; 0 if unknown, and then nothing limits the plan."""
    elements: Elements
    item_bytes: int
    weights: int
    quantization: str
    """Name of the weights' quantization, for people; empty without one."""
    saved: int
    """Bytes that quantization saves on weights."""
    kv_per_token: int
    features_per_token: int
    """Stored for a remote draft, outside of the budget."""
    colocated_per_token: int
    """KV and features of a draft model inside rounds."""
    page_size: int
    scratch: int
    graphs: int
    num_graphs: int
    budget: float
    """Memory that --mem-fraction-static allows for weights, KV, scratch and CUDA itself."""
    outside: float
    """Memory beyond the budget: for graphs, a draft's features and temporary tensors of prefill."""
    kv_tokens: int
    num_pages: int
    context: int
    """Most tokens of one request."""
    max_running: int
    """--max-running-requests"""
    num_ranks: int = 1
    """--tensor-parallel-size. All figures are for one rank."""

    @property
    def tokens_each(self) -> int:
        """Return the tokens for each request if as many run as a round takes."""
        return min(self.kv_tokens // self.max_running, self.context)

    def round_seconds(self, bandwidth: float, num_requests: int = 1, context: int = 0) -> float:
        """Return a lower bound of a round's time, from the bytes that it reads: weights (of experts only those that one
        token of each request activates), and the KV of all contexts."""
        weights = self.elements.read_by(num_requests) * self.item_bytes - self.saved
        read = weights + num_requests * context * self.kv_per_token
        return read / bandwidth


def plan_target(
    config: ModelShape,
    elements: Elements,
    dtype: str,
    options: VerifyOptions,
    memory: float,
    feature_elements: int = 0,
    other_bytes: float = 0.0,
    inside: DraftPlan | None = None,
) -> Capacity:
    """Plan a verify service on a GPU of `memory` bytes, of which other processes take `other_bytes`.

    A remote draft's features have `feature_elements` elements a token. `inside` is the draft model inside rounds.
    """
    item = ITEM_BYTES[dtype]
    saved = config.bytes_saved(item)
    weights = elements.total * item - saved
    per_token = kv_elements(config) * (1 if options.kv_cache_dtype == "fp8_e4m3" else item)
    rows = options.max_running_requests + 1 + options.max_round_tokens
    scratch = rows * config.vocab_size * SCRATCH_BYTES
    beside = 0
    if inside is not None:
        beside = inside.kv_per_token + inside.features_per_token * item
        scratch += inside.tree_slots + rows * inside.vocab_size * SCRATCH_BYTES
        other_bytes += inside.weights
    num_graphs = 0 if options.disable_cuda_graph else count_graphs(options.max_round_tokens, options)
    budget = memory * options.mem_fraction_static
    outside = memory - budget
    # Features are stored when a draft asks for them, in memory outside of the budget.
    left = memory - CONTEXT_BYTES - other_bytes - weights - scratch
    room = max(0.0, left - outside) if memory else 0.0
    tokens = options.max_total_tokens or int(room // (per_token + beside))
    if memory and options.max_total_tokens * (per_token + beside) > left:
        tokens = 0  # the service takes the number as it is, no matter what --mem-fraction-static says
    pages = tokens // options.page_size
    tokens = pages * options.page_size
    longest = min(config.max_positions, options.longest_request(tokens))
    least = LEAST_TOKENS if options.max_total_tokens else LEAST_SIZED_TOKENS
    if longest < 2 or tokens < least:  # the service refuses to start
        tokens = pages = longest = 0
    return Capacity(
        memory=memory,
        elements=elements,
        item_bytes=item,
        weights=weights,
        quantization=config.quantization.name if isinstance(config, ModelConfig) and config.quantization else "",
        saved=saved,
        kv_per_token=per_token,
        features_per_token=feature_elements * item,
        colocated_per_token=beside,
        page_size=options.page_size,
        scratch=scratch,
        graphs=num_graphs * GRAPH_BYTES,
        num_graphs=num_graphs,
        budget=budget,
        outside=outside,
        kv_tokens=tokens,
        num_pages=pages,
        context=options.context_length or (longest if tokens or memory else config.max_positions),
        max_running=options.max_running_requests,
        num_ranks=options.tensor_parallel_size,
    )


def count_graphs(round_tokens: int, options: VerifyOptions) -> int:
    """Return the number of captured rounds: every number of requests with every number of tokens that holds them."""
    if options.deterministic:
        return 1
    tokens = width_buckets(TOKEN_BUCKETS, round_tokens)
    most = min(options.max_running_requests, options.cuda_graph_max_bs)
    counts = row_buckets(most)
    return len({(max(width, min(count, tokens[-1])), count) for count in counts for width in tokens if width >= count})


@dataclass(frozen=True)
class DraftPlan:
    """A draft model's sizes, in bytes unless said otherwise."""

    algorithm: str
    weights: int
    kv_per_token: int
    tree_slots: int
    """KV and features of all tree slots, and the outputs for requests' blocks."""
    block_bytes: int
    """Output for the block of one request."""
    vocab_size: int
    """Number of token ids that the draft model may guess."""
    features_per_token: int
    """Elements of a token's features that verify stores for the draft model."""
    read: int
    """Bytes that a draft step reads."""


def plan_inside(verify: VerifyOptions, dtype: str, folder: Path) -> DraftPlan | None:
    """Plan the draft model inside verify's rounds, with the target's number format and pages; None without one."""
    ranks = 1 if verify.rank_exchange == "nccl" else verify.tensor_parallel_size
    drafter = plan_draft(replace(verify.draft_model(str(folder)), dtype=dtype), folder, ranks)
    if drafter is None:
        return None
    per_token = drafter.kv_per_token + drafter.features_per_token * ITEM_BYTES[dtype]
    return replace(drafter, tree_slots=verify.max_running_requests * (ROUND_REGION * per_token + drafter.block_bytes))


def plan_draft(options: DraftOptions, target_folder: Path, ranks: int = 1) -> DraftPlan | None:
    """Plan the draft model that the options name, from its config.json, or rank 0's share of it with several `ranks`.

    None for n-grams alone. Raises ConfigError.
    """
    names = options.speculative_algorithm
    if set(names) <= {"NGRAM", "AUTO"}:
        return None
    algorithm = NAIVE_EAGLE if NAIVE_EAGLE in names else model_algorithm(names)
    name = options.speculative_draft_model_path
    if not name and algorithm != "NEXTN":
        raise ConfigError(f"--speculative-draft-model-path: {algorithm} needs a draft model; give its folder or hub id")
    with under("--speculative-draft-model-path"):
        folder = config_folder(name) if name else target_folder
    if algorithm == NAIVE_EAGLE:
        algorithm = "EAGLE3" if "draft_vocab_size" in read_json(folder / "config.json") else "EAGLE"
    head: HeadConfig | None = None
    if algorithm == "STANDALONE":
        config = ModelConfig.from_folder(folder)
        elements = model_elements(config)
        stored = feature_size = 0
        vocab_size, read = config.vocab_size, elements.read
    else:
        head = head_config(algorithm, folder, TENSORS.get(algorithm, ()), target_folder)
        if ranks > 1:
            head = cut_head(head, ranks, ITEM_BYTES[gpu_dtype(options.dtype, head.decoder)]) or head
        config, elements, feature_size = head.decoder, head_elements(algorithm, head), head.decoder.hidden_size
        # A head that first multiplies its features lets verify do that and store only the product.
        is_product = (algorithm == "EAGLE3" and head.projects) or head.block is not None
        stored = feature_size if is_product else len(head.feature_layers) * head.target_hidden_size
        vocab_size, read = head.draft_vocab_size, elements.layers + elements.output
    item = ITEM_BYTES[gpu_dtype(options.dtype, config)]
    per_token = kv_elements(config) * item
    block_bytes = 0 if head is None else head.block_bytes(item)
    rows = min(options.max_requests, DRAFT_ROWS)
    return DraftPlan(
        algorithm=algorithm,
        weights=elements.total * item - config.bytes_saved(item),
        kv_per_token=per_token,
        tree_slots=rows * (DRAFT_REGION * (per_token + feature_size * item) + block_bytes),
        block_bytes=block_bytes,
        vocab_size=vocab_size,
        features_per_token=stored,
        read=read * item - config.bytes_saved(item),
    )


def parse_size(text: str, option: str) -> float:
    """Parse a number of bytes like "80GiB", "4.8TB" or "512". Raises ConfigError, which names `option`."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text.strip().removesuffix("/s"))
        # Pydantic ignores text behind the number and its unit.
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
    parser.add_argument(
        "--bandwidth", metavar="SIZE", help="Memory bandwidth of the GPU in bytes per second, like 3.35TB."
    )
    parser.add_argument(
        "--request-tokens",
        type=whole_number(1, 1 << 30),
        help="Tokens of a request's prompt and output, to show how many such requests fit. Default: the longest "
        "allowed.",
    )
    parser.add_argument(
        "--same-gpu", action="store_true", help="A remote draft model runs on verify's GPU, in a process of its own."
    )
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON, in bytes and seconds.")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Return exit code 1 if the model does not fit."""
    options = parse_service_options(arguments)
    verify, draft = cast(VerifyOptions, options["verify"]), cast(DraftOptions, options["draft"])
    gpu = _gpu(arguments)
    with_our_flags("verify", verify.check)
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
        with_our_flags("verify", verify.check)
        drafter = plan_inside(verify, dtype, folder)
        plan = plan_target(config, elements, dtype, verify, gpu.memory, inside=drafter)
    else:
        draft = choose_drafters(draft, verify.model, lambda text: None)
        if NAIVE_EAGLE not in draft.speculative_algorithm:
            with_our_flags("draft", draft.check)
        drafter = plan_draft(draft, folder)
        features = drafter.features_per_token if drafter is not None else 0
        beside = 0
        if drafter is not None and arguments.same_gpu:
            beside = drafter.weights + drafter.tree_slots + DRAFT_WORK_BYTES + CONTEXT_BYTES
        plan = plan_target(config, elements, dtype, verify, gpu.memory, features, beside)
    if plan.kv_tokens:
        verify.check_lengths(config.max_positions, plan.kv_tokens)
    each = arguments.request_tokens
    if plan.kv_tokens and each is not None and each > plan.context:
        raise ConfigError(f"--request-tokens: {each} is over {plan.context}, the longest request here; lower it")
    if arguments.json:
        print(json.dumps(_as_json(plan, drafter, dtype, gpu, arguments), indent=1))
    else:
        console = make_console(color=not arguments.no_color)
        console.print(aligned(_lines(plan, drafter, dtype, gpu, arguments), right=(1,)), soft_wrap=True)
        for text in _warnings(plan, drafter):
            console.print(f"warning: {text}", soft_wrap=True)
    return 1 if gpu.memory and not plan.kv_tokens else 0


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Return memory and bandwidth of the GPU; 0 for what is unknown."""
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
    fields: dict[str, Any] = asdict(plan) | {"dtype": dtype, "parameters": plan.elements.total}
    fields |= {"kv_per_page": plan.kv_per_token * plan.page_size, "warnings": _warnings(plan, drafter)}
    if gpu.memory:
        each = min(arguments.request_tokens or plan.context, plan.context)
        fields |= {"request_tokens": each, "requests": _requests(plan, each), "fits": plan.kv_tokens > 0}
    if gpu.bandwidth:
        fields["round_floor_seconds"] = plan.round_seconds(gpu.bandwidth)
    if drafter is not None:
        fields["draft"] = asdict(drafter) | {
            "step_floor_seconds": drafter.read / gpu.bandwidth if gpu.bandwidth else None
        }
    return fields


def _requests(plan: Capacity, tokens: int) -> int:
    return min(plan.kv_tokens // max(tokens, 1), plan.max_running)


def _warnings(plan: Capacity, drafter: DraftPlan | None) -> list[str]:
    """Return what would go wrong, and what to do about it."""
    if not plan.memory:
        return []
    if not plan.kv_tokens:
        return [
            "weights and KV do not fit; choose a larger GPU, a smaller model, a half format, or another "
            "--max-total-tokens"
        ]
    stored = plan.features_per_token * plan.kv_tokens
    left = plan.outside - plan.graphs
    if left < 0:
        return ["--mem-fraction-static leaves too little for CUDA graphs; lower it"]
    if drafter is not None and stored > left:
        return [
            f"features for every token take {stored / GIB:.1f} GiB, {left / GIB:.1f} GiB are left: "
            "lower --mem-fraction-static or --max-total-tokens, or the head is not used"
        ]
    return []


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
        ("KV of a page", _size(plan.kv_per_token * plan.page_size), count_of(plan.page_size, "token")),
        ("logits and sampling", _size(plan.scratch), "scratch for every token slot of a round"),
        ("CUDA itself, about", _size(CONTEXT_BYTES), "context and libraries of a process"),
        ("CUDA graphs, about", _size(plan.graphs), count_of(plan.num_graphs, "round")),
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
            (
                "requests at once",
                str(count),
                f"of {count_of(each, 'token')}{other}" if plan.context else "it does not fit",
            )
        )
    if gpu.bandwidth:
        floor = plan.round_seconds(gpu.bandwidth)
        lines.append(("a round, at least", f"{floor * 1e3:.2f} ms", f"{1 / floor:.0f} plain tokens/s for one request"))
        if plan.kv_tokens:
            full = plan.round_seconds(gpu.bandwidth, plan.max_running, plan.tokens_each)
            what = f"{count_of(plan.max_running, 'request')} of {count_of(plan.tokens_each, 'token')}"
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
    """Format a size in the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
