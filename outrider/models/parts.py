"""Parts of a decoder as config.json describes them: rotary positions, and mixtures of experts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.models.fields import MAX_INT, MAX_LAYERS, get_bool, get_float, get_int

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NUMBERS = (
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"
)  # fmt: skip
"""Optional parameters that have the same names in config.json and in RopeConfig."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters, from whichever of their three places in config.json.

    `original_max_positions` is the context the model was trained with before it was stretched.
    `attention_factor` scales cos and sin (yarn, longrope); None means the kind's own formula. `rotated` is the share of
    a head's channels that are rotated, from the first on. longrope divides each pair's frequency by its factor among
    `short_factors`, or among `long_factors` if the served context is longer than the original (`is_long`). The length
    of a sequence itself does not matter, because its KV must not change when a token is added.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotated: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    stretched_positions: int = 0
    """With yarn, what original_max_position_embeddings are stretched to; max_position_embeddings need not say so."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], max_positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before), which overrides both.

        Raises ConfigError for a kind that is not supported, or a field that is missing or of the wrong type.
        """
        parameters = fields.get("rope_parameters") or {}
        scaling = fields.get("rope_scaling") or parameters
        if not isinstance(scaling, Mapping) or not isinstance(parameters, Mapping):
            raise ConfigError(f"config.json: the rope parameters must be an object, got {scaling!r}")
        merged = {"rope_theta": parameters.get("rope_theta", fields.get("rope_theta")), **scaling}
        kind = merged.get("rope_type", merged.get("type", "default"))
        # Phi-3's first files use these names; nothing else that is called yarn has factors.
        kind = "longrope" if kind == "su" or (kind == "yarn" and "short_factor" in merged) else kind
        if kind not in ROPE_KINDS:
            raise ConfigError(
                f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
            )
        if kind == "dynamic":
            # It only stretches positions beyond max_position_embeddings, and none of these are served.
            kind = "default"
        # Only families that have it among their fields read it.
        partial = "partial_rotary_factor"
        rotated = get_float({**fields, **merged}, partial, 1.0) if partial in fields else 1.0
        if not 0.0 < rotated <= 1.0:
            raise ConfigError(f"config.json: partial_rotary_factor must be above 0 and at most 1, got {rotated}")
        if merged.get("llama_4_scaling_beta"):
            raise ConfigError("config.json: llama_4_scaling_beta is not supported; only queries scaled alike are")
        # If both have it, transformers uses the model's.
        original = get_int(merged, "original_max_position_embeddings", 0)
        original = get_int(fields, "original_max_position_embeddings", original)
        if kind == "llama3" and not original:
            raise ConfigError("config.json: llama3 rope scaling needs original_max_position_embeddings")
        numbers: dict[str, Any] = {name: get_float(merged, name) for name in _NUMBERS if merged.get(name) is not None}
        rope = cls(
            kind=kind,
            theta=get_float(merged, "rope_theta", 10000.0),
            factor=1.0 if kind == "default" else _factor(kind, merged, original, max_positions),
            original_max_positions=original or max_positions,
            **numbers,
            truncate=bool(merged.get("truncate", True)),
            rotated=rotated,
            short_factors=_factors(merged, "short_factor") if kind == "longrope" else (),
            long_factors=_factors(merged, "long_factor") if kind == "longrope" else (),
            is_long=kind == "longrope" and max_positions > (original or max_positions),
        )
        if kind == "yarn" and 0 < original <= max_positions:
            stretched = original * rope.factor
            if stretched > MAX_INT:
                raise ConfigError(f"config.json: the rope factor {rope.factor} makes more than {MAX_INT} positions")
            rope = replace(rope, stretched_positions=int(stretched))
        if rope.theta <= 1.0:
            raise ConfigError(f"config.json: rope_theta must be above 1, got {rope.theta}")
        if kind == "yarn" and min(rope.beta_fast, rope.beta_slow) <= 0.0:
            raise ConfigError("config.json: yarn rope scaling needs beta_fast and beta_slow above 0")
        if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise ConfigError("config.json: llama3 rope scaling needs high_freq_factor above low_freq_factor")
        return rope


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """Return how many channels of a head are rotated, from the first on."""
    return int(head_dim * rope.rotated)


