"""Memory that a model takes by its config.json, what fits a GPU beside it, and the least time of a round. Torch-free.

Tests hold the sizes of weights to what the loaders allocate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.buckets import TOKEN_BUCKETS, row_buckets, width_buckets
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.capacity import CONTEXT_BYTES, GIB
from outrider.models.config import ModelConfig
from outrider.models.drafters.config import HeadConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRAPH_BYTES = 4 << 20
"""A captured round: 48 of them took 194 MiB at the shape of an 8B model (docs/results.md)."""
SCRATCH_BYTES = 16
"""Of a token slot and vocabulary entry: logits, processed logits, sampling tables."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, and memory bandwidth in bytes a second, as the maker states them."""

    memory: int
    bandwidth: float


GPUS = {
    "B200": Gpu(180 * GIB, 8.0e12),
    "H200": Gpu(140 * GIB, 4.8e12),
    "H100": Gpu(80 * GIB, 3.35e12),
    "H100-PCIE": Gpu(80 * GIB, 2.0e12),
    "A100-80GB": Gpu(80 * GIB, 2.04e12),
    "A100-40GB": Gpu(40 * GIB, 1.56e12),
    "L40S": Gpu(48 * GIB, 0.86e12),
    "A10": Gpu(24 * GIB, 0.6e12),
    "L4": Gpu(24 * GIB, 0.3e12),
    "RTX-5090": Gpu(32 * GIB, 1.79e12),
    "RTX-4090": Gpu(24 * GIB, 1.01e12),
    "RTX-3090": Gpu(24 * GIB, 0.94e12),
}
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": GIB,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str, option: str) -> float:
    """Bytes of "80GiB", "4.8TB", "512"; raises ConfigError, naming `option`."""
    found = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ConfigError(f"{option}: {text!r} is no size; write it like 80GiB or 4.8TB")
    return float(found[1]) * _UNITS[found[2].upper()]


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a model's weights, as they lie in memory."""

    embedding: int
    layers: int
    """Matrices, biases and norms of all layers, and what stands before and behind them."""
    output: int
    """The output matrix; 0 where it is the embedding itself."""

    @property
    def total(self) -> int:
        """Elements in all."""
        return self.embedding + self.layers + self.output

    @property
    def read(self) -> int:
        """Those that every forward reads: of the embedding it looks up rows, unless that is the output matrix too."""
        return self.layers + (self.output or self.embedding)


def model_elements(config: ModelConfig, packed: bool = False) -> Elements:
    """Elements of a language model. `packed`: on a CPU whose products need the output matrix in a layout of its own."""
    embedding = config.vocab_size * config.hidden_size
    layers = config.num_layers * _layer(config, config.hidden_size) + config.hidden_size
    return Elements(embedding, layers, embedding if packed or not config.tie_embeddings else 0)


def head_elements(algorithm: str, head: HeadConfig, num_target_ids: int | None = None) -> Elements:
    """Elements of an EAGLE3, EAGLE or NEXTN head, its copy of the embedding included.

    `num_target_ids`: rows that a token map leaves of the output matrix; None for those of the head.
    """
    decoder = head.decoder
    hidden, count = decoder.hidden_size, decoder.num_layers
    features = len(head.feature_layers) * head.target_hidden_size
    if algorithm == "EAGLE3":
        # The first layer takes the embedding beside the feature, and has no input norm of its own.
        layers = _layer(decoder, 2 * hidden, input_norm=False) + (count - 1) * _layer(decoder, hidden)
        layers += 3 * hidden + (features * hidden + head.fc_bias * hidden if head.projects else 0)
        layers += features * (head.norm_each + head.norm_all)
    elif algorithm == "EAGLE":
        layers = count * _layer(decoder, hidden) - hidden + 2 * hidden * hidden + head.fc_bias * hidden
    else:
        layers = _layer(decoder, hidden) + 3 * hidden + 2 * hidden * hidden
    rows = head.draft_vocab_size if num_target_ids is None else num_target_ids
    return Elements(decoder.vocab_size * hidden, layers, rows * hidden)


