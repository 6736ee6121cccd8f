"""The target as training needs it: whole sequences in, its embedding, its output matrix to begin from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.models.loader import load_model
from outrider.models.weights import TensorReader
from outrider_tools.training.eagle3 import Eagle3Head


class Target:
    """A frozen model on one device: bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = load_model(folder, self.dtype, device)
        self.config: ModelConfig = self.model.config
        self.rotary = Rotary(self.config.rope, self.config.head_dim, device)
        with TensorReader(folder) as reader:
            embedding = reader.tensor("model.embed_tokens.weight")
        self._embedding = embedding.to(device, self.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., hidden] of int64 [...]."""
        return functional.embedding(token_ids, self._embedding)

    def autocast(self) -> AbstractContextManager[object]:
        """Heads are float32 and compute in the target's dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def start(self, head: Eagle3Head) -> None:
        """Give a new head the target's final norm and the rows of its output matrix: it then speaks its language."""
        with TensorReader(self.folder) as reader:
            name = "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"
            head.lm_head.weight.copy_(reader.tensor(name)[head.target_ids.cpu()].float())
            head.norm.weight.copy_(reader.tensor("model.norm.weight").float())
