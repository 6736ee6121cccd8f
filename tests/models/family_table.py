"""The dense families, as tiny models of transformers that have all that tells them from others."""

from __future__ import annotations

from typing import Any

WINDOW = 9
SIZES = {"hidden_size": 64, "num_hidden_layers": 2}
LAYERS = {"num_hidden_layers": 4}
KINDS = ["sliding_attention", "full_attention"] * 2
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 3.0, 9.0, 9.0, 9.5, 9.9],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "ministral": ("Ministral", {"sliding_window": WINDOW, "head_dim": 16, "layer_types": KINDS, **LAYERS}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "head_dim": 16,
                               "layer_types": KINDS, **LAYERS}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
                          "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.4, **LAYERS}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
                              "layer_types": KINDS, "rope_parameters": LOCAL_AND_GLOBAL, **LAYERS}),
    "phi3": ("Phi3", {}),
    "phi3-padded": ("Phi3", {"hidden_size": 96, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": ("Phi3", {"rope_parameters": {**LONG, "partial_rotary_factor": 0.75}, "tie_word_embeddings": True,
                           "max_position_embeddings": 512, "original_max_position_embeddings": 16}),
    "granite": ("Granite", {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
                            "logits_scaling": 4.0, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": KINDS, "rope_parameters": LOCAL_AND_GLOBAL, **LAYERS}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, **LAYERS}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "partial_rotary_factor": 0.5}}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": KINDS, **LAYERS,
                           "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 0.5}),
    "mixtral-window": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
}  # fmt: skip
