"""Mixtures of experts in place of a gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.experts import SWIGLU, combine, expert_linear, route
from outrider.attention.base import AttentionPlan
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.models.config import ExpertsConfig

NAMES = {"qwen": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
"""What checkpoints call the whole, and an expert's gate, up and down matrices, by the form of ExpertsConfig."""


class ExpertMlp:
    """Each row through the experts that a router chooses for it, and through a shared one where there is one.

    On a GPU nothing waits for the host: what experts are woken is known to the device alone, so that a forward can be
    captured in a CUDA graph.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.name = NAMES[config.form][0]
        self.router = Linear(hidden_size, config.num_experts, False, dtype, device)
        count, size = config.num_experts, config.size
        self.gate_up = torch.empty(count, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(count, hidden_size, size, dtype=dtype, device=device)
        self.shared = SharedExpert(config.shared_size, hidden_size, dtype, device) if config.shared_size else None

    def __call__(self, stream: Tensor, norm: RMSNorm | None, plan: AttentionPlan) -> Tensor:
        """The residual stream [M, hidden] plus the experts' output for it, normed if there is a norm."""
        rows = stream if norm is None else norm(stream)
        routes = route(self.router.to_float32(rows), self.config.num_active, self.config.normed, plan.token_slots)
        inside = expert_linear(rows, self.gate_up, routes, gating=SWIGLU)
        if self.shared is not None:
            stream = self.shared.add_to(stream, rows)
        return combine(expert_linear(inside, self.down, routes), routes, stream)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """An expert's matrices are views of the stacked ones."""
        size = self.config.size
        _, gate, up, down = NAMES[self.config.form]
        found = self.router.tensors("gate")
        for expert in range(self.config.num_experts):
            prefix = f"experts.{expert}"
            found[f"{prefix}.{gate}.weight"] = self.gate_up[expert, :size]
            found[f"{prefix}.{up}.weight"] = self.gate_up[expert, size:]
            found[f"{prefix}.{down}.weight"] = self.down[expert]
        return found if self.shared is None else found | self.shared.checkpoint_tensors()

    def finish_loading(self) -> None:
        """See SelfAttention."""
        self.router.pack()
        if self.shared is not None:
            self.shared.finish_loading()


class SharedExpert:
    """A gated MLP that takes every row, times a sigmoid of the row."""

    def __init__(self, size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.gate_up = Linear(hidden_size, 2 * size, False, dtype, device)
        self.down = Linear(size, hidden_size, False, dtype, device)
        self.share = torch.empty(1, hidden_size, dtype=dtype, device=device)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [M, hidden] plus the output for `rows` of that shape."""
        share = functional.linear(rows, self.share).sigmoid()
        return torch.addcmul(residual, share, self.down(self.gate_up.gated(rows)))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """gate and up as halves of one matrix."""
        found = self.gate_up.tensors("gate_proj", "up_proj", rows=(self.size, self.size))
        found |= self.down.tensors("down_proj")
        return {f"shared_expert.{name}": tensor for name, tensor in found.items()} | {
            "shared_expert_gate.weight": self.share
        }

    def finish_loading(self) -> None:
        """See SelfAttention."""
        self.gate_up.pack()
        self.down.pack()
