"""The architectures that our decoder runs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes and config.json does not say.

    `qkv_bias`: q, k and v have biases and the output has none. Otherwise the field attention_bias decides for all four;
    if `attention_bias` is False, none has a bias, whatever config.json says. `mlp_bias`: config.json may ask for biases
    in the MLP. `head_dim`: the default if config.json has none; None is hidden_size / num_heads. `unread_prefix`: the
    prefix of tensors in the checkpoint that are not the decoder's. `experts`: the form of its mixtures of experts (see
    ExpertsConfig).

    `qk_norm`: each query and key head is normed; `wide_qk_norm`: all query heads are normed together, and all key
    heads. `norms`: attention and MLP have norms `before` them, `after` them, or `both`. `norm_offset`: what is added to
    the weight of every norm. `fused`: q, k and v are one matrix in the checkpoint, and gate and up another. `windows`:
    config.json may ask for sliding windows. `sinks`: every head has a score that takes part in its softmax and has no
    value. `scaled_embedding`: embeddings are multiplied by the root of hidden_size. `is_part`: the decoder is the text
    part of a larger model, which text_config describes; other tensors are not read. `gelu`: what "gelu" means in its
    config.json. `window_pattern`: one layer in this many has no window, the others do; 0 if no such pattern is used.
    `defaults`: fields that its config.json may leave out.
    """

    qkv_bias: bool = False
    attention_bias: bool = True
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    unread_prefix: str | None = None
    experts: str | None = None
    wide_qk_norm: bool = False
    norms: str = "before"
    norm_offset: float = 0.0
    fused: bool = False
    windows: bool = False
    sinks: bool = False
    scaled_embedding: bool = False
    is_part: bool = False
    gelu: str = "gelu"
    window_pattern: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def completed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json's fields without those that only other families read, and with the family's defaults."""
        others = _OF_FAMILIES | (_OF_WINDOWS if self.windows else frozenset())
        given = {name: value for name, value in fields.items() if name in self.defaults or name not in others}
        if given.get("rope_parameters") is None:
            given.pop("rope_parameters", None)
        return {**self.defaults, **given}


_OF_FAMILIES = frozenset(
    [
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "qkv_bias",
        "rope_local_base_freq",
        "no_rope_layers",
        "no_rope_layer_interval",
        "sliding_window_pattern",
        "max_window_layers",
        "partial_rotary_factor",
    ]
)
"""Fields that only count for families that have them among their defaults."""
_OF_WINDOWS = frozenset(("use_sliding_window", "layer_types"))
"""Likewise, among families that have windows. The others keep these fields, and refuse what they ask for."""

_MISTRAL = Family(attention_bias=False, windows=True, defaults={"sliding_window": 4096, "layer_types": None})
_QWEN2_FIELDS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_QWEN2 = Family(qkv_bias=True, windows=True, defaults=_QWEN2_FIELDS)
_QWEN3 = replace(_QWEN2, qkv_bias=False, qk_norm=True, head_dim=128)
_OLMO_2 = Family(wide_qk_norm=True, norms="after", defaults={"rms_norm_eps": 1e-5})
_OLMO_3_FIELDS = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "layer_types": None,
    "rope_theta": 500_000.0,
    "rope_local_base_freq": 500_000.0,
}
_GEMMA = Family(
    head_dim=256,
    norm_offset=1.0,
    scaled_embedding=True,
    defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
)
_GEMMA_2_FIELDS = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_2 = replace(_GEMMA, norms="both", windows=True, window_pattern=2, defaults=_GEMMA_2_FIELDS)
# Its attention has no cap, whatever its config.json says.
_GEMMA_3_FIELDS = {
    **{name: value for name, value in _GEMMA_2_FIELDS.items() if name != "attn_logit_softcapping"},
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_GEMMA_3 = replace(_GEMMA_2, qk_norm=True, defaults=_GEMMA_3_FIELDS)

_GRANITE_FIELDS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_SMOLLM_3_FIELDS = {
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    "use_sliding_window": False,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_QWEN_2_MOE_FIELDS = {**_QWEN2_FIELDS, "qkv_bias": True}
_QWEN_3_MOE_FIELDS = {"use_sliding_window": False, "sliding_window": 4096}
_MIXTRAL_FIELDS = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_GPT_OSS_FIELDS = {
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, is_part=True),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    # MiMo's checkpoints carry their drafter, a head that predicts one token more.
    "MiMoForCausalLM": replace(_QWEN2, unread_prefix="model.mtp_layers."),
    # The first files name the exact gelu, but were trained with this one.
    "GemmaForCausalLM": replace(_GEMMA, gelu="gelu_pytorch_tanh"),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3, is_part=True),
    "Phi3ForCausalLM": Family(
        attention_bias=False,
        fused=True,
        windows=True,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    ),
    "GraniteForCausalLM": Family(mlp_bias=True, defaults=_GRANITE_FIELDS),
    "Olmo2ForCausalLM": _OLMO_2,
    "Olmo3ForCausalLM": replace(_OLMO_2, windows=True, window_pattern=4, defaults=_OLMO_3_FIELDS),
    "SmolLM3ForCausalLM": Family(mlp_bias=True, windows=True, defaults=_SMOLLM_3_FIELDS),
    "Qwen2MoeForCausalLM": replace(_QWEN2, experts="qwen", window_pattern=2, defaults=_QWEN_2_MOE_FIELDS),
    "Qwen3MoeForCausalLM": replace(_QWEN3, experts="qwen", head_dim=None, defaults=_QWEN_3_MOE_FIELDS),
    "MixtralForCausalLM": Family(attention_bias=False, experts="mixtral", windows=True, defaults=_MIXTRAL_FIELDS),
    "GptOssForCausalLM": Family(
        experts="gpt-oss", windows=True, window_pattern=2, sinks=True, defaults=_GPT_OSS_FIELDS
    ),
}
