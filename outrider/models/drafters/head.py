"""What all heads on a target's features share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.decoder import DecoderLayer
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import HeadConfig
from outrider.sampling.edge_scale import HEAD_SCALE

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class DraftHead(DraftModel):
    """An embedding, decoder layers and an output matrix; built empty, as `CausalLM` is.

    Subclasses append to `layers`. `target_ids` None or int32 [num_ids] says which ids the output matrix has rows for.
    """

    edge_scale = HEAD_SCALE

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        decoder = config.decoder
        self.config = config
        self.dtype = dtype
        self.device = device
        self.num_layers = decoder.num_layers
        self.num_heads = decoder.num_heads
        self.num_kv_heads = decoder.num_kv_heads
        self.head_dim = decoder.head_dim
        self.max_positions = decoder.max_positions
        self.target_vocab_size = decoder.vocab_size
        self.target_ids = target_ids
        self.vocab_size = config.draft_vocab_size if target_ids is None else target_ids.numel()
        self.tokenizer_hash = ""
        self.hidden_size = config.target_hidden_size
        self.feature_layers = config.feature_layers
        self.feature_size = decoder.hidden_size
        self.embedding = torch.empty(decoder.vocab_size, decoder.hidden_size, dtype=dtype, device=device)
        self.output = Linear(decoder.hidden_size, self.vocab_size, False, dtype, device)
        self.rotary = Rotary(decoder.rope, decoder.head_dim, device)
        self.layers: list[DecoderLayer] = []

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint belongs, by its name as `head_name` gives it."""
        found: dict[str, Tensor] = {EMBEDDING: self.embedding, OUTPUT: self.output.weight}
        for number, layer in enumerate(self.layers):
            found |= {f"layers.{number}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """Called once when all tensors are filled, to choose memory layouts."""
        self.output.pack()
        for layer in self.layers:
            layer.finish_loading()

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """See DraftModel."""
        return self.output.to_float32(rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[M, hidden] for ids [M] of the target's vocabulary."""
        return functional.embedding(token_ids, self.embedding)

    def norm(self, size: int) -> RMSNorm:
        """An empty norm with the decoder's epsilon."""
        return RMSNorm((size,), self.config.decoder.rms_norm_eps, self.dtype, self.device)

    def linear(self, in_features: int, bias: bool = False) -> Linear:
        """An empty projection to the decoder's hidden size."""
        return Linear(in_features, self.config.decoder.hidden_size, bias, self.dtype, self.device)


def required(features: Tensor | None) -> Tensor:
    """The features. Raises ValueError where there are none."""
    if features is None:
        raise ValueError("a head needs features")
    return features
