"""A folder that cannot be served is refused by name, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig, check_heads, text_fields
from outrider.models.parts import RopeConfig, read_ropes

VALID: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}

GRANITE = {"architectures": ["GraniteForCausalLM"]}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
OF_KINDS = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 7.0}}
GEMMA = {"architectures": ["Gemma2ForCausalLM"]}


def test_windows_of_layers_by_each_way_to_say_them() -> None:
    def windows(architecture: str, **fields: Any) -> tuple[int, ...]:
        given = {**VALID, "num_hidden_layers": 6, "architectures": [architecture], **fields}
        return ModelConfig.from_fields(given, {}).windows

    assert windows("MistralForCausalLM", max_position_embeddings=8192) == (4096,) * 6
    assert windows("MistralForCausalLM", sliding_window=None) == ()
    assert windows("Gemma2ForCausalLM", sliding_window=8) == (8, 0) * 3
    assert windows("Gemma3ForCausalLM", sliding_window=8) == (8, 8, 8, 8, 8, 0)
    assert windows("Qwen2ForCausalLM", sliding_window=8) == ()
    late = {"use_sliding_window": True, "max_window_layers": 4}
    assert windows("Qwen2ForCausalLM", sliding_window=8, **late) == (0, 0, 0, 0, 8, 8)
    assert windows("Phi3ForCausalLM", sliding_window=2047, max_position_embeddings=4096) == (2047,) * 6
    assert windows("Phi3ForCausalLM", sliding_window=2047, max_position_embeddings=2047) == (), "it hides nothing"
    assert windows("SmolLM3ForCausalLM") == ()
    assert windows("Olmo3ForCausalLM", sliding_window=8) == (8, 8, 8, 0, 8, 8)


def test_layers_with_a_window_keep_their_rotary_embedding_where_the_others_are_stretched() -> None:
    """As the hub writes it; what transformers 5 writes is tested by logits."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    for architecture, theta in (("Olmo3ForCausalLM", 500_000.0), ("Gemma3ForCausalLM", 10_000.0)):
        given = {**VALID, "num_hidden_layers": 6, "architectures": [architecture], "rope_scaling": yarn}
        config = ModelConfig.from_fields(given, {})
        local, last = config.rope_of(0), config.rope_of(3 if architecture == "Olmo3ForCausalLM" else 5)
        assert local is not None and last is not None
        assert (local.kind, local.theta, last.kind) == ("default", theta, "yarn")


def test_the_first_gemma_files_mean_the_gelu_that_they_were_trained_with() -> None:
    config = ModelConfig.from_fields({**VALID, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}, {})
    assert config.activation == "gelu_pytorch_tanh"


def test_absent_fields_have_the_family_defaults() -> None:
    config = ModelConfig.from_fields(VALID, {})
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)
    assert (config.dtype, config.tie_embeddings, config.eos_token_ids) == ("float32", False, ())


