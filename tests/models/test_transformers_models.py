"""Families of transformers compute the same on our attention and KV; what cannot run is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import FAMILIES, GEMMA_4, GRANITE_4, WINDOW
from safetensors.torch import load_file, save_file
from tiny_models import check_chunks_and_tree, relative_error, run_one, save_tiny, token_ids

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models import foreign
from outrider.models.config import ModelShape
from outrider.models.cuts import check_target
from outrider.models.decoder import CausalLM
from outrider.models.elements import target_elements
from outrider.models.fields import read_configs
from outrider.models.foreign import check_config, foreign_shape
from outrider.models.loader import describe_model, load_model
from outrider.models.transformers_model import TransformersLM
from outrider.models.transformers_survey import survey_model
from verify_service.engine.build import attention_backend


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_chunks_and_trees_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    reference = save_tiny(tmp_path, family, **changes)
    model = load_model(tmp_path, impl="transformers")
    assert isinstance(model, TransformersLM)
    check_chunks_and_tree(model, reference)


@pytest.mark.parametrize("family", ["Cohere", "OPT", "GPTNeoX"])
def test_features_are_the_residual_stream_entering_each_layer(family: str, tmp_path: Path) -> None:
    changes = {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "OPT" else {}
    reference = save_tiny(tmp_path, family, **changes)
    model = load_model(tmp_path)
    ids = token_ids(10)
    batch = ForwardBatch(ids, torch.arange(10), [Segment(10, torch.arange(10))])
    hidden, features = model.forward_with_features(batch, model.new_kv(10), TorchAttention(), (2, 0, 1, 3, 4))
    with torch.inference_mode():
        expected = reference(ids[None], output_hidden_states=True).hidden_states
    for layer, feature in zip((2, 0, 1), features, strict=False):
        assert relative_error(feature, expected[layer][0]) <= 1e-4
    assert relative_error(features[4], expected[3][0]) <= 1e-4
    assert torch.equal(features[4], hidden) and not torch.equal(features[3], hidden)


ROPES: list[dict[str, Any]] = [
    {"head_dim": 16},
    {"tie_word_embeddings": True, "head_dim": 24},
    {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
]


@pytest.mark.parametrize("changes", ROPES)
def test_llama_through_transformers_equals_ours(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, **changes)
    ours, theirs = load_model(tmp_path), load_model(tmp_path, impl="transformers")
    assert isinstance(ours, CausalLM) and isinstance(theirs, TransformersLM)
    ids, slots = token_ids(12), torch.arange(12)
    found = [run_one(model, model.new_kv(12), ids, slots) for model in (ours, theirs)]
    assert relative_error(found[1], found[0]) < 1e-5
    check_chunks_and_tree(theirs, reference)


@pytest.mark.parametrize(("word", "is_refused"), [("attention", False), ("mamba", True)])
def test_the_hubs_words_for_the_layers_of_granite_4(word: str, is_refused: bool, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "GraniteMoeHybrid", **GRANITE_4)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"layer_types": ["attention", word, "attention"]}))
    if is_refused:
        assert "GraniteMoeHybridForCausalLM is a model with layers that do not attend" in refusal(tmp_path)
    else:
        check_config(tmp_path)
        check_chunks_and_tree(load_model(tmp_path), reference)


def save_whole(folder: Path, kind: str) -> Any:
    """Save a random model of images and text of the kind `kind`; returns transformers' own."""
    import transformers

    torch.manual_seed(7)
    pictures = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SIZES, **GEMMA_4, "num_kv_shared_layers": 2}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=pictures, audio_config=None)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
def test_of_a_model_of_images_the_text_part_is_loaded(kind: str, tmp_path: Path) -> None:
    reference = save_whole(tmp_path, kind)
    check_config(tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model, TransformersLM)
    check_chunks_and_tree(model, reference)
    with pytest.raises(ConfigError, match="--context-length: 65 is over the 64 positions"):
        check_target(tmp_path, VerifyOptions(context_length=65))
    read_shape = foreign_shape(*read_configs(tmp_path))
    assert read_shape == ModelShape(**{name: getattr(model.config, name) for name in ModelShape.__slots__})
    elements = target_elements(read_shape, tmp_path)
    num_scalars, rows = 4, 97 * 4 * 8 if kind == "Gemma4" else 0
    assert elements.total == model.config.num_parameters + num_scalars
    assert elements.read == elements.total - rows, "of embeddings a row is read"


