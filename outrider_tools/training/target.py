"""The target as training needs it: a forward over whole sequences, its embedding, and its output matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.attention.base import TokenBatch
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.loader import decoder_tensors, load_decoder
from outrider.models.weights import StoredTensor, stored_tensors
from outrider_tools.training.attention import SpanAttention, Spans

EMBEDDING = "model.embed_tokens.weight"


class TargetModel:
    """A frozen model on one device: bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = load_decoder(folder, self.dtype, device)
        self.config: ModelConfig = self.model.config
        if not self.config.is_plain:
            raise ConfigError(
                f"{folder}: drafters are trained for targets with layers as Llama, Mistral and Qwen have them, not for "
                f"{self.config.architecture}"
            )
        self.rotary = Rotary(self.config.rope, self.config.head_dim, device)
        self._embedding = self.stored(EMBEDDING).to(device, self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that tells this target from others, also fine-tuned ones, without reading all weights."""
        found = hashlib.sha256()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            path = self.folder / name
            found.update(path.read_bytes() if path.is_file() else b"")
        for name, tensor in sorted(stored_tensors(self.folder).items()):
            first = tensor.read([[(0, 1)], *([(0, size)] for size in tensor.shape[1:])])
            found.update(name.encode() + first.reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the checkpoint's tensors by their decoder's own names. Files stay mapped while any of them lives."""
        return decoder_tensors(self.folder, self.config)

    def stored(self, name: str) -> Tensor:
        """Return the checkpoint's tensor of that name, on the CPU and in its file's dtype."""
        return self.tensors()[name].read()

    def stored_output(self) -> Tensor:
        """Return the output matrix [vocab_size, hidden], on the CPU and in its file's dtype."""
        return self.stored(EMBEDDING if self.config.tie_embeddings else "lm_head.weight")

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings [..., hidden] of token ids, int64 [...]."""
        return functional.embedding(token_ids, self._embedding)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which drafters, which are float32, compute in the target's dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def target_states(
    model: CausalLM, token_ids: Tensor, spans: Spans, feature_layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Run the target over the sequences of `spans`, with token ids int64 [M].

    Returns features [M, len(feature_layers) * hidden], in the order of `feature_layers`, and the hidden states
    [M, hidden] that `model.logits` takes. Both may be saved for a backward pass.
    """
    batch = TokenBatch(token_ids, spans.positions)
    # Nothing is written to the cache; it only gives heads and dtype.
    hidden, layers = model.forward_with_features(batch, model.new_kv(1), SpanAttention(spans), feature_layers)
    # Copies: autograd refuses to keep tensors that inference mode made.
    hidden = hidden.clone()
    return torch.cat(layers, 1) if layers else hidden[:, :0], hidden