def test_end_of_sequence_ids_come_from_both_files() -> None:
    config = ModelConfig.from_fields({**VALID, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (7, 2, 9)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_names(field: str) -> None:
    assert ModelConfig.from_fields({**VALID, field: "bfloat16"}, {}).dtype == "bfloat16"


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_rope_is_found_in_each_of_its_homes(fields: dict[str, Any]) -> None:
    rope = ModelConfig.from_fields({**VALID, **fields}, {}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


def test_null_rope_scaling_means_none() -> None:
    assert ModelConfig.from_fields({**VALID, "rope_scaling": None}, {}).rope.kind == "default"


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
    ],
)
def test_yarn_stretches_the_positions_that_it_began_with(scaling: dict[str, Any], positions: int) -> None:
    fields = {**VALID, "max_position_embeddings": 64, "rope_scaling": scaling}
    assert ModelConfig.from_fields(fields, {}).max_positions == positions


def test_further_layers_in_a_list_of_those_that_rotate_are_passed_over() -> None:
    assert ModelConfig.from_fields({**VALID, **SMOLLM3, "no_rope_layers": [1, 0, 0, 1]}, {}).unrotated == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"architectures": [["x"]]}, ["architectures"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "4096"]),
        ({"num_attention_heads": True}, ["num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"num_attention_heads": 5}, ["head_dim"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "a finite number"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({**EXPERTS, "num_experts": None}, ["num_local_experts", "missing"]),
        ({**EXPERTS, "num_experts_per_tok": 9}, ["num_experts_per_tok 9", "num_experts 8"]),
        ({**EXPERTS, "num_experts": 2000}, ["num_experts 2000", "1024"]),
        ({**EXPERTS, "moe_intermediate_size": 0}, ["moe_intermediate_size", "at least 1"]),
        ({**EXPERTS, "mlp_only_layers": 3}, ["mlp_only_layers", "list"]),
        ({"dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        ({"eos_token_id": 100}, ["eos_token_id", "100"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"use_sliding_window": True}, ["sliding window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding window"]),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ["ntk", "llama3", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "needs factor"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings", "at least 2"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, ["long_factor", "numbers above 0"]),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, ["1 factors", "4 pairs"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta"]),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1e12, "original_max_position_embeddings": 8}},
            ["factor", "2147483647 positions"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0}}, ["beta_fast", "above 0"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": -1.0}}, ["beta_slow", "above 0"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": "linear"}, ["rope"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["original_max_position_embeddings"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({**PHI3, "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ({**PHI3, "partial_rotary_factor": 0.4}, ["partial_rotary_factor", "3 channels"]),
        ({"layer_types": ["chunked_attention", "full_attention"]}, ["chunked_attention", "sliding_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 words"]),
        ({**GRANITE, "logits_scaling": 0.0}, ["logits_scaling", "above 0"]),
        ({**SMOLLM3, **WINDOWED}, ["layer_types", "sliding_attention", "use_sliding_window is false"]),
        ({**GEMMA, **WINDOWED, "sliding_window": None}, ["layer_types", "sliding_window has no size"]),
        ({"rope_parameters": OF_KINDS}, ["rope_parameters", "layer type", "one rotary embedding"]),
        ({**GEMMA, "rope_parameters": OF_KINDS}, ["rope_parameters", "layer type", "one rotary embedding"]),
        ({**SMOLLM3, "no_rope_layers": [1]}, ["no_rope_layers", "2 numbers"]),
        ({**GEMMA, "hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ({**GEMMA, "query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        ({**GEMMA, "use_bidirectional_attention": True}, ["use_bidirectional_attention", "Gemma2ForCausalLM"]),
        ({**EXPERTS, "hidden_act": "gelu_pytorch_tanh"}, ["hidden_act", "gelu_pytorch_tanh", "experts"]),
        ({**GEMMA, "architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3}, ["text_config"]),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_fields({**VALID, **changes}, {})
    for word in words:
        assert word in raised.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 640}, ["head_dim 640", "LlamaForCausalLM", "512", "--device cpu"]),
        ({"head_dim": 80, "architectures": ["Qwen3ForCausalLM"]}, ["head_dim 80", "norms of heads", "--device cpu"]),
    ],
)
def test_heads_that_no_kernel_of_a_gpu_takes_are_named(changes: dict[str, Any], words: list[str]) -> None:
    check_heads(ModelConfig.from_fields({**VALID, "head_dim": 96}, {}))
    with pytest.raises(ConfigError) as raised:
        check_heads(ModelConfig.from_fields({**VALID, **changes}, {}))
    for word in words:
        assert word in raised.value.message


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_damaged_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VALID))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        ModelConfig.from_folder(tmp_path)


def test_an_end_outside_the_vocabulary_is_told_with_its_file() -> None:
    for source, fields, generation in (
        ("generation_config.json", {}, {"eos_token_id": [2, 100]}),
        ("config.json", {"eos_token_id": 100}, {"eos_token_id": 2}),
    ):
        with pytest.raises(ConfigError, match=rf"^{source}: eos_token_id 100 .* vocabulary of 100 "):
            ModelConfig.from_fields({**VALID, **fields}, generation)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        ModelConfig.from_folder(tmp_path / "nowhere")


def test_scaling_that_is_added_to_a_new_config_counts() -> None:
    """Model cards say to add `rope_scaling`; transformers takes it before the `rope_parameters` that it writes."""
    plain = {"rope_type": "default", "rope_theta": 500.0}
    rope = RopeConfig.from_fields(
        {"rope_parameters": plain, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 64
    )
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 500.0)
    two_embeddings = {"rope_local_base_freq": None}
    of_kinds = {"full_attention": plain, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}
    whole, windowed = read_ropes(
        {"rope_parameters": of_kinds, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, **two_embeddings}, 64
    )
    assert (whole.factor, whole.theta) == (2.0, 500.0)
    assert windowed is not None and (windowed.factor, windowed.theta) == (1.0, 7.0)


@pytest.mark.parametrize("outer", [True, False])
def test_whether_the_head_is_the_embedding_is_the_whole_model_s_to_say(outer: bool) -> None:
    text = {"hidden_size": 8, "tie_word_embeddings": not outer}
    assert text_fields({"text_config": text, "tie_word_embeddings": outer})["tie_word_embeddings"] is outer
    assert text_fields({"text_config": text})["tie_word_embeddings"] is not outer
