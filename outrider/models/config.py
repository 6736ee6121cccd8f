"""The configuration of a model, read from config.json and validated before any weight is read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.models.families import FAMILIES, Family
from outrider.models.fields import (
    MAX_LAYERS,
    get_bool,
    get_eos_token_ids,
    get_float,
    get_int,
    get_strings,
    read_configs,
)
from outrider.models.parts import EXPERT_MODULES, ExpertsConfig, RopeConfig, read_ropes, rotary_dim
from outrider.models.quantization import Quantization, Scheme, read_quantization

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
MAX_HEAD_DIM = 512
"""The largest head that attention kernels of a GPU support."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The outer shape of a decoder-only language model. Sizes are counts of elements; `dtype` names the checkpoint's.

    `num_kv_heads` and `head_dim` are those of the KV cache.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool
    dtype: str

    @property
    def has_plain_attention(self) -> bool:
        """Whether every layer sees all positions, with one rotary embedding, and uses scores as they are."""
        raise NotImplementedError

    def bytes_saved(self, item_bytes: int) -> int:
        """Return the memory on a GPU that quantization saves, compared with weights of `item_bytes`. With four bytes it
        is 0, because weights are dequantized."""
        return 0


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelShape):
    """The configuration of our own decoder.

    Attributes:
        qk_norm: each query and key head is normed.
        windows: how many positions each layer sees, 0 for all; () if all layers see all.
        local_rope: the rotary embedding of layers with a window, if it differs.
        unrotated: layers without rotary positions.
        attention_scale: factor on scores, None for head_dim ** -0.5.
        attention_softcap: see kernels.attention_tiles.ScoreRules; `logit_softcap` caps logits likewise. 0 for none.
        embedding_scale, residual_scale, logit_scale: factors on embeddings, on what attention and MLP add to the
            residual stream, and on logits.
        unpadded_head_dim: head_dim in the checkpoint, if each half of a head is padded with zeros; else 0.
        vocab_cuts: ranks that share the rows of the output matrix; see `outrider.models.cuts`.
    """

    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None
    activation: str = "silu"
    windows: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    unrotated: frozenset[int] = frozenset()
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    unpadded_head_dim: int = 0
    vocab_cuts: int = 1

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json and generation_config.json of a Hugging Face model folder.

        Raises ConfigError, naming the architecture or field at fault, and what is supported.
        """
        return cls.from_fields(*read_configs(Path(folder)))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Make the configuration from parsed JSON, as `from_folder` does from files."""
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        fields = family.completed(text_fields(fields))
        if get_bool(fields, "use_bidirectional_attention", False):
            raise ConfigError(
                f"config.json: use_bidirectional_attention of {architecture} is not supported: tokens would see those "
                "behind them; only causal decoders are run"
            )
        vocab_size = get_int(fields, "vocab_size", minimum=1)
        hidden_size = get_int(fields, "hidden_size", minimum=1)
        num_heads = get_int(fields, "num_attention_heads", minimum=1)
        max_positions = get_int(fields, "max_position_embeddings", minimum=2)
        has_choice = family.attention_bias and not family.qkv_bias
        attention_bias = has_choice and get_bool(fields, "attention_bias", False)
        num_layers = get_int(fields, "num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
        head_dim = get_int(fields, "head_dim", _default_head_dim(fields, family, hidden_size, num_heads), minimum=2)
        rope, local_rope = read_ropes(fields, max_positions)
        max_positions = max(max_positions, rope.stretched_positions)
        config = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=get_int(fields, "intermediate_size", minimum=1),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=get_int(fields, "num_key_value_heads", num_heads, minimum=1),
            head_dim=head_dim,
            max_positions=max_positions,
            rms_norm_eps=get_float(fields, "rms_norm_eps", 1e-6),
            rope=rope,
            eos_token_ids=eos_token_ids(fields, generation, vocab_size),
            tie_embeddings=get_bool(fields, "tie_word_embeddings", False),
            qkv_bias=attention_bias or (family.qkv_bias and get_bool(fields, "qkv_bias", True)),
            output_bias=attention_bias,
            mlp_bias=family.mlp_bias and get_bool(fields, "mlp_bias", False),
            qk_norm=family.qk_norm,
            dtype=stated_dtype(fields),
            experts=ExpertsConfig.from_fields(fields, family.experts) if family.experts else None,
            quantization=read_quantization(fields),
            activation=_activation(fields, family),
            windows=_windows(fields, family, num_layers),
            local_rope=local_rope,
            unrotated=_unrotated(fields, num_layers),
            attention_scale=_attention_scale(fields, head_dim),
            attention_softcap=get_float(fields, "attn_logit_softcapping", 0.0),
            logit_softcap=get_float(fields, "final_logit_softcapping", 0.0),
            embedding_scale=(
                hidden_size**0.5 if family.scaled_embedding else _multiplier(fields, "embedding_multiplier")
            ),
            residual_scale=_multiplier(fields, "residual_multiplier"),
            logit_scale=1.0 / _multiplier(fields, "logits_scaling"),
        )
        config._check()
        return config.limited_to(max_positions)

    def bytes_saved(self, item_bytes: int) -> int:
        """See ModelShape."""
        if self.quantization is None or item_bytes == 4:
            return 0
        saved, hidden, wide = 0, self.hidden_size, self.num_heads * self.head_dim
        attention = (
            ("self_attn.q_proj", wide + 2 * self.num_kv_heads * self.head_dim, hidden),
            ("self_attn.o_proj", hidden, wide),
        )
        inner = self.intermediate_size
        dense = (("mlp.gate_proj", 2 * inner, hidden), ("mlp.down_proj", hidden, inner))
        mixture: tuple[tuple[str, int, int], ...] = ()
        if (experts := self.experts) is not None:
            first, last = EXPERT_MODULES[experts.form]
            count, inner = experts.num_experts, experts.size
            mixture = ((first, count * 2 * inner, hidden), (last, count * hidden, inner))
        for layer in range(self.num_layers):
            mixed = experts is not None and layer in experts.layers
            for module, num_out, size in (*attention, *(mixture if mixed else dense)):
                scheme = self.scheme_of(f"model.layers.{layer}.{module}")
                # Int8 is dequantized.
                if scheme is not None and scheme.kind != "int8":
                    saved += num_out * size * item_bytes - scheme.num_bytes(num_out, size)
        return saved

    @property
    def family(self) -> Family:
        """The properties that the architecture fixes."""
        return FAMILIES[self.architecture]

    def scheme_of(self, *modules: str) -> Scheme | None:
        """Return how matrices that are fused into one are quantized, by their modules' names; None if they are not."""
        return None if self.quantization is None else self.quantization.scheme_of(*modules)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer; None if it has none."""
        if layer in self.unrotated:
            return None
        return self.local_rope if self.local_rope is not None and self.window_of(layer) else self.rope

    def window_of(self, layer: int) -> int:
        """Return how many positions a layer sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def weight_head_dim(self) -> int:
        """Channels of a head in the checkpoint."""
        return self.unpadded_head_dim or self.head_dim

    def with_padded_heads(self) -> ModelConfig:
        """Return the configuration with a head_dim that our kernels support, to which heads are padded with zeros."""
        padded = padded_head_dim(self.head_dim)
        if padded == self.head_dim:
            return self
        if self.qk_norm:
            raise ConfigError(
                f"config.json: head_dim {self.head_dim} with norms of heads does not run on a GPU; choose --device cpu"
            )
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return replace(self, head_dim=padded, unpadded_head_dim=self.head_dim, attention_scale=scale)

    def limited_to(self, context_length: int) -> ModelConfig:
        """Return the configuration for sequences of up to `context_length` tokens."""
        longest = min(self.max_positions, context_length)
        rope = replace(self.rope, is_long=self.rope.is_long and longest > self.rope.original_max_positions)
        windows = self.windows
        if self.local_rope is None and all(window == 0 or window >= longest for window in windows):
            # They hide nothing.
            windows = ()
        return replace(self, max_positions=longest, rope=rope, windows=windows)

    @property
    def has_plain_attention(self) -> bool:
        """See ModelShape."""
        plain = not (any(self.windows) or self.unrotated or self.attention_softcap or self.family.sinks)
        return plain and self.attention_scale is None

    @property
    def is_plain(self) -> bool:
        """Whether layers differ from those of a Llama only in sizes, biases, norms of heads and experts."""
        plain = self.has_plain_attention and self.rope.kind != "longrope" and self.rope.rotated == 1.0
        family, scales = self.family, (self.embedding_scale, self.residual_scale, self.logit_scale)
        plain = plain and not (family.wide_qk_norm or family.fused or family.norm_offset or self.logit_softcap)
        return plain and family.norms == "before" and self.activation == "silu" and set(scales) == {1.0}

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {self.num_heads} must be a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"config.json: head_dim must be even for rotary positions, got {self.head_dim}")
        for rope in (self.rope, self.local_rope or self.rope):
            size = rotary_dim(rope, self.head_dim)
            if size % 2 or not size:
                raise ConfigError(
                    f"config.json: partial_rotary_factor leaves {size} channels; it must leave an even number above 0"
                )
            for factors in (rope.short_factors, rope.long_factors):
                if factors and len(factors) != size // 2:
                    raise ConfigError(
                        f"config.json: longrope has {len(factors)} factors for {size // 2} pairs of a head"
                    )


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text part if the model is a larger one, else all fields. Raises ConfigError."""
    text = fields.get("text_config")
    if text is None:
        return fields
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, got {text!r}")
    outside = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
    found = {name: fields[name] for name in outside if fields.get(name) is not None} | dict(text)
    # If both say whether the head is the embedding, transformers uses the larger model's.
    tied = fields.get("tie_word_embeddings")
    return found if tied is None else found | {"tie_word_embeddings": tied}


def _windows(fields: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """Return how many positions each layer sees, 0 for all; () if all layers see all."""
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise ConfigError(f"config.json: layer_types must be a list of {num_layers} words, got {kinds!r}")
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config.json: layer_types has {kind!r}; supported are 'full_attention' and 'sliding_attention'"
            )
    asked = get_bool(fields, "use_sliding_window", family.windows)
    if not family.windows and (asked or "sliding_attention" in (kinds or ())):
        raise ConfigError("config.json: sliding window attention is not supported for this architecture")
    window = get_int(fields, "sliding_window", 0) if asked else 0
    if not window:
        if "sliding_attention" in (kinds or ()):
            cause = "sliding_window has no size" if asked else "use_sliding_window is false"
            raise ConfigError(
                f"config.json: layer_types has 'sliding_attention' and {cause}; make all layers 'full_attention', or "
                "set use_sliding_window and sliding_window"
            )
        return ()
    if kinds is not None:
        has_window = [kind == "sliding_attention" for kind in kinds]
    elif "no_rope_layer_interval" in fields:
        has_window = [layer in _unrotated(fields, num_layers) for layer in range(num_layers)]
    elif every := get_int(fields, "sliding_window_pattern", family.window_pattern):
        last = get_int(fields, "max_window_layers", num_layers)
        has_window = [(layer + 1) % every != 0 and layer < last for layer in range(num_layers)]
    else:
        first = get_int(fields, "max_window_layers", 0)
        has_window = [layer >= first for layer in range(num_layers)]
    return tuple(window if has else 0 for has in has_window) if any(has_window) else ()


def _unrotated(fields: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers without rotary positions: no_rope_layers has 0 for them, or no_rope_layer_interval is given."""
    rotates = fields.get("no_rope_layers")
    if rotates is not None:
        if not isinstance(rotates, list) or len(rotates) < num_layers:
            raise ConfigError(f"config.json: no_rope_layers must be a list of {num_layers} numbers, got {rotates!r}")
        return frozenset(layer for layer, turns in enumerate(rotates[:num_layers]) if not turns)
    every = get_int(fields, "no_rope_layer_interval", 0)
    return frozenset(layer for layer in range(num_layers) if every and (layer + 1) % every == 0)


