"""Shapes of decoders, and the place of a small one inside a large one. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig, text_fields


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, as counts of elements. The vocabulary is not among them, since the source's is kept.

    With `experts`, each MLP consists of that many experts of `intermediate` channels; a token wakes `active` of them.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    active: int = 0

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items() if value)

    @property
    def dense(self) -> Shape:
        """The shape with one MLP, as wide as a token's active experts together, in place of experts: a head's shape."""
        width = self.active * self.intermediate if self.experts else self.intermediate
        return replace(self, intermediate=width, experts=0, active=0)

    def config_fields(self) -> dict[str, Any]:
        """Return the sizes as fields of config.json; with experts, those of a Mixtral."""
        experts: dict[str, Any] = {}
        if self.experts:
            experts = {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": self.experts,
                "num_experts_per_tok": self.active,
                "sliding_window": None,
            }
        return experts | {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


# Shapes of Llama 3.1 and 3.2, Qwen2.5, Llama 3.1 70B, and Qwen3 without the norms of its heads.
SHAPES = {
    "llama-1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192),
    "llama-3b": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, intermediate=8192),
    "llama-8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336),
    "qwen-32b": Shape(hidden=5120, layers=64, heads=40, kv_heads=8, head_dim=128, intermediate=27648),
    "llama-70b": Shape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, intermediate=28672),
    "qwen3-30b-a3b": Shape(
        2048, layers=48, heads=32, kv_heads=4, head_dim=128, intermediate=768, experts=128, active=8
    ),
}


ROUTE_CHANNELS = 32
"""Channels of the residual stream by which an inflated model's routers tell tokens apart."""


def parse_shape(text: str) -> Shape:
    """Parse a name, sizes, or both: `llama-8b`, `llama-1b,layers=30`, `hidden=640,layers=4,...`.

    Raises ConfigError for an unknown name or size, a size that is not a positive integer, or missing sizes.
    """
    base, *rest = text.split(",")
    if base in SHAPES:
        return _checked(replace(SHAPES[base], **_sizes(text, rest)))
    if "=" not in base:
        raise ConfigError(f"--shape {base}: no such shape; choose one of {', '.join(SHAPES)}, or give {_form()}")
    sizes = _sizes(text, [base, *rest])
    missing = [field.name for field in fields(Shape) if field.default is MISSING and field.name not in sizes]
    if missing:
        raise ConfigError(f"--shape {text}: {', '.join(missing)} missing; give {_form()}")
    return _checked(Shape(**sizes))


