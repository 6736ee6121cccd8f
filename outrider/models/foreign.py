"""Models that transformers runs instead of our decoder, as config.json describes them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig, ModelShape, eos_token_ids, padded_head_dim, stated_dtype, text_fields
from outrider.models.families import FAMILIES
from outrider.models.fields import MAX_LAYERS, get_bool, get_int, get_strings, read_configs

TEXT_PARTS = frozenset(
    ["Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"]
)
"""Models of images or sound whose language model transformers loads by itself, with the same logits for text.

For others it has no such model, or one with other names, or one that scales logits differently.
"""


def choose_impl(fields: Mapping[str, Any], wanted: str = "auto") -> str:
    """Return "outrider" (our decoder) or "transformers", whichever runs the model of a config.json.

    `wanted`: see --model-impl. Raises ConfigError if neither runs the architecture, or transformers is not installed.
    """
    names = get_strings(fields, "architectures")
    if wanted == "outrider" or not names:
        return "outrider"
    if wanted == "auto" and any(name in FAMILIES for name in names):
        return "outrider"
    name = names[0]
    _refuse_kind(name, fields)
    if find_spec("transformers") is None:
        raise ConfigError(
            f"config.json: architecture {name!r} runs through transformers, which is not installed; "
            f"\"pip install 'outrider[transformers]'\", or take one of {', '.join(FAMILIES)}"
        )
    return "transformers"


def _refuse_kind(name: str, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the model is a decoder that attends in every layer, as far as config.json shows."""
    kind, is_part = "", name in TEXT_PARTS
    text = text_fields(fields)
    layers = {str(layer) for layer in text.get("layer_types") or []}
    if fields.get("is_encoder_decoder") is True:
        kind = "an encoder-decoder model"
    elif not is_part and any(part in fields for part in ("vision_config", "audio_config", "text_config")):
        kind = "a model of images or sound beside text"
    elif name.lower().startswith(("mamba", "falconmamba", "rwkv", "xlstm")):
        kind = "a state-space or recurrent model"
    elif "chunked_attention" in layers or text.get("attention_chunk_size"):
        kind = "a model with layers that attend in chunks"
    elif layers - {"full_attention", "sliding_attention", "attention"}:
        kind = "a model with layers that do not attend"
    elif not is_part and not name.endswith(("ForCausalLM", "LMHeadModel")):
        kind = "another kind of model than a causal language model"
    if kind:
        raise ConfigError(f"config.json: {name} is {kind}, which is not supported; only causal decoders are")


def foreign_shape(fields: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model for transformers, as far as config.json shows it; fields have several names there.

    Raises ConfigError for an illegal field, and for a missing one, where the family's own default would hold.
    """
    other = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    name, fields = str(fields["architectures"][0]), text_fields(fields)
    fields = {**{name: fields.get(alias) for name, alias in other.items() if name not in fields}, **fields}
    num_heads = get_int(fields, "num_attention_heads", minimum=1)
    hidden_size = get_int(fields, "hidden_size", minimum=1)
    vocab_size = get_int(fields, "vocab_size", minimum=1)
    head_dim = get_int(fields, "head_dim", hidden_size // num_heads, minimum=1)
    if "qk_nope_head_dim" in fields:  # latent attention, which transformers expands to full heads
        parts = (get_int(fields, name, 0) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        head_dim = max(sum(parts), get_int(fields, "v_head_dim", 1, minimum=1))
    # Some models have other heads in layers that see everything; the KV cache has the largest of them for all layers.
    # transformers writes what differs by layer under the layer's number.
    layers = fields.get("per_layer_config")
    others = [layer for layer in layers.values() if isinstance(layer, Mapping)] if isinstance(layers, Mapping) else []
    head_dims = [get_int(layer, "head_dim", 1, minimum=1) for layer in others]
    head_dims += [head_dim, get_int(fields, "global_head_dim", 1, minimum=1)]
    num_kv_heads = get_int(fields, "num_key_value_heads", num_heads, minimum=1)
    return ModelShape(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get_int(fields, "num_hidden_layers", minimum=1, maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=max(num_kv_heads, get_int(fields, "num_global_key_value_heads", 1, minimum=1)),
        head_dim=padded_head_dim(max(head_dims)),
        max_positions=get_int(fields, "max_position_embeddings", minimum=2),
        eos_token_ids=eos_token_ids(fields, generation, vocab_size),
        tie_embeddings=get_bool(fields, "tie_word_embeddings", False),
        dtype=stated_dtype(fields),
    )


def check_config(folder: Path, wanted: str = "auto") -> tuple[ModelConfig | None, int]:
    """Raise ConfigError for a model that cannot run, as far as its config.json shows without torch.

    Otherwise return the config of our decoder, None if transformers runs the model, and the model's number of
    positions, 0 if config.json does not say.
    """
    fields, generation = read_configs(folder)
    if choose_impl(fields, wanted) != "outrider":
        return None, get_int(text_fields(fields), "max_position_embeddings", 0)
    config = ModelConfig.from_fields(fields, generation)
    return config, config.max_positions