def _activation(fields: Mapping[str, Any], family: Family) -> str:
    name = "hidden_activation" if fields.get("hidden_activation") else "hidden_act"
    found = fields.get(name) or "silu"
    found = family.gelu if found == "gelu" else found
    if family.experts in ("qwen", "mixtral") and found in ACTIVATIONS and found != "silu":
        raise ConfigError(f"config.json: {name} {found!r} is not supported for experts; silu is")
    if found not in ACTIVATIONS:
        raise ConfigError(f"config.json: {name} {found!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return str(found)


def _attention_scale(fields: Mapping[str, Any], head_dim: int) -> float | None:
    """Return the factor on scores, None for the usual one. Granite states the factor, Gemma its inverse square."""
    if fields.get("attention_multiplier") is not None:
        return get_float(fields, "attention_multiplier")
    scalar = get_float(fields, "query_pre_attn_scalar", float(head_dim))
    if scalar <= 0.0:
        raise ConfigError(f"config.json: query_pre_attn_scalar must be above 0, got {scalar}")
    return None if scalar == head_dim else scalar**-0.5


def _multiplier(fields: Mapping[str, Any], name: str) -> float:
    value = get_float(fields, name, 1.0)
    if value <= 0.0:
        raise ConfigError(f"config.json: {name} must be above 0, got {value}")
    return value


def _architecture(fields: Mapping[str, Any]) -> str:
    names = get_strings(fields, "architectures")
    if not names:
        raise ConfigError(f"config.json: architectures is missing; supported are {', '.join(FAMILIES)}")
    for name in names:
        if name in FAMILIES:
            return name
    raise ConfigError(f"config.json: architecture {names[0]!r} is not supported; supported are {', '.join(FAMILIES)}")


def _default_head_dim(fields: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int | None:
    if fields.get("head_dim") is not None or family.head_dim is not None:
        return family.head_dim
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: head_dim is missing and hidden_size {hidden_size} is no multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def eos_token_ids(fields: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end an answer from generation_config.json and config.json. Raises ConfigError."""
    ids: list[int] = []
    for source, given in (("generation_config.json", generation), ("config.json", fields)):
        found = get_eos_token_ids(given, source)
        if outside := [token_id for token_id in found if token_id >= vocab_size]:
            raise ConfigError(
                f"{source}: eos_token_id {outside[0]} is outside the vocabulary of {vocab_size} tokens (vocab_size of "
                "config.json); name the token that ends an answer there"
            )
        ids += found
    return tuple(dict.fromkeys(ids))


def stated_dtype(fields: Mapping[str, Any]) -> str:
    """Return the name of the checkpoint's dtype. Raises ConfigError for one that is not supported."""
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(name)


def padded_head_dim(size: int) -> int:
    """Return the size of heads in the KV cache, padded with zeros to a power of two for attention kernels."""
    return max(16, 1 << (size - 1).bit_length())


def check_heads(config: ModelShape) -> None:
    """Raise ConfigError for heads that attention kernels of a GPU do not support."""
    if padded_head_dim(config.head_dim) > MAX_HEAD_DIM:
        raise ConfigError(
            f"config.json: head_dim {config.head_dim} of {config.architecture} does not run on a GPU; up to "
            f"{MAX_HEAD_DIM} do; use --device cpu"
        )
    if isinstance(config, ModelConfig):
        config.with_padded_heads()
