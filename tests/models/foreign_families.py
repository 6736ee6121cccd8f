"""Families that transformers runs in the place of our decoder, with what makes models of a few parameters of them."""

from __future__ import annotations

from typing import Any

WINDOW = "sliding_attention"
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLm", {}),
    "cohere": ("Cohere", {}),
    "starcoder2": ("Starcoder2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "ernie": ("Ernie4_5", {"head_dim": 16}),
    "apertus": ("Apertus", {}),
    "persimmon": ("Persimmon", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm, heads of 24": ("Glm", {"head_dim": 24}),
    "cohere2, windows": ("Cohere2", {"sliding_window": 6, "layer_types": [WINDOW, "full_attention", WINDOW]}),
    "gemma2, windows and caps": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gpt-oss, sinks": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, **PLAIN_ROPE},
    ),
}
FAMILIES |= {
    "phimoe, window of a mask": (
        "Phimoe",
        {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, **PLAIN_ROPE},
    ),
    "qwen2-moe, windows of masks": (
        "Qwen2Moe",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "hunyuan-moe, a router that looks at its weight": (
        "HunYuanMoEV1",
        {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 24},
    ),
    "gpt2, a token for padding": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 2}),
    "olmo, clipped": ("Olmo", {"clip_qkv": 0.3}),
}
GEMMA_4: dict[str, Any] = {
    **{"head_dim": 8, "global_head_dim": 32, "sliding_window": 6, "num_hidden_layers": 4},
    **{"layer_types": [WINDOW, "full_attention"] * 2, "final_logit_softcapping": 5.0, "pad_token_id": 0},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
}
FAMILIES |= {
    "gemma4, heads of two sizes": ("Gemma4Text", GEMMA_4),
    "gemma4, layers with the keys of others": ("Gemma4Text", {**GEMMA_4, "num_kv_shared_layers": 2}),
    "gemma4, fewer kv heads in some layers, values that are keys": (
        "Gemma4Text",
        {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 24},
    ),
    "gemma4, experts": (
        "Gemma4Text",
        {**GEMMA_4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 24},
    ),
}


DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
FAMILIES |= {
    "glm, dynamic rope": ("Glm", {"head_dim": 16, "rope_parameters": DYNAMIC_ROPE}),
    "gemma3, dynamic rope of some layers": (
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": 6, "layer_types": [WINDOW, "full_attention", WINDOW]}
        | {"rope_parameters": {WINDOW: PLAIN_ROPE["rope_parameters"], "full_attention": {**DYNAMIC_ROPE}}},
    ),
    "hunyuan, a fixed alpha that is called dynamic": (
        "HunYuanDenseV1",
        {"head_dim": 16, "rope_parameters": {**DYNAMIC_ROPE, "factor": 1.0, "alpha": 50.0}},
    ),
}
GRANITE_4 = {"num_local_experts": 0, "shared_intermediate_size": 48, "position_embedding_type": "rope"} | {
    **{"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    **{"layer_types": ["full_attention"] * 3, "mamba_n_heads": 4, "mamba_d_head": 16},
}
FAMILIES |= {
    "granite 4 without state layers": ("GraniteMoeHybrid", GRANITE_4),
    "granite 4 without state layers, experts": (
        "GraniteMoeHybrid",
        {**GRANITE_4, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
