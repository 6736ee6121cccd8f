"""Whether two checkpoints are the same function, with one layer of each in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.weights import TensorReader

# Of ||inflated - source|| / ||source||, by the inflated checkpoint's dtype: what the rounding of its weights gives
# over thirty layers, with room to spare.
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# exp(-100) is below the smallest float32.
MIN_GAP = 100.0

VOCAB_CHUNK = 8192


@dataclass(frozen=True)
class Comparison:
    """How far two checkpoints' logits are apart over the same tokens.

    `agreement` is the part of positions whose likeliest token is the same. `padding_gap` is how far every added token's
    logit lies below the likeliest one's, at least; None where none was added.
    """

    relative_error: float
    agreement: float
    padding_gap: float | None

    def passes(self, dtype: torch.dtype) -> bool:
        """Whether the two are the same function, up to the rounding of weights to `dtype`."""
        return self.relative_error <= LIMITS[dtype] and (self.padding_gap is None or self.padding_gap >= MIN_GAP)

    def __str__(self) -> str:
        text = f"relative error {self.relative_error:.2g}, same likeliest token at {self.agreement:.0%} of positions"
        return text if self.padding_gap is None else f"{text}, added tokens at least {self.padding_gap:.0f} below"


def compare(source: Path, inflated: Path, token_ids: list[int], device: torch.device) -> Comparison:
    """Logits of both folders' models, computed in float32, compared."""
    expected = streamed_logits(source, token_ids, device)
    logits = streamed_logits(inflated, token_ids, device)
    actual, padding = logits.split((expected.shape[1], logits.shape[1] - expected.shape[1]), 1)
    gap = None
    if padding.shape[1]:
        gap = float((actual.amax(1) - padding.amax(1)).min())
    return Comparison(
        relative_error=float((actual - expected).norm() / expected.norm()),
        agreement=float((actual.argmax(1) == expected.argmax(1)).float().mean()),
        padding_gap=gap,
    )


@torch.inference_mode()
def streamed_logits(folder: Path, token_ids: list[int], device: torch.device) -> Tensor:
    """float32 [num_tokens, vocab_size] on the CPU for a prompt, whatever the checkpoint's size and dtype.

    The model is run as many models of one layer: the residual stream after one is the next one's embedding.
    """
    config = ModelConfig.from_folder(folder)
    count = len(token_ids)
    # Embedding and output matrix of these models are as small as the prompt: their tokens are its positions.
    one_layer = replace(config, num_layers=1, vocab_size=count, tie_embeddings=True)
    order = torch.arange(count, device=device)
    batch = ForwardBatch(order, order, [Segment(count, order)])
    with TensorReader(folder) as reader:
        rows = torch.tensor(token_ids)
        stream = reader.tensor("model.embed_tokens.weight")[rows].to(device, torch.float32)
        hidden = stream
        for layer in range(config.num_layers):
            model = CausalLM(one_layer, torch.float32, device)
            for name, target in model.checkpoint_tensors().items():
                if name == "model.embed_tokens.weight":
                    target.copy_(stream)
                else:
                    target.copy_(reader.tensor(name.replace("layers.0.", f"layers.{layer}.")))
            model.finish_loading()
            hidden, (stream,) = model.forward_with_features(batch, model.new_kv(count), TorchAttention(), (1,))
        head = reader.tensor("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
        chunks = [hidden @ chunk.to(device, torch.float32).t() for chunk in head.split(VOCAB_CHUNK)]
        return torch.cat(chunks, 1).cpu()