def test_the_text_of_gemma_3n_is_found_within_the_whole_model(tmp_path: Path) -> None:
    """transformers makes the whole one with another library alone, timm; so the part is put where it lies there."""
    text = {"head_dim": 16, "sliding_window": 6, "layer_types": [WINDOW, "full_attention", WINDOW], "laurel_rank": 8}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0}
    text |= {"activation_sparsity_pattern": [0.0] * 3, "pad_token_id": 0, "intermediate_size": [48] * 3}
    reference = save_tiny(tmp_path, "Gemma3nText", **text)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(whole | {"model.vision_tower.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    fields = {"text_config": read_configs(tmp_path)[0], "vision_config": {}, "model_type": "gemma3n"}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": ["Gemma3nForConditionalGeneration"]}))
    model = load_model(tmp_path)
    check_chunks_and_tree(model, reference)
    ids = token_ids(5)
    batch = ForwardBatch(ids, torch.arange(5), [Segment(5, torch.arange(5))])
    _, (feature,) = model.forward_with_features(batch, model.new_kv(5), TorchAttention(), (1,))
    with torch.inference_mode():
        streams = reference.model(ids[None], output_hidden_states=True).hidden_states[1]
    assert relative_error(feature, streams[0, 0]) < 1e-4, "of several residual streams the active one is the feature"


