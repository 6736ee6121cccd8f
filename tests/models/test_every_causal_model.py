"""Every causal language model that transformers has runs here and computes the same, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZES, check_chunks_and_tree, token_ids
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.errors import ConfigError
from outrider.models.loader import load_model

MOST_PARAMETERS = 10**7
NUM_LAYERS, WINDOW = 4, 6
OTHER_SIZES: dict[str, Any] = {
    **{"num_key_value_heads": 4, "head_dim": 8, "sliding_window": WINDOW},
    **{"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 256, "n_inner": 48, "rotary_dim": 8},
    **{"d_model": 32, "n_layers": NUM_LAYERS, "n_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
    **{"decoder_layers": NUM_LAYERS, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    },
    **{"num_kv_shared_layers": 0, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
}
LEFT_OUT: list[list[str]] = [
    [],
    ["head_dim"],
    ["layer_types"],
    ["layer_types", "head_dim"],
    ["num_key_value_heads"],
    ["mamba_n_heads", "mamba_d_head"],
]
"""Fields that some families compute from others, and take nothing else for."""


def tiny_configs(kind: str) -> list[PreTrainedConfig]:
    """Configurations of a few parameters, as far as a family has fields of these names. Empty for one of parts."""
    try:
        usual = AutoConfig.for_model(kind)
    except Exception:  # some have no usual sizes
        return []
    family = type(usual)
    if hasattr(usual, "text_config"):
        return []
    known = {**usual.to_dict(), **vars(usual), **getattr(usual, "attribute_map", {})}
    sizes = {**SIZES, **OTHER_SIZES, "num_hidden_layers": NUM_LAYERS}
    fields = {name: value for name, value in sizes.items() if name in known}
    for name in ("sliding_window", "q_lora_rank"):
        if known.get(name, 0) is None:
            del fields[name]
    if layers := known.get("layer_types"):
        kinds = list(dict.fromkeys(layers))
        fields["layer_types"] = [kinds[number % len(kinds)] for number in range(NUM_LAYERS)]
    made = []
    for left_out in LEFT_OUT:
        try:
            made.append(family(**{name: value for name, value in fields.items() if name not in left_out}))
        except Exception:  # each family raises what it likes for sizes that do not fit each other
            continue
    return made


def tiny_model(kind: str) -> Any:
    """A random model of the family in float32; None where transformers makes none of a size for tests."""
    for config in tiny_configs(kind):
        try:
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(config)
            if empty.num_parameters() > MOST_PARAMETERS:
                continue
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
            with torch.inference_mode():
                model(token_ids(4)[None], use_cache=False)
        except Exception:  # as above
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_it_computes_the_same_or_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    reference = tiny_model(kind)
    if reference is None:
        pytest.skip("transformers makes no such model of a few parameters")
    reference.save_pretrained(tmp_path)
    try:
        model = load_model(tmp_path)
    except ConfigError as error:
        assert type(reference).__name__ in str(error)
        return
    check_chunks_and_tree(model, reference)
