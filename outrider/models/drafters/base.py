"""What every draft model offers to what drafts with it, and what all heads on a target's features share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.head_step import Links, Ranking, Stepped
from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.exchange import Exchange
from outrider.layers.linear import Linear, RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelShape
from outrider.models.decoder import DecoderLayer, LayerStack
from outrider.models.drafters.config import ALL_SEEN, EMBEDDING, OUTPUT, ContextWindow, HeadConfig
from outrider.sampling.proposer import HEAD_SCALE, PLAIN_SCALE
from outrider.tree.handshake import MAX_PROJECTION_BYTES, Projection, name_projection


class DraftModel(ABC):
    """A model that guesses the target's tokens, with or without its features. Callers are in inference mode."""

    tokenizer_hash: str = ""
    """SHA-256 of its own tokenizer.json, hexadecimal; empty for a head without one."""
    hidden_size: int = 0
    """Width of the target's hidden state; 0 for a model without features."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target that its features come from: number n is the residual stream as it enters layer n,
    num_layers the last layer's output, num_layers + 1 that output after the final norm. Empty without features."""
    feature_size: int = 0
    """Width of a feature as `forward` takes it, after `project`; 0 without features."""
    state_size: int = 0
    """Width of what a node leaves to its children, where that is not a feature; see BlockHead."""
    block_bytes: int = 0
    """Memory of what the block of one request says; 0 for a model without blocks."""
    num_scratch: int = 0
    """KV slots beside a request's tree that a forward fills for itself."""
    edge_scale = PLAIN_SCALE
    """How its candidates are scored."""
    window: ContextWindow = ALL_SEEN
    """What it is shown of long contexts."""
    exchange: Exchange | None = None
    """Among ranks of which each has its part of the weights, and KV of its heads."""

    def __init__(
        self, shape: ModelShape, num_ids: int, target_ids: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Without features. `target_ids` int32 are those of its output matrix's rows; None for `num_ids` rows."""
        self.dtype, self.device = dtype, device
        self.num_layers, self.head_dim = shape.num_layers, shape.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.max_positions = shape.max_positions
        """Longest sequence that it serves."""
        self.vocab_size = num_ids if target_ids is None else target_ids.numel()
        """Columns of `logits`: ids of the draft vocabulary."""
        self.target_vocab_size = shape.vocab_size
        """Ids of the target's vocabulary that it knows as input."""
        self.target_ids = target_ids
        """int32 [vocab_size], the target's id of each draft id; None where they are the same."""

    @abstractmethod
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """Run M tokens; writes their k and v.

        `features` [M, feature_size]: of the position before each token, the target's own (projected) or the second
        value that this method returned for the token's parent.

        Returns:
            rows for `logits` [M, any], and features [M, feature_size] for the tokens' children (None without features).
        """

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """float32 [R, vocab_size]."""

    def step(self, batch: TokenBatch, links: Links, kv: KVCache, ranking: Ranking | None) -> Stepped | None:
        """On a CPU what `forward` and `logits` do, features of and for `links` and the search for candidates included,
        in one function; None where there is none for the model or the batch."""
        return None

    def extend(
        self, batch: TokenBatch, features: Tensor | None, slots: Tensor, kv: KVCache, attention: AttentionBackend
    ) -> None:
        """Compute KV of M context tokens; `slots` [M] are those that `batch` says, negative for padding."""
        self.forward(batch, features, kv, attention)

    def project(self, features: Tensor) -> Tensor:
        """Target features [N, len(feature_layers) * hidden_size] to [N, feature_size]."""
        return features

    def projection(self) -> Tensor | None:
        """The matrix [feature_size, len(feature_layers) * hidden_size] that `project` multiplies raw features with.

        None where there is none, or where what comes before the product is not linear.
        """
        return None

    def finish_product(self, product: Tensor) -> Tensor:
        """What `project` gives, from features that were multiplied with `projection` elsewhere [N, feature_size]."""
        return product

    def new_kv(self, num_slots: int) -> KVCache:
        """A cache of the model's shape, dtype and device."""
        return KVCache(self.num_layers, num_slots, self.num_kv_heads, self.head_dim, self.dtype, self.device)


class DraftHead(DraftModel):
    """An embedding, decoder layers and an output matrix; built empty, as `CausalLM` is.

    Subclasses append to `layers`, and make all else by `norm` and `linear`. `_reducer` is the layer that raw features
    go through first, where there is one. `target_ids` None or int32 [num_ids] says which ids the output matrix has rows
    for.
    """

    edge_scale = HEAD_SCALE

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        decoder = config.decoder
        super().__init__(decoder, config.draft_vocab_size, target_ids, dtype, device)
        self.config = config
        self.hidden_size = config.target_hidden_size
        self.feature_layers = config.feature_layers
        self.feature_size = decoder.hidden_size
        self.window = config.window
        self.embedding = torch.empty(decoder.vocab_size, decoder.hidden_size, dtype=dtype, device=device)
        self.output = Linear(decoder.hidden_size, config.output_rows(self.vocab_size), False, dtype, device)
        self._linears: dict[str, Linear] = {OUTPUT.removesuffix(".weight"): self.output}
        self._norms: dict[str, RMSNorm] = {}
        self._reducer: Linear | None = None
        self._projection: Tensor | None = None
        self.rotary = Rotary(decoder.rope, decoder.weight_head_dim, device, decoder.head_dim)
        self.layers: list[DecoderLayer] = []
        self.stack = LayerStack(self.layers, decoder, self.rotary)

    def join(self, exchange: Exchange) -> None:
        """Compute as one of several ranks; before `finish_loading`. `config` is what `cut_head` makes for so many."""
        self.exchange = exchange
        for layer in self.layers:
            layer.join(exchange)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint belongs, by its name as `head_name` gives it."""
        found: dict[str, Tensor] = {EMBEDDING: self.embedding}
        found |= {f"{name}.weight": norm.weight for name, norm in self._norms.items()}
        for name, linear in self._linears.items():
            found |= linear.tensors(name)
        for number, layer in enumerate(self.layers):
            found |= {f"layers.{number}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """Called once when all tensors are filled, to choose memory layouts."""
        if self._reducer is not None:
            # Before packing, which on a CPU lays it out anew.
            self._projection = self._reducer.weight
        for linear in self._linears.values():
            linear.pack()
        self.stack.finish_loading()

    def logits(self, rows: Tensor) -> Tensor:
        """See DraftModel."""
        logits = self.output.to_float32(rows)
        if self.exchange is None or self.output.num_out == self.vocab_size:
            return logits
        return self.exchange.join(logits)

    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        features = features.to(self.dtype)
        return features if self._reducer is None else self._reducer(features)

    def projection(self) -> Tensor | None:
        """See DraftModel."""
        return self._projection

    def finish_product(self, product: Tensor) -> Tensor:
        """See DraftModel."""
        product = product.to(self.dtype)
        return product if self._reducer is None or self._reducer.bias is None else product + self._reducer.bias

    def embed(self, token_ids: Tensor) -> Tensor:
        """[M, hidden] for ids [M] of the target's vocabulary."""
        return functional.embedding(token_ids, self.embedding)

    def norm(self, name: str, size: int) -> RMSNorm:
        """An empty norm with the decoder's epsilon; `name` is its name in checkpoints."""
        made = RMSNorm((size,), self.config.decoder.rms_norm_eps, self.dtype, self.device)
        self._norms[name] = made
        return made

    def linear(self, name: str, in_features: int, bias: bool = False) -> Linear:
        """An empty projection to the decoder's hidden size, likewise."""
        made = Linear(in_features, self.config.decoder.hidden_size, bias, self.dtype, self.device)
        self._linears[name] = made
        return made


def required(features: Tensor | None) -> Tensor:
    """The features. Raises ValueError where there are none."""
    if features is None:
        raise ValueError("a head needs features")
    return features


def offered_projection(model: DraftModel) -> Projection | None:
    """The model's projection on the host, if it makes features smaller and is of a shape and size that verify takes."""
    matrix = model.projection()
    if matrix is None:
        return None
    num_columns, width = matrix.shape
    if num_columns >= width or num_columns > model.hidden_size or num_columns % 2:
        return None
    if matrix.numel() * matrix.element_size() > MAX_PROJECTION_BYTES:
        return None
    data = matrix.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    layers, dtype = tuple(model.feature_layers), str(matrix.dtype).removeprefix("torch.")
    return Projection(layers, num_columns, dtype, data, name_projection(layers, num_columns, dtype, data))
