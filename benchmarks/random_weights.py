"""Models of random weights, for benchmarks whose times do not depend on what a model says."""

from __future__ import annotations

import torch

from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftHead
from outrider_tools.inflate.shapes import Shape

SMALL = Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
"""SmolLM2-135M's; its embedding is its output matrix, too."""
SMALL_VOCAB = 49152


@torch.inference_mode()
def fill_random(model: CausalLM | DraftHead) -> None:
    """Give a model that was just made its weights: ones for norms."""
    for tensor in model.checkpoint_tensors().values():
        tensor.fill_(1.0) if tensor.ndim == 1 else tensor.normal_(0.0, 0.02)
    model.finish_loading()


@torch.inference_mode()
def random_model(
    sizes: Shape, vocab_size: int, dtype: torch.dtype, device: torch.device, tied: bool = False
) -> CausalLM:
    """A Llama of that shape; its embedding is the output matrix, too, if `tied`."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": 1 << 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    config = ModelConfig.from_fields(fields, {})
    model = CausalLM(config, dtype, device)
    fill_random(model)
    return model
