"""Mixtures of experts in place of a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.expert_tiles import Gating, Routes, by_expert
from kernels.experts import combine, expert_linear, gate, route
from kernels.quant_weight import QuantWeight, joined
from outrider.attention.base import AttentionPlan
from outrider.layers.cpu_weight import CpuWeight
from outrider.layers.exchange import Exchange
from outrider.layers.formats import decode, weight_tensors
from outrider.layers.humming_weight import HummingExperts, humming_experts
from outrider.layers.linear import Linear, RMSNorm
from outrider.models.config import ModelConfig
from outrider.models.parts import ExpertsConfig
from outrider.models.quantization import Scheme

NAMES = {
    "qwen": ("mlp", "gate", ("gate_proj", "up_proj"), "down_proj"),
    "mixtral": ("block_sparse_moe", "gate", ("w1", "w3"), "w2"),
    "gpt-oss": ("mlp", "router", ("gate_up_proj",), "down_proj"),
}
"""Names in checkpoints, by `ExpertsConfig.form`, of the mixture, its router, its gate and up, and its down matrices."""


class ExpertLinear:
    """A matrix of each expert, [E, out, in]. A loader fills it and then calls `pack`; for `scheme` see Linear."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None,
    ) -> None:
        """`parts`: row counts of the stacked matrices that are separate in checkpoints."""
        self.num_out = rows = sum(parts)
        self.weight = torch.empty(num_experts, 0 if scheme else rows, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(num_experts, rows, dtype=dtype, device=device) if bias else None
        self.quantized: QuantWeight | None = None
        self.library: HummingExperts | None = None
        self.on_cpu: list[CpuWeight] = []
        self._parts, self._scheme = list(parts), scheme
        self._stored: list[dict[str, Tensor]] = []

    def tensors(self, *names: str) -> dict[str, Tensor]:
        """Return the tensors to fill, by each expert's checkpoint names: views of the stacked ones."""
        parts: list[dict[str, Tensor]]
        if self._scheme is None:
            parts = [{"weight": view} for view in self.weight.split(self._parts, 1)]
        else:
            parts = self._stored = self._empty(self._scheme)
        return {
            f"experts.{expert}.{name}.{end}": tensor[expert]
            for name, part in zip(names, parts, strict=True)
            for end, tensor in part.items()
            for expert in range(len(tensor))
        }

    def stacked_tensors(self, name: str) -> dict[str, Tensor]:
        """Do as `tensors` if one tensor holds all experts, with rows and columns exchanged unless quantized."""
        if self._scheme is None:
            found = {f"experts.{name}": self.weight.transpose(1, 2)}
        else:
            self._stored = self._empty(self._scheme)
            found = {f"experts.{name}_{end}": tensor for end, tensor in self._stored[0].items()}
        return found if self.bias is None else found | {f"experts.{name}_bias": self.bias}

    def pack(self) -> None:
        """Convert what was loaded to the form that is multiplied."""
        if self._scheme is None:
            self._pack_on_cpu(None)
            return
        quantized = joined([decode(self._scheme, part) for part in self._stored])
        self._stored = []
        if self.weight.is_cuda and self.weight.dtype != torch.float32 and quantized.streams:
            if self._scheme.library:
                self.library = humming_experts(quantized, self.bias, self.weight.dtype)
            self.quantized = None if self.library is not None else quantized
        else:
            self.weight = quantized.dequantized(self.weight.dtype)
            self._pack_on_cpu(quantized)

    def _pack_on_cpu(self, quantized: QuantWeight | None) -> None:
        """Pack each expert by itself, in bfloat16; `quantized` is how they were stored, if they were quantized."""
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.bfloat16:
            return
        stored = [None if quantized is None else quantized.of_expert(expert) for expert in range(len(self.weight))]
        for weight, part in zip(self.weight, stored, strict=True):
            packed = CpuWeight.of(weight, part)
            if packed is None:
                return
            self.on_cpu.append(packed)
        self.weight = self.weight.new_empty(0)

    def __call__(self, rows: Tensor, routes: Routes, gating: Gating | None = None, interleaved: bool = False) -> Tensor:
        """See kernels.experts.expert_linear."""
        if self.library is not None:
            pairs = self.library(rows, routes)
        elif self.on_cpu:
            pairs = by_expert(rows, routes.experts, self.num_out, self._product_on_cpu)
        else:
            weight = self.weight if self.quantized is None else self.quantized
            return expert_linear(rows, weight, routes, bias=self.bias, gating=gating, interleaved=interleaved)
        return pairs if gating is None else gate(pairs, gating, interleaved)

    def _product_on_cpu(self, expert: int, rows: Tensor) -> Tensor:
        return self.on_cpu[expert].product(rows, None if self.bias is None else self.bias[expert])

    def tile(self, num_pairs: int) -> int:
        """Return the `tile` of kernels.experts.route for `num_pairs`."""
        return 0 if self.library is None else self.library.tile(num_pairs)

    def _empty(self, scheme: Scheme) -> list[dict[str, Tensor]]:
        count, _, size = self.weight.shape
        return [weight_tensors(scheme, rows, size, self.weight.device, count) for rows in self._parts]


class ExpertMlp:
    """Sends each row through the experts that a router chooses for it, and through a shared one if there is one.

    On a GPU nothing waits for the host: only the device knows which experts are used, so that a forward can be captured
    in a CUDA graph.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = experts
        self.name, router, gate_up, down = NAMES[experts.form]
        self._interleaved = experts.form == "gpt-oss"
        self._gating = Gating(experts.alpha, experts.limit, experts.shift)
        hidden, size, bias = config.hidden_size, experts.size, experts.bias
        prefix = f"model.layers.{layer}.{self.name}"
        # The first expert stands for all. If another one is stored differently, tensors are reported as missing.
        first = f"{prefix}.experts" + ("" if self._interleaved else ".0")
        scheme = config.scheme_of(f"{prefix}.{router}")
        self.router = Linear(hidden, experts.num_experts, bias, dtype, device, scheme and scheme.without_library())
        scheme = config.scheme_of(*(f"{first}.{name}" for name in gate_up))
        parts = [2 * size // len(gate_up)] * len(gate_up)
        self.gate_up = ExpertLinear(experts.num_experts, hidden, parts, bias, dtype, device, scheme)
        scheme = config.scheme_of(f"{first}.{down}")
        self.down = ExpertLinear(experts.num_experts, size, [hidden], bias, dtype, device, scheme)
        self.shared = SharedExpert(config, experts, prefix, dtype, device) if experts.shared_size else None
        self.exchange: Exchange | None = None
        """Between ranks that each have some channels of every expert."""
        self.next_norm: RMSNorm | None = None
        """The next norm of the residual stream."""

    def __call__(self, stream: Tensor, norm: RMSNorm | None, plan: AttentionPlan) -> Tensor:
        """Return the residual stream [M, hidden] plus the experts' output for the normed stream."""
        rows = stream if norm is None else norm(stream)
        num_active = self.config.num_active
        tile = self.gate_up.tile(len(rows) * num_active)
        routes = route(self.router.to_float32(rows), num_active, self.config.normed, plan.token_slots, tile)
        inside = self.gate_up(rows, routes, self._gating, self._interleaved)
        base = stream if self.exchange is None else torch.zeros_like(stream)
        if self.shared is not None:
            base = self.shared.add_to(base, rows)
        total = combine(self.down(inside, routes), routes, base)
        return total if self.exchange is None else self.exchange.add(stream, total, self.next_norm)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill by their Hugging Face names below the mixture's own."""
        _, router, gate_up, down = NAMES[self.config.form]
        found = self.router.tensors(router)
        if self._interleaved:
            found |= self.gate_up.stacked_tensors(*gate_up) | self.down.stacked_tensors(down)
        else:
            found |= self.gate_up.tensors(*gate_up) | self.down.tensors(down)
        return found if self.shared is None else found | self.shared.checkpoint_tensors()

    def finish_loading(self) -> None:
        """See SelfAttention."""
        if self.exchange is not None and self.exchange.rank:
            # Only rank 0 adds the bias.
            self.down.bias = None
        self.router.pack()
        self.gate_up.pack()
        self.down.pack()
        if self.shared is not None:
            self.shared.finish_loading()


class SharedExpert:
    """A gated MLP for every row, whose output is scaled by a sigmoid of the row's product with `gate_weight`."""

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        hidden, self.size = config.hidden_size, experts.shared_size
        scheme = config.scheme_of(f"{prefix}.shared_expert.gate_proj", f"{prefix}.shared_expert.up_proj")
        self.gate_up = Linear(hidden, 2 * self.size, False, dtype, device, scheme)
        scheme = config.scheme_of(f"{prefix}.shared_expert.down_proj")
        self.down = Linear(self.size, hidden, False, dtype, device, scheme)
        self.gate_weight = torch.empty(1, hidden, dtype=dtype, device=device)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Return `residual` [M, hidden] plus the output for `rows` of that shape."""
        share = functional.linear(rows, self.gate_weight).sigmoid()
        return torch.addcmul(residual, share, self.down(self.gate_up.gated(rows)))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill, gate and up as halves of one matrix."""
        found = self.gate_up.tensors("gate_proj", "up_proj", rows=(self.size, self.size))
        found |= self.down.tensors("down_proj")
        named = {f"shared_expert.{name}": tensor for name, tensor in found.items()}
        return named | {"shared_expert_gate.weight": self.gate_weight}

    def finish_loading(self) -> None:
        """See SelfAttention."""
        self.gate_up.pack()
        self.down.pack()