def read_ropes(fields: Mapping[str, Any], max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding, and that of layers with a window if it differs."""
    given, local_theta = fields.get("rope_parameters"), fields.get("rope_local_base_freq")
    if isinstance(given, Mapping) and ("full_attention" in given or "sliding_attention" in given):
        if "rope_local_base_freq" not in fields:
            raise ConfigError(
                "config.json: rope_parameters of each layer type are not supported for this architecture, whose layers "
                "have one rotary embedding; give that one's parameters"
            )
        fields = {**fields, "original_max_position_embeddings": None}
        whole = {**fields, "rope_parameters": given.get("full_attention")}
        windowed = {**fields, "rope_parameters": given.get("sliding_attention"), "rope_scaling": None}
        if local_theta is not None:
            windowed["rope_theta"] = local_theta
        rope, local = (RopeConfig.from_fields(of_kind, max_positions) for of_kind in (whole, windowed))
        return rope, None if local == rope else local
    if local_theta is None:
        return RopeConfig.from_fields(fields, max_positions), None
    # In families with two embeddings, a parameter only counts if it is clear which one it belongs to.
    rope = RopeConfig.from_fields({**fields, "rope_parameters": None}, max_positions)
    return rope, RopeConfig(theta=get_float(fields, "rope_local_base_freq"), original_max_positions=max_positions)


def _factors(merged: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = merged.get(name)
    if not isinstance(values, list) or not all(type(value) in (int, float) and value > 0 for value in values):
        raise ConfigError(f"config.json: longrope needs {name}, a list of numbers above 0, got {values!r}")
    return tuple(float(value) for value in values)


def _factor(kind: str, merged: Mapping[str, Any], original: int, max_positions: int) -> float:
    if merged.get("factor") is None and kind == "longrope":
        return max(max_positions / (original or max_positions), 1.0)
    if merged.get("factor") is None and original:
        return max_positions / original
    if merged.get("factor") is None:
        raise ConfigError(f"config.json: rope scaling {kind!r} needs factor, which is missing")
    factor = get_float(merged, "factor")
    if factor < 1.0:
        raise ConfigError(f"config.json: the rope factor must be at least 1, got {factor}")
    return factor


MAX_EXPERTS = 1024
EXPERT_MODULES = {
    "qwen": ("mlp.experts.0.gate_proj", "mlp.experts.0.down_proj"),
    "mixtral": ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w2"),
    "gpt-oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}
"""The first and the last matrix of an expert, by `ExpertsConfig.form`."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts that replace the MLP in some layers.

    A router's softmax chooses `num_active` of `num_experts` gated MLPs of `size` channels for each token's row and
    weights their results; if `normed`, that softmax is over the chosen experts only. With `shared_size`, one more gated
    MLP takes every row, weighted by a sigmoid. `layers` are those that have experts. `form` says how checkpoints name
    them: `qwen`, `mixtral` or `gpt-oss`. `bias`: router and experts have biases. `alpha`, `limit` and `shift`: see
    kernels.expert_tiles.Gating.
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
        """Read config.json. Raises ConfigError for a field that is missing, of the wrong type, or out of range."""
        num_layers = get_int(fields, "num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
        # Files on the hub have the first name, transformers 5 writes the second.
        name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
        num_experts = get_int(fields, name, minimum=1)
        num_active = get_int(fields, "num_experts_per_tok", minimum=1)
        if num_active > num_experts or num_experts > MAX_EXPERTS:
            raise ConfigError(
                f"config.json: num_experts_per_tok {num_active} of {name} {num_experts} is not supported; {name} may "
                f"be at most {MAX_EXPERTS}, and num_experts_per_tok at most {name}"
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
        """Return the elements of one layer's experts, of its router and of the shared expert."""
        shared = 3 * self.shared_size + 1 if self.shared_size else 0
        biases = self.num_experts * (2 * self.size + hidden_size + 1) if self.bias else 0
        return hidden_size * (self.num_experts * (3 * self.size + 1) + shared) + biases
