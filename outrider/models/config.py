"""What a checkpoint says about its model, validated before any weight is read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.models.fields import get_bool, get_float, get_int, get_token_ids, read_json
from outrider.models.registry import ARCHITECTURES
from outrider.models.rope_config import RopeConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder. Sizes are counts of elements; `dtype` is the checkpoint's own, as a word."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json and generation_config.json of a Hugging Face model folder.

        Raises:
            ConfigError: names the architecture or field that is at fault, and what is supported.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: not a folder; give a Hugging Face model folder")
        fields = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        return cls.from_fields(fields, generation)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """The same from parsed JSON."""
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        hidden_size = get_int(fields, "hidden_size", minimum=1)
        num_heads = get_int(fields, "num_attention_heads", minimum=1)
        max_positions = get_int(fields, "max_position_embeddings", minimum=1)
        qkv_bias, output_bias = _attention_biases(architecture, fields)
        config = cls(
            architecture=architecture,
            vocab_size=get_int(fields, "vocab_size", minimum=1),
            hidden_size=hidden_size,
            intermediate_size=get_int(fields, "intermediate_size", minimum=1),
            num_layers=get_int(fields, "num_hidden_layers", minimum=1),
            num_heads=num_heads,
            num_kv_heads=get_int(fields, "num_key_value_heads", num_heads, minimum=1),
            head_dim=get_int(fields, "head_dim", _default_head_dim(architecture, hidden_size, num_heads), minimum=2),
            max_positions=max_positions,
            rms_norm_eps=get_float(fields, "rms_norm_eps", 1e-6),
            rope=RopeConfig.from_fields(fields, max_positions),
            eos_token_ids=_eos_token_ids(fields, generation),
            bos_token_id=next(iter(get_token_ids(fields, "bos_token_id", "config.json")), None),
            tie_embeddings=get_bool(fields, "tie_word_embeddings", False),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and get_bool(fields, "mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=_dtype(fields),
        )
        config._check()
        return config

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {self.num_heads} must be a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"config.json: head_dim must be even for rotary positions, got {self.head_dim}")
        outside = [token_id for token_id in self.eos_token_ids if token_id >= self.vocab_size]
        if outside:
            raise ConfigError(f"config.json: eos_token_id {outside[0]} is outside the vocabulary of {self.vocab_size}")


def _architecture(fields: Mapping[str, Any]) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"config.json: architectures is missing; supported are {', '.join(ARCHITECTURES)}")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"config.json: architecture {names[0]!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("quantization_config"):
        raise ConfigError("config.json: quantization_config is not supported; give an unquantized checkpoint")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported; only 'silu' is")
    layer_types = fields.get("layer_types") or []
    other = [kind for kind in layer_types if kind != "full_attention"]
    if get_bool(fields, "use_sliding_window", False) or other:
        raise ConfigError("config.json: sliding window attention is not supported; only full attention is")


def _default_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    if architecture == "Qwen3ForCausalLM":
        return 128
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: head_dim is missing and hidden_size {hidden_size} is no multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _attention_biases(architecture: str, fields: Mapping[str, Any]) -> tuple[bool, bool]:
    if architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM"):
        return True, False
    bias = get_bool(fields, "attention_bias", False)
    return bias, bias


def _eos_token_ids(fields: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids = get_token_ids(generation, "eos_token_id", "generation_config.json")
    ids = ids + get_token_ids(fields, "eos_token_id", "config.json")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Mapping[str, Any]) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(name)