def _sizes(text: str, words: Iterable[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in _names():
            raise ConfigError(f"--shape {text}: {name!r} is no size; the sizes are {', '.join(_names())}")
        if not (number.isascii() and number.isdecimal() and 0 < int(number) < 1 << 20):
            raise ConfigError(f"--shape {text}: {name} must be a positive integer below {1 << 20}, got {number!r}")
        sizes[name] = int(number)
    return sizes


def _checked(shape: Shape) -> Shape:
    if shape.heads % shape.kv_heads:
        raise ConfigError(f"--shape: heads {shape.heads} must be a multiple of kv_heads {shape.kv_heads}")
    if not shape.active <= shape.experts or bool(shape.active) != bool(shape.experts):
        raise ConfigError(f"--shape: active must be 1 to experts {shape.experts}, got {shape.active}")
    if shape.head_dim % 2:
        raise ConfigError(f"--shape: head_dim must be even for rotary positions, got {shape.head_dim}")
    return shape


def _names() -> list[str]:
    return [field.name for field in fields(Shape)]


def _form() -> str:
    needed = ",".join(f"{field.name}=N" for field in fields(Shape) if field.default is MISSING)
    return f"{needed}[,experts=N,active=N]"


def decoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's config.json as if its decoder, maybe the text part of a larger model, stood alone."""
    text = text_fields(fields)
    if text is fields:
        return dict(fields)
    # Of the containers that we read, only Mistral's holds a plain decoder, which has a class of its own.
    return {**text, "architectures": ["MistralForCausalLM"]}


def shape_of(config: ModelConfig) -> Shape:
    """Return the shape of a checkpoint."""
    experts = config.experts
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size if experts is None else experts.size,
        experts=0 if experts is None else experts.num_experts,
        active=0 if experts is None else experts.num_active,
    )


@dataclass(frozen=True)
class ShapeMap:
    """Maps a source decoder's channels, heads and layers to their places in a target shape.

    Residual and MLP channels keep their numbers: they are the first `source.hidden` and `source.intermediate` of the
    target's. If the target has experts, each one holds one of `mlp_parts` parts of the MLP's channels.
    """

    source: Shape
    target: Shape

    @classmethod
    def of(cls, config: ModelConfig, target: Shape) -> ShapeMap:
        """Return the map for the decoder that `config` describes.

        Raises ConfigError, with the reason, if the target cannot hold the source exactly.
        """
        shape_map = cls(shape_of(config), target)
        problem = shape_map._problem()
        if target.experts and (config.qkv_bias or config.output_bias or config.mlp_bias):
            problem = "the source has biases, and a Mixtral has none"
        if config.experts is not None:
            problem = "the source has experts; only dense models can be inflated"
        if config.qk_norm:
            problem = "the source norms its heads (Qwen3), which does not survive a change of their number of channels"
        if config.rope.kind == "yarn" and shape_map.rotary_stride > 1:
            problem = "the source has yarn rotary positions, which depend on head_dim"
        if problem:
            raise ConfigError(f"cannot inflate {shape_map.source} into {target}: {problem}")
        return shape_map

    @cached_property
    def rotary_stride(self) -> int:
        """Pair i of a source head becomes pair i * rotary_stride of a target head, which rotates at the same speed."""
        return self.target.head_dim // self.source.head_dim

    @cached_property
    def layers(self) -> list[int]:
        """Target layer of each source layer. They are spread evenly, so that relative depths stay the same."""
        return [layer * self.target.layers // self.source.layers for layer in range(self.source.layers)]

    @cached_property
    def dims(self) -> list[int]:
        """Target channel of each channel of a source head."""
        pairs = [pair * self.rotary_stride for pair in range(self.source.head_dim // 2)]
        return pairs + [self.target.head_dim // 2 + pair for pair in pairs]

    @cached_property
    def kv_heads(self) -> list[int]:
        """Source KV head in each target KV head, -1 for none.

        A source group with more query heads than a target group takes several target KV heads, which are then equal.
        """
        held = [head for head in range(self.source.kv_heads) for _ in range(self._copies)]
        return held + [-1] * (self.target.kv_heads - len(held))

    @cached_property
    def heads(self) -> list[int]:
        """Target query head of each source query head. Each one stays with its KV head."""
        own, group = self._groups
        places = []
        for head in range(self.source.heads):
            kv_head, member = divmod(head, own)
            copy, place = divmod(member, group)
            places.append((kv_head * self._copies + copy) * group + place)
        return places

    def head_channels(self, heads: list[int]) -> list[int]:
        """Return the target channels, in a matrix of whole heads, of source heads placed at the target's `heads`."""
        return [head * self.target.head_dim + dim for head in heads for dim in self.dims]

    @property
    def mlp_parts(self) -> int:
        """Number of experts that hold the source's MLP together."""
        return -(-self.source.intermediate // self.target.intermediate)

    @property
    def _groups(self) -> tuple[int, int]:
        """Query heads for each KV head, in the source and in the target."""
        return self.source.heads // self.source.kv_heads, self.target.heads // self.target.kv_heads

    @property
    def _copies(self) -> int:
        own, group = self._groups
        return -(-own // group)

    def _problem(self) -> str:
        source, target = self.source, self.target
        if target.head_dim % source.head_dim:
            return "head_dim must be a multiple of the source's, for rotary pairs to find one of their speed"
        if target.experts and target.hidden < source.hidden + ROUTE_CHANNELS + 1:
            return f"hidden must be at least {source.hidden + ROUTE_CHANNELS + 1}, for channels that tell tokens apart"
        if target.experts and (target.active % self.mlp_parts or target.experts % self.mlp_parts):
            return f"experts and active must be multiples of {self.mlp_parts}, the experts that hold the source's MLP"
        for name in ("hidden", "layers") if target.experts else ("hidden", "layers", "intermediate"):
            if getattr(target, name) < getattr(source, name):
                return f"{name} is below the source's {getattr(source, name)}; raise it (--shape NAME,{name}=N)"
        needed = source.kv_heads * self._copies
        if target.kv_heads < needed:
            return f"kv_heads must be at least {needed} to hold the source's groups of query heads"
        return ""
