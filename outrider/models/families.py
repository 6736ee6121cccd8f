"""The architectures that our decoder runs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes and config.json leaves unsaid.

    `qkv_bias`: q, k and v have biases and the output has none; otherwise attention_bias decides for all four.
    `mlp_bias`: config.json may ask for biases in the MLP. `head_dim`: where config.json names none; None is
    hidden_size / num_heads. `unread_prefix`: tensors of the checkpoint that are not the decoder's. `experts`: how its
    mixtures of experts are written (see ExpertsConfig).

    `wide_qk_norm`, `norms`, `norm_offset`, `fused`, `sinks`: see ModelConfig. `windows`: config.json may ask for
    sliding windows. `scaled_embedding`: embeddings are multiplied by the root of hidden_size. `is_part`: the decoder is
    the text part of a larger model, which text_config describes; other tensors are not read. `gelu`: what its
    config.json means by that name. `defaults`: fields that its config.json may leave out.
    """

    qkv_bias: bool = False
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
    defaults: Mapping[str, Any] = field(default_factory=dict)


_MISTRAL = Family(windows=True, defaults={"sliding_window": 4096})
_QWEN2 = Family(qkv_bias=True, windows=True, defaults={"use_sliding_window": False, "max_window_layers": 28})
_QWEN3 = replace(_QWEN2, qkv_bias=False, qk_norm=True, head_dim=128)
_OLMO_2 = Family(wide_qk_norm=True, norms="after", defaults={"rms_norm_eps": 1e-5})
_OLMO_3_FIELDS = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
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
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_2 = replace(_GEMMA, norms="both", windows=True, defaults=_GEMMA_2_FIELDS)
_GEMMA_3_FIELDS = {
    **_GEMMA_2_FIELDS,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_GEMMA_3 = replace(_GEMMA_2, qk_norm=True, defaults=_GEMMA_3_FIELDS)

FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, is_part=True),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    # MiMo's checkpoints carry their drafter, a head that predicts one token more.
    "MiMoForCausalLM": replace(_QWEN2, unread_prefix="model.mtp_layers."),
    # The first files name the exact one, and were trained with this one.
    "GemmaForCausalLM": replace(_GEMMA, gelu="gelu_pytorch_tanh"),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3, is_part=True),
    "Phi3ForCausalLM": Family(fused=True, windows=True, defaults={"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": Family(mlp_bias=True, defaults={"attention_multiplier": 1.0}),
    "Olmo2ForCausalLM": _OLMO_2,
    "Olmo3ForCausalLM": replace(_OLMO_2, windows=True, defaults=_OLMO_3_FIELDS),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        windows=True,
        defaults={"tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layer_interval": 4},
    ),
    "Qwen2MoeForCausalLM": replace(_QWEN2, experts="qwen"),
    "Qwen3MoeForCausalLM": replace(_QWEN3, experts="qwen"),
    "MixtralForCausalLM": Family(experts="mixtral", windows=True),
    "GptOssForCausalLM": Family(
        experts="gpt-oss",
        windows=True,
        sinks=True,
        defaults={"attention_bias": True, "sliding_window": 128, "head_dim": 64, "rms_norm_eps": 1e-5},
    ),
}
