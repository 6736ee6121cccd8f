"""How much memory a model takes, from its config.json alone. Torch-free; tests hold it to what the loaders allocate."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.config import ModelConfig
from outrider.models.drafters.config import HeadConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
        """All of them."""
        return self.embedding + self.layers + self.output

    @property
    def read(self) -> int:
        """Those that every forward reads: of the embedding it looks up rows, unless that is the output matrix too."""
        return self.layers + (self.output or self.embedding)


def model_elements(config: ModelConfig, packed: bool = False) -> Elements:
    """Of a language model. `packed`: on a CPU whose products want the output matrix in a layout of its own."""
    embedding = config.vocab_size * config.hidden_size
    layers = config.num_layers * _layer(config, config.hidden_size) + config.hidden_size
    return Elements(embedding, layers, embedding if packed or not config.tie_embeddings else 0)


def head_elements(algorithm: str, head: HeadConfig, num_target_ids: int | None = None) -> Elements:
    """Of an EAGLE3, EAGLE or NEXTN head, its copy of the embedding included.

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
    """Of one token's keys and values over all layers."""
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
