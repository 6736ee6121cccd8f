"""What config.json says about mixtures of experts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.models.fields import MAX_LAYERS, get_bool, get_float, get_int

MAX_EXPERTS = 1024
EXPERT_MODULES = {
    "qwen": ("mlp.experts.0.gate_proj", "mlp.experts.0.down_proj"),
    "mixtral": ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w2"),
    "gpt-oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}
"""What comes first and last in an expert, by the form that checkpoints are in."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts that stand in place of the MLP in some layers.

    A token's row goes through the `num_active` of `num_experts` gated MLPs of `size` channels that a router's softmax
    holds likeliest; results count by that softmax, over the chosen ones alone if `normed`. With `shared_size` one more
    gated MLP takes every row, and a sigmoid says how much it counts. `layers` are those that have experts. `form` says
    how checkpoints spell them: `qwen`, `mixtral` or `gpt-oss`. `bias`: router and experts have biases. `alpha`, `limit`
    and `shift`: see kernels.expert_tiles.Gating.
    """

    form: str
    num_experts: int
    num_active: int
    size: int
    shared_size: int
    normed: bool
    layers: frozenset[int]
    bias: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], form: str) -> ExpertsConfig:
        """Read config.json. Raises ConfigError: a field that is missing, of the wrong type, or too large or small."""
        num_layers = get_int(fields, "num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
        # The hub has the first name, transformers 5 writes the second.
        name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
        num_experts = get_int(fields, name, minimum=1)
        num_active = get_int(fields, "num_experts_per_tok", minimum=1)
        if num_active > num_experts or num_experts > MAX_EXPERTS:
            raise ConfigError(
                f"config.json: num_experts_per_tok {num_active} of {name} {num_experts} experts; up to {MAX_EXPERTS} "
                f"experts are supported, and no more than there are can be a token's"
            )
        layers = frozenset(range(num_layers))
        if form != "qwen":
            size = get_int(fields, "intermediate_size", minimum=1)
            plain = cls(form, num_experts, num_active, size, 0, True, layers)
            if form == "mixtral":
                return plain
            alpha, limit = get_float(fields, "swiglu_alpha", 1.702), get_float(fields, "swiglu_limit", 7.0)
            return replace(plain, bias=True, alpha=alpha, limit=limit, shift=1.0)
        step = get_int(fields, "decoder_sparse_step", 1, minimum=1)
        dense = fields.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ConfigError(f"config.json: mlp_only_layers must be a list of layer numbers, got {dense!r}")
        return cls(
            form,
            num_experts,
            num_active,
            size=get_int(fields, "moe_intermediate_size", minimum=1),
            shared_size=get_int(fields, "shared_expert_intermediate_size", 0),
            normed=get_bool(fields, "norm_topk_prob", False),
            layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        )

    def num_weights(self, hidden_size: int) -> int:
        """Elements of one layer's experts, of its router and of what every row goes through."""
        shared = 3 * self.shared_size + 1 if self.shared_size else 0
        biases = self.num_experts * (2 * self.size + hidden_size + 1) if self.bias else 0
        return hidden_size * (self.num_experts * (3 * self.size + 1) + shared) + biases