def kv_elements(config: ModelConfig) -> int:
    """Elements of one token's keys and values over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _layer(config: ModelConfig, input_size: int, *, input_norm: bool = True) -> int:
    """Elements of one decoder layer whose attention takes rows of `input_size`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, both = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    attention = input_size * (query + both) + query * hidden
    attention += (query + both) * config.qkv_bias + hidden * config.output_bias
    # Head norms are kept once a head.
    attention += (config.num_heads + config.num_kv_heads) * config.head_dim * config.qk_norm
    mlp = 3 * hidden * inner + (2 * inner + hidden) * config.mlp_bias
    return attention + mlp + hidden + input_size * input_norm


@dataclass(frozen=True)
class Capacity:
    """Where a target's memory goes, in bytes, and what is left for tokens."""

    memory: float
    """0 where there is no limit to hold it against."""
    elements: Elements
    item_bytes: int
    weights: int
    kv_per_token: int
    features_per_token: int
    page_size: int
    scratch: int
    graphs: int
    num_graphs: int
    budget: float
    """What --mem-fraction-static allows for weights, KV and scratch."""
    outside: float
    """What is left for CUDA, graphs and the work of prompts."""
    kv_tokens: int
    num_pages: int
    context: int
    """Tokens of the longest request."""
    max_running: int
    """--max-running-requests"""

    @property
    def tokens_each(self) -> int:
        """Tokens for each of as many requests as a round takes."""
        return min(self.kv_tokens // self.max_running, self.context)

    def round_seconds(self, bandwidth: float, num_requests: int = 1, context: int = 0) -> float:
        """A round takes at least this long, by the bytes that it reads: weights, and the KV of all contexts."""
        read = self.elements.read * self.item_bytes + num_requests * context * self.kv_per_token
        return read / bandwidth


def plan_target(
    config: ModelConfig,
    dtype: str,
    options: VerifyOptions,
    memory: float,
    feature_elements: int = 0,
    other_bytes: float = 0.0,
) -> Capacity:
    """The plan of a verify service on a GPU of `memory` bytes, of which other processes have `other_bytes`.

    `feature_elements` are what a draft's features take of a token. The sums are those that the service does itself.
    """
    item = ITEM_BYTES[dtype]
    elements = model_elements(config)
    weights = elements.total * item
    per_token = kv_elements(config) * item
    round_tokens = max(options.max_running_requests + options.max_draft_tokens, 1)
    rows = options.max_running_requests + 1 + round_tokens
    scratch = rows * config.vocab_size * SCRATCH_BYTES
    num_graphs = 0 if options.disable_cuda_graph else count_graphs(round_tokens, options)
    budget = memory * options.mem_fraction_static
    outside = memory - budget
    # Features are stored when a draft asks for them, in what is left outside of the budget.
    room = max(0.0, memory - CONTEXT_BYTES - other_bytes - weights - outside - scratch) if memory else 0.0
    tokens = options.max_total_tokens or int(room // per_token)
    pages = tokens // options.page_size
    tokens = pages * options.page_size
    longest = max(0, min(config.max_positions, tokens - options.max_draft_tokens - options.page_size))
    return Capacity(
        memory=memory,
        elements=elements,
        item_bytes=item,
        weights=weights,
        kv_per_token=per_token,
        features_per_token=feature_elements * item,
        page_size=options.page_size,
        scratch=scratch,
        graphs=num_graphs * GRAPH_BYTES,
        num_graphs=num_graphs,
        budget=budget,
        outside=outside,
        kv_tokens=tokens,
        num_pages=pages,
        context=min(options.context_length or longest, longest)
        if tokens
        else options.context_length or config.max_positions,
        max_running=options.max_running_requests,
    )


def count_graphs(round_tokens: int, options: VerifyOptions) -> int:
    """Rounds that are captured: every number of requests with every number of tokens that holds them."""
    if options.deterministic:
        return 1
    tokens = width_buckets(TOKEN_BUCKETS, round_tokens)
    most = min(options.max_running_requests, options.cuda_graph_max_bs)
    counts = row_buckets(most)
    return len({(max(width, min(count, tokens[-1])), count) for count in counts for width in tokens if width >= count})
