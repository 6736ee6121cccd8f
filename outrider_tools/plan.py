"""What a configuration takes of a GPU's memory, from config.json alone: the sums that the services do themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.config.draft import NAIVE_EAGLE, DraftOptions
from outrider.config.verify import LEAST_SIZED_TOKENS, LEAST_TOKENS, VerifyOptions
from outrider.errors import ConfigError, under
from outrider.models.capacity import (
    CONTEXT_BYTES,
    DRAFT_REGION,
    DRAFT_ROWS,
    DRAFT_WORK_BYTES,
    ROUND_REGION,
    SCRATCH_BYTES,
    TOKEN_BUCKETS,
    row_buckets,
    width_buckets,
)
from outrider.models.config import ModelConfig, ModelShape
from outrider.models.drafters.config import MARKOV_INPUT, HeadConfig, cut_head
from outrider.models.drafters.kinds import head_config, model_algorithm
from outrider.models.elements import Elements, head_elements, kv_elements, model_elements
from outrider.models.fields import read_json
from outrider.models.store import config_folder

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TENSORS = {"NEXTN": ("input_proj.weight",), "EAGLE3": ("fc.weight",), "DSPARK": (MARKOV_INPUT,)}
"""What a head's file is taken to hold, which is not read: biases and norms that only tensors tell of are left out."""
GRAPH_BYTES = 4 << 20
"""A captured round: 48 of them took 194 MiB at the shape of an 8B model (docs/results.md)."""


def gpu_dtype(word: str, config: ModelShape) -> str:
    """The number format that a GPU would have: `word` of --dtype, or what auto takes for the checkpoint."""
    if word != "auto":
        return word
    return "float16" if config.dtype == "float16" else "bfloat16"


@dataclass(frozen=True)
class Capacity:
    """Where a target's memory goes, in bytes, and what is left for tokens."""

    memory: float
    """0 where there is no limit to hold it against."""
    elements: Elements
    item_bytes: int
    weights: int
    quantization: str
    """Of the weights, for people; empty without."""
    saved: int
    """What it takes off them."""
    kv_per_token: int
    features_per_token: int
    """Kept for a draft outside of the budget."""
    colocated_per_token: int
    """KV and features of a draft model inside rounds."""
    page_size: int
    scratch: int
    graphs: int
    num_graphs: int
    budget: float
    """What --mem-fraction-static allows for weights, KV, scratch and CUDA itself."""
    outside: float
    """What is left for graphs, a draft's features and the work of prompts."""
    kv_tokens: int
    num_pages: int
    context: int
    """Tokens of the longest request."""
    max_running: int
    """--max-running-requests"""
    num_ranks: int = 1
    """--tensor-parallel-size: all of this is of one of them."""

    @property
    def tokens_each(self) -> int:
        """Tokens for each of as many requests as a round takes."""
        return min(self.kv_tokens // self.max_running, self.context)

    def round_seconds(self, bandwidth: float, num_requests: int = 1, context: int = 0) -> float:
        """A round takes at least this long, by the bytes that it reads: weights, of experts those that a token of each
        request wakes, and the KV of all contexts."""
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
    """The plan of a verify service on a GPU of `memory` bytes, of which other processes have `other_bytes`.

    `feature_elements` are what a remote draft's features take of a token. `inside`: the draft model of its rounds. The
    sums are those that the service does itself.
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
    # Features are stored when a draft asks for them, in what is left outside of the budget.
    left = memory - CONTEXT_BYTES - other_bytes - weights - scratch
    room = max(0.0, left - outside) if memory else 0.0
    tokens = options.max_total_tokens or int(room // (per_token + beside))
    if memory and options.max_total_tokens * (per_token + beside) > left:
        tokens = 0  # the service takes the number as it is, whatever --mem-fraction-static says
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
    """Rounds that are captured: every number of requests with every number of tokens that holds them."""
    if options.deterministic:
        return 1
    tokens = width_buckets(TOKEN_BUCKETS, round_tokens)
    most = min(options.max_running_requests, options.cuda_graph_max_bs)
    counts = row_buckets(most)
    return len({(max(width, min(count, tokens[-1])), count) for count in counts for width in tokens if width >= count})


@dataclass(frozen=True)
class DraftPlan:
    """A draft model in bytes."""

    algorithm: str
    weights: int
    kv_per_token: int
    tree_slots: int
    """KV and features of all tree slots, and what requests' blocks say."""
    block_bytes: int
    """What the block of one request says."""
    vocab_size: int
    """Token ids that it may guess."""
    features_per_token: int
    """Elements that verify stores of a token for it."""
    read: int
    """Bytes that a draft step reads."""

    @property
    def fixed(self) -> int:
        """What it takes before any context."""
        return self.weights + self.tree_slots + DRAFT_WORK_BYTES + CONTEXT_BYTES


def plan_inside(verify: VerifyOptions, dtype: str, folder: Path) -> DraftPlan | None:
    """The draft model of verify's own rounds, which has the target's number format and pages."""
    ranks = 1 if verify.rank_exchange == "nccl" else verify.tensor_parallel_size
    drafter = plan_draft(replace(verify.draft_model(str(folder)), dtype=dtype), folder, ranks)
    if drafter is None:
        return None
    per_token = drafter.kv_per_token + drafter.features_per_token * ITEM_BYTES[dtype]
    return replace(drafter, tree_slots=verify.max_running_requests * (ROUND_REGION * per_token + drafter.block_bytes))


def plan_draft(options: DraftOptions, target_folder: Path, ranks: int = 1) -> DraftPlan | None:
    """The draft model that the options name, from its config.json, or what rank 0 of so many has of it.

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
        # A head that multiplies features first lets verify do that, and store the product.
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