def refusal(folder: Path, impl: str = "auto") -> str:
    """What `describe_model` returns, before any weight is read."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError) as caught:
        describe_model(folder, impl)
    assert "\n" not in caught.value.message
    return caught.value.message


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        "T5ForConditionalGeneration is an encoder-decoder model",
    ),
    "vision": (
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}},
        "LlavaForConditionalGeneration is a model of images or sound beside text",
    ),
    "state space": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "MambaForCausalLM is a state-space or recurrent model",
    ),
    "linear attention": (
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "layer_types": ["linear_attention", "full_attention"],
        },
        "Qwen3NextForCausalLM is a model with layers that do not attend",
    ),
    "chunks": (
        {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 16},
        "Llama4ForCausalLM is a model with layers that attend in chunks",
    ),
    "chunks in some layers": (
        {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "Llama4ForCausalLM is a model with layers that attend in chunks",
    ),
    "hybrid": (
        {"architectures": ["JambaForCausalLM"], "model_type": "jamba", "use_mamba_kernels": False},
        "JambaForCausalLM is not supported: it has convolutions over tokens",
    ),
    "state space beside attention": (
        {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 4096},
        "FalconH1ForCausalLM is not supported: it has convolutions over tokens",
    ),
    "alibi": ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "of its 3 layers 0 attend through"),
    "own attention": (
        {"architectures": ["FalconForCausalLM"], "model_type": "falcon"},
        "FalconForCausalLM is not supported: transformers makes it with attention of its own alone",
    ),
    "classifier": (
        {"architectures": ["GlmForSequenceClassification"], "model_type": "glm"},
        "GlmForSequenceClassification is another kind of model than a causal language model",
    ),
    "unknown": (
        {"architectures": ["NobodyForCausalLM"], "model_type": "nobody", "auto_map": {"AutoConfig": "code.Config"}},
        "architecture 'NobodyForCausalLM' is not known to transformers",
    ),
    "rope": (
        {
            "architectures": ["GlmForCausalLM"],
            "model_type": "glm",
            "head_dim": 16,
            "rope_parameters": LONGROPE,
        },
        "rope_type longrope of GlmForCausalLM is not supported",
    ),
    "mask of its own": (
        {"architectures": ["DogeForCausalLM"], "model_type": "doge"},
        "DogeForCausalLM is not supported: its layers mask scores by a rule of their own",
    ),
    "both ways": (
        {"architectures": ["BertLMHeadModel"], "model_type": "bert", "is_decoder": False},
        "BertLMHeadModel is not supported: its layers attend both ways",
    ),
    "positions": (
        {"architectures": ["RobertaForCausalLM"], "model_type": "roberta", "is_decoder": True},
        "RobertaForCausalLM is not supported: it counts positions from behind its padding token",
    ),
    "decoder of two parts": (
        {
            "architectures": ["BartForCausalLM"],
            "model_type": "bart",
            "is_encoder_decoder": False,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
        },
        "BartForCausalLM is not supported: it takes no position_ids",
    ),
    "quantized": (
        {"architectures": ["GlmForCausalLM"], "model_type": "glm", "quantization_config": {"quant_method": "awq"}},
        "GlmForCausalLM through transformers must be unquantized",
    ),
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_by_name_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    fields, text = REFUSED[kind]
    (tmp_path / "config.json").write_text(json.dumps(SIZES | fields))
    (tmp_path / "code.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    assert text in refusal(tmp_path)


def test_longrope_of_a_family_of_ours_is_sent_to_our_decoder(tmp_path: Path) -> None:
    fields = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": LONGROPE}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | fields))
    text = refusal(tmp_path, "transformers")
    assert "rope_type longrope of Phi3ForCausalLM" in text and text.endswith("; leave out --model-impl transformers")
    describe_model(tmp_path)


def test_the_heads_of_latent_attention_are_told_as_they_are_cached(tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 3}
    groups = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | sizes | experts | groups | kind))
    made, read_shape = survey_model(tmp_path).config, foreign_shape(*read_configs(tmp_path))
    assert (read_shape.head_dim, read_shape.num_kv_heads) == (made.head_dim, made.num_kv_heads)


def test_heads_too_large_for_a_gpu_are_refused_there_before_weights_are_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Gemma4Text", **{**GEMMA_4, "global_head_dim": 1024})
    with pytest.raises(ConfigError, match=r"1024.* use --device cpu"):
        load_model(tmp_path, torch.bfloat16, "cuda")


@pytest.mark.parametrize("fault", ["missing", "of another shape"])
def test_a_tensor_at_fault_is_named(fault: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path, "StableLm")
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    del tensors[name]
    if fault != "missing":
        tensors[name] = torch.zeros(4, 5)
    save_file(tensors, path, {"format": "pt"})
    text = "missing from the checkpoint" if fault == "missing" else "has shape [4, 5], config.json calls for [48, 32]"
    with pytest.raises(ConfigError, match=re.escape(f"tensor {name} {text}")):
        load_model(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "StableLm")
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickle"):
        load_model(tmp_path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "StableLm")
    monkeypatch.setattr(foreign, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"StableLmForCausalLM.*outrider\[transformers\]"):
        check_config(tmp_path)
    save_tiny(tmp_path)
    check_config(tmp_path)
    assert isinstance(load_model(tmp_path), CausalLM)


def test_ours_can_be_demanded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "StableLm")
    with pytest.raises(ConfigError, match="'StableLmForCausalLM' is not supported"):
        load_model(tmp_path, impl="outrider")


ALONE = [
    ("StableLm", {}),
    ("Cohere", {"tie_word_embeddings": True}),
    ("GPTNeoX", {"num_key_value_heads": 4}),
    ("Glm4", {"head_dim": 24}),
]


@pytest.mark.parametrize(("family", "changes"), ALONE)
def test_config_json_alone_tells_what_transformers_does(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path, family, **changes)
    shape = describe_model(tmp_path)
    read_shape = foreign_shape(*read_configs(tmp_path))
    assert read_shape == ModelShape(**{name: getattr(shape, name) for name in ModelShape.__slots__})
    assert target_elements(read_shape, tmp_path).total == shape.num_parameters  # type: ignore[union-attr]


def test_a_tensor_in_two_shards_is_counted_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, "StableLm")
    read_shape, (whole,) = foreign_shape(*read_configs(tmp_path)), tmp_path.glob("*.safetensors")
    once = target_elements(read_shape, tmp_path)  # type: ignore[arg-type]
    tensors = load_file(whole)
    whole.rename(tmp_path / "first.safetensors")
    again = dict.fromkeys(["model.norm.weight"], "again.safetensors")
    save_file({name: tensors[name] for name in again}, tmp_path / "again.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "first.safetensors") | again}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert target_elements(read_shape, tmp_path) == once  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Cohere2", {"sliding_window": 6}), ("Glm", {"head_dim": 24})],
)
def test_flashinfer_is_refused_for_windows_and_heads_that_are_filled_up(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match="--attention-backend: flashinfer has no windows"):
        attention_backend("flashinfer", load_model(tmp_path), 16)
