"""The interface of all draft models, and the base of heads on a target's features."""

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

    token_ids_hash: str = ""
    """Hash of its tokenizer, or of its target's if it has none, by `hash_token_ids`; empty if neither is known."""
    hidden_size: int = 0
    """Width of the target's hidden state; 0 for a model without features."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target that its features come from: number n is the residual stream as it enters layer n,
    num_layers the last layer's output, num_layers + 1 that output after the final norm. Empty without features."""
    feature_size: int = 0
    """Width of a feature as `forward` takes it, after `project`; 0 without features."""
    state_size: int = 0
    """Width of what a node leaves to its children, if that is not a feature; see BlockHead."""
    block_bytes: int = 0
    """Memory for the block of one request; 0 for a model without blocks."""
    num_scratch: int = 0
    """KV slots beside a request's tree that a forward uses as scratch."""
    edge_scale = PLAIN_SCALE
    """How candidates are scored."""
    window: ContextWindow = ALL_SEEN
    """The part of long contexts that the model sees."""
    exchange: Exchange | None = None
    """Between ranks that each have their part of the weights, and the KV of their heads."""

    def __init__(
        self, shape: ModelShape, num_ids: int, target_ids: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Sets up a model without features. `target_ids`, int32, are ids of output rows; None for `num_ids` rows."""
        self.dtype, self.device = dtype, device
        self.num_layers, self.head_dim = shape.num_layers, shape.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.max_positions = shape.max_positions
        """Longest sequence that the model serves."""
        self.vocab_size = num_ids if target_ids is None else target_ids.numel()
        """Columns of `logits`: ids of the draft vocabulary."""
        self.target_vocab_size = shape.vocab_size
        """Ids of the target's vocabulary that the model knows as input."""
        self.target_ids = target_ids
        """int32 [vocab_size], the target's id of each draft id; None if they are the same."""

    @abstractmethod
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """Run M tokens, and write their k and v.

        `features` [M, feature_size] are those of the position before each token: either the target's own (projected),
        or the second value that this method returned for the token's parent.

        Returns:
            rows for `logits` [M, any], and features [M, feature_size] for the tokens' children (None without features).
        """

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """Return float32 [R, vocab_size]."""

    def step(self, batch: TokenBatch, links: Links, kv: KVCache, ranking: Ranking | None) -> Stepped | None:
        """On a CPU, do what `forward` and `logits` do in one function, which also takes and leaves features by `links`
        and searches for candidates. Returns None if there is no such function for the model or the batch."""
        return None

    def extend(
        self, batch: TokenBatch, features: Tensor | None, slots: Tensor, kv: KVCache, attention: AttentionBackend
    ) -> None:
        """Compute KV of M context tokens; `slots` [M] are those of `batch`, negative for padding."""
        self.forward(batch, features, kv, attention)

    def project(self, features: Tensor) -> Tensor:
        """Map target features [N, len(feature_layers) * hidden_size] to [N, feature_size]."""
        return features

    def projection(self) -> Tensor | None:
        """Return the matrix [feature_size, len(feature_layers) * hidden_size] that `project` multiplies features with.

        None if there is none, or if features pass something before it, such as a norm.
        """
        return None

    def finish_product(self, product: Tensor) -> Tensor:
        """Return what `project` would, from features [N, feature_size] multiplied with `projection` elsewhere."""
        return product

    def new_kv(self, num_slots: int) -> KVCache:
        """Return a cache of the model's shape, dtype and device."""
        return KVCache(self.num_layers, num_slots, self.num_kv_heads, self.head_dim, self.dtype, self.device)

    @property
    def kv_bytes(self) -> int:
        """Memory of one token's keys and values in a cache from `new_kv`."""
        return KVCache.bytes_per_slot(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)


class DraftHead(DraftModel):
    """An embedding, decoder layers and an output matrix; built empty, as `CausalLM` is.

    Subclasses append to `layers`, and make all else by `norm` and `linear`. `_reducer` is the layer that raw features
    go through first, if there is one. `target_ids`, None or int32 [num_ids], are the ids that the output matrix has
    rows for.
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
        scheme = decoder.scheme_of("lm_head")
        self.output = Linear(decoder.hidden_size, config.output_rows(self.vocab_size), False, dtype, device, scheme)
        self._linears: dict[str, Linear] = {OUTPUT.removesuffix(".weight"): self.output}
        self._norms: dict[str, RMSNorm] = {}
        self._reducer: Linear | None = None
        self._projection: Tensor | None = None
        self.rotary = Rotary(decoder.rope, decoder.weight_head_dim, device, decoder.head_dim)
        self.layers: list[DecoderLayer] = []
        self.stack = LayerStack(self.layers, decoder, self.rotary)

    def join(self, exchange: Exchange) -> None:
        """Compute as one of several ranks, with `config` as `cut_head` makes it; call before `finish_loading`."""
        self.exchange = exchange
        for layer in self.layers:
            layer.join(exchange)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill by their names in the checkpoint, as `head_name` gives them."""
        found: dict[str, Tensor] = {EMBEDDING: self.embedding}
        found |= {f"{name}.weight": norm.weight for name, norm in self._norms.items()}
        for name, linear in self._linears.items():
            found |= linear.tensors(name)
        for number, layer in enumerate(self.layers):
            found |= {f"layers.{number}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """Choose memory layouts. Called once when all tensors are filled."""
        if self._reducer is not None:
            # Before packing, which changes its layout on a CPU.
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
        """Return [M, hidden] for ids [M] of the target's vocabulary."""
        return functional.embedding(token_ids, self.embedding)

    def norm(self, name: str, size: int) -> RMSNorm:
        """Make an empty norm with the decoder's epsilon; `name` is its name in checkpoints."""
        made = RMSNorm((size,), self.config.decoder.rms_norm_eps, self.dtype, self.device)
        self._norms[name] = made
        return made

    def linear(self, name: str, in_features: int, bias: bool = False) -> Linear:
        """Make an empty projection to the decoder's hidden size; `name` is its name in checkpoints."""
        made = Linear(in_features, self.config.decoder.hidden_size, bias, self.dtype, self.device)
        self._linears[name] = made
        return made


def required(features: Tensor | None) -> Tensor:
    """Return the features. Raises ValueError if there are none."""
    if features is None:
        raise ValueError("a head needs features")
    return features


def offered_projection(model: DraftModel) -> Projection | None:
    """Return the model's projection on the host if it makes features smaller and verify takes its shape; else None."""
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
