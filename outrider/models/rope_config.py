"""How a checkpoint stretches its rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.models.fields import get_float, get_int

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters, whichever of its three homes in config.json they came from.

    `original_max_positions` is the context the model was trained with before it was stretched.
    `attention_factor` scales cos and sin (yarn); None means yarn's own formula.
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

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], max_positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        Raises:
            ConfigError: a kind that is not supported, or a field that is missing or of the wrong type.
        """
        scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"config.json: the rope parameters must be an object, got {scaling!r}")
        merged = {"rope_theta": fields.get("rope_theta"), **scaling}
        kind = merged.get("rope_type", merged.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ConfigError(
                f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
            )
        if get_float({**fields, **merged}, "partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("config.json: partial_rotary_factor is not supported; only 1.0 is")
        original = get_int(merged, "original_max_position_embeddings", 0)
        if kind == "llama3" and not original:
            raise ConfigError("config.json: llama3 rope scaling needs original_max_position_embeddings")
        rope = cls(
            kind=kind,
            theta=get_float(merged, "rope_theta", 10000.0),
            factor=1.0 if kind == "default" else _factor(merged, original, max_positions),
            low_freq_factor=get_float(merged, "low_freq_factor", 1.0),
            high_freq_factor=get_float(merged, "high_freq_factor", 4.0),
            original_max_positions=original or max_positions,
            beta_fast=get_float(merged, "beta_fast", 32.0),
            beta_slow=get_float(merged, "beta_slow", 1.0),
            attention_factor=_optional_float(merged, "attention_factor"),
            mscale=_optional_float(merged, "mscale"),
            mscale_all_dim=_optional_float(merged, "mscale_all_dim"),
            truncate=bool(merged.get("truncate", True)),
        )
        if rope.theta <= 1.0:
            raise ConfigError(f"config.json: rope_theta must be above 1, got {rope.theta}")
        if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise ConfigError("config.json: llama3 rope scaling needs high_freq_factor above low_freq_factor")
        return rope


def _factor(merged: Mapping[str, Any], original: int, max_positions: int) -> float:
    if merged.get("factor") is None and original:
        return max_positions / original
    factor = get_float(merged, "factor")
    if factor < 1.0:
        raise ConfigError(f"config.json: the rope factor must be at least 1, got {factor}")
    return factor


def _optional_float(merged: Mapping[str, Any], name: str) -> float | None:
    return None if merged.get(name) is None else get_float(merged, name)
