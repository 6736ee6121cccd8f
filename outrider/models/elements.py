"""Counts elements of a model's or head's weights, and of a token's keys and values, by config.json. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from outrider.models.config import ModelConfig, ModelShape, padded_head_dim
from outrider.models.drafters.config import HeadConfig
from outrider.models.store_folder import shard_paths, tensor_shapes


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a model's weights, as they lie in memory."""

    embedding: int
    layers: int
    """Matrices, biases and norms of all layers, and what comes before and after them."""
    output: int
    """The output matrix; 0 if it is the embedding itself."""
    idle: int = 0
    """Elements of `layers` in experts that a token does not use."""
    idle_share: float = 0.0
    """The share of experts that a token does not use."""

    @property
    def total(self) -> int:
        """Elements in all."""
        return self.embedding + self.layers + self.output

    @property
    def read(self) -> int:
        """Elements that a forward of one token reads: a row of the embedding, or all if it is the output matrix too."""
        return self.layers - self.idle + (self.output or self.embedding)

    def read_by(self, num_tokens: int) -> int:
        """Return how many elements a forward is expected to read if each token chooses its experts independently."""
        return self.read + round(self.idle * (1.0 - self.idle_share ** (num_tokens - 1)))


def target_elements(config: ModelShape, folder: Path) -> Elements:
    """Return the elements of a target; for a model that transformers runs, they are counted in its files.

    Of a model of images or sound, the language model counts. Per-layer embeddings are read by rows, like any embedding.
    """
    if isinstance(config, ModelConfig):
        return model_elements(config)
    embedding = config.vocab_size * config.hidden_size
    output = 0 if config.tie_embeddings else embedding
    # By name: a tensor may be in two shards, of which one counts.
    shapes = {name: shape for path in shard_paths(folder) for name, shape in tensor_shapes(path).items()}
    parts = [name for name in shapes if "language_model." in name] or list(shapes)
    counts = {name: prod(shapes[name]) for name in {*parts, "lm_head.weight"} & shapes.keys()}
    rows = sum(count for name, count in counts.items() if name.endswith("embed_tokens_per_layer.weight"))
    return Elements(embedding, sum(counts.values()) - embedding - output, output, rows, 1.0)


def model_elements(config: ModelConfig) -> Elements:
    """Return the elements of a language model."""
    embedding = config.vocab_size * config.hidden_size
    layers = config.num_layers * _layer(config, config.hidden_size) + config.hidden_size
    output = 0 if config.tie_embeddings else embedding // config.vocab_cuts
    if (experts := config.experts) is None:
        return Elements(embedding, layers, output)
    mixtures, hidden = len(experts.layers), config.hidden_size
    layers += mixtures * (experts.num_weights(hidden) - _mlp(config))
    num_idle = experts.num_experts - experts.num_active
    idle = mixtures * num_idle * 3 * hidden * experts.size
    return Elements(embedding, layers, output, idle, num_idle / experts.num_experts)


def head_elements(algorithm: str, head: HeadConfig) -> Elements:
    """Return the elements of a head, with its copy of the embedding; of a sequential part, the two large matrices."""
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
    elif head.block is not None:
        # The context's keys and values have a product of their own.
        layers = count * (_layer(decoder, hidden) + 2 * decoder.num_kv_heads * decoder.head_dim * hidden)
        layers += features * hidden + head.fc_bias * hidden + 2 * hidden
        layers += (decoder.vocab_size + head.draft_vocab_size) * head.block.markov_rank
    else:
        layers = _layer(decoder, hidden) + 3 * hidden + 2 * hidden * hidden
    return Elements(decoder.vocab_size * hidden, layers, head.output_rows(head.draft_vocab_size) * hidden)


def kv_elements(config: ModelShape) -> int:
    """Return the elements of a token's keys and values over all layers, with the zeros that pad heads on a GPU."""
    return 2 * config.num_layers * config.num_kv_heads * padded_head_dim(config.head_dim)


def _layer(config: ModelConfig, input_size: int, *, input_norm: bool = True) -> int:
    """Return the elements of one decoder layer whose attention takes rows of `input_size`."""
    hidden = config.hidden_size
    query, both = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    attention = input_size * (query + both) + query * hidden
    attention += (query + both) * config.qkv_bias + hidden * config.output_bias
    # Head norms are kept once a head; those of the whole width have as many elements.
    has_head_norms = config.qk_norm or config.family.wide_qk_norm
    attention += (config.num_heads + config.num_kv_heads) * config.head_dim * has_head_norms
    behind = 2 * hidden * (config.family.norms == "both")
    return attention + _mlp(config) + hidden + input_size * input_norm + behind


def _mlp(config: ModelConfig) -> int:
    """Return the elements of a gated MLP that is not a mixture of experts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return 3 * hidden * inner + (2 * inner + hidden) * config.mlp_bias
