"""Quantized checkpoints against the same matrices dequantized, in every format that the tool writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import put_within, relative_error, run_one, save_tiny, token_ids

from outrider.errors import ConfigError
from outrider.layers.formats import decode, nibble_words
from outrider.models.config import ModelConfig
from outrider.models.loader import load_model
from outrider.models.quantization import EIGHT_BITS, read_quantization
from outrider_tools.quantize import FORMATS, is_quantized, quantize

SIZES = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
STEP = {"fp8": 0.063, "int8": 0.06, "int4": 0.2, "mxfp4": 0.35}
"""How far a weight may be off, of the largest in its row."""


def make(tmp_path: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """A tiny model, and the same quantized."""
    source, out = tmp_path / "source", tmp_path / name
    save_tiny(source, **{**SIZES, **changes})
    quantize(source, out, name, 32, torch.device("cpu"), 1 << 30, lambda *_: None)
    return source, out


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_its_dequantized_matrices(tmp_path: Path, name: str) -> None:
    source, out = make(tmp_path, name)
    config = ModelConfig.from_folder(out)
    assert config.quantization is not None
    stored = load_file(out / "model-00001-of-00001.safetensors")
    wide = load_file(source / "model.safetensors")
    for key in filter(is_quantized, wide):
        module = key.removesuffix(".weight")
        scheme = config.quantization.scheme_of(module)
        assert scheme is not None
        parts = {end: stored[f"{module}.{end}"] for end in _ends(module, stored)}
        # As a loader's targets are.
        parts = {
            end: part.float() if "scale" in end and part.is_floating_point() else part for end, part in parts.items()
        }
        matrix = decode(scheme, parts).dequantized(torch.float32)
        error = (matrix - wide[key]).abs().amax(1) / wide[key].abs().amax(1)
        assert 0 < float(error.max()) < STEP[scheme.kind]
        wide[key] = matrix
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(wide, plain / "model.safetensors")
    model, expected, ids = load_model(out), load_model(plain), token_ids(8)
    found = run_one(model, model.new_kv(8), ids, torch.arange(8))
    assert torch.equal(found, run_one(expected, expected.new_kv(8), ids, torch.arange(8)))


def test_the_license_goes_with_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny(source, **SIZES)
    (source / "LICENSE").write_text("terms")
    quantize(source, tmp_path / "out", "fp8", 32, torch.device("cpu"), 1 << 30, lambda *_: None)
    assert (tmp_path / "out" / "LICENSE").read_text() == "terms"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("family", "name"), [*(("Qwen3Moe", name) for name in FORMATS), ("Mixtral", "fp8"), ("Qwen2Moe", "fp8-block")]
)
def test_experts_are_their_dequantized_matrices(tmp_path: Path, family: str, name: str) -> None:
    source, out, plain = tmp_path / "source", tmp_path / name, tmp_path / "plain"
    experts = {"num_local_experts": 4} if family == "Mixtral" else EXPERTS
    shared = {"shared_expert_intermediate_size": 64} if family == "Qwen2Moe" else {}
    save_tiny(source, family, **{**SIZES, **experts, **shared})
    quantize(source, out, name, 32, torch.device("cpu"), 1 << 30, lambda *_: None)
    config, stored = ModelConfig.from_folder(out), load_file(out / "model-00001-of-00001.safetensors")
    wide = load_file(source / "model.safetensors")
    for key in filter(is_quantized, wide):
        module = key.removesuffix(".weight")
        scheme = config.scheme_of(module)
        assert scheme is not None
        parts = {end: stored[f"{module}.{end}"] for end in _ends(module, stored)}
        parts = {
            end: part.float() if "scale" in end and part.is_floating_point() else part for end, part in parts.items()
        }
        wide[key] = decode(scheme, parts).dequantized(torch.float32)
    plain.mkdir()
    (plain / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(wide, plain / "model.safetensors")
    model, expected, ids = load_model(out), load_model(plain), token_ids(8)
    found = run_one(model, model.new_kv(8), ids, torch.arange(8))
    assert torch.equal(found, run_one(expected, expected.new_kv(8), ids, torch.arange(8)))


def test_blocks_of_gpt_oss_are_what_transformers_unpacks(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    reference = save_tiny(tmp_path, "GptOss", **{**SIZES, **sizes})
    weights = load_file(tmp_path / "model.safetensors")
    for name, parameter in reference.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, size, rows = weights.pop(name).shape
            blocks = torch.randint(0, 256, (experts, rows, size // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 124, (experts, rows, size // 32), dtype=torch.uint8)
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(weights, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": quantization}))
    model, ids = load_model(tmp_path), token_ids(20)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(run_one(model, model.new_kv(20), ids, torch.arange(20)), expected) <= 1e-5


def _ends(module: str, stored: dict[str, torch.Tensor]) -> list[str]:
    return [name.removeprefix(f"{module}.") for name in stored if name.startswith(f"{module}.")]


def test_gptq_files_may_have_empty_biases_and_no_reordered_columns(tmp_path: Path) -> None:
    _, out = make(tmp_path, "gptq")
    path, ids = out / "model-00001-of-00001.safetensors", token_ids(8)
    stored = load_file(path)
    model = load_model(out)
    found = run_one(model, model.new_kv(8), ids, torch.arange(8))
    name = "model.layers.0.mlp.down_proj"
    save_file({**stored, f"{name}.bias": torch.zeros(stored[f"{name}.scales"].shape[1])}, path)
    model = load_model(out)
    assert torch.equal(run_one(model, model.new_kv(8), ids, torch.arange(8)), found)
    save_file({**stored, f"{name}.g_idx": stored[f"{name}.g_idx"].flip(0).contiguous()}, path)
    with pytest.raises(ConfigError, match="g_idx"):
        load_model(out)


def test_rounded_to_bfloat16_it_is_near(tmp_path: Path) -> None:
    source, out = make(tmp_path, "fp8-block", hidden_size=96, tie_word_embeddings=True)
    model, wide, ids = load_model(out, torch.bfloat16), load_model(source), token_ids(8)
    found = run_one(model, model.new_kv(8), ids, torch.arange(8))
    assert relative_error(found, run_one(wide, wide.new_kv(8), ids, torch.arange(8))) < 0.2


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "supported are"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, ["desc_act", "act-order"]),
        ({"quant_method": "gptq", "bits": 8}, ["bits", "8"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic", "down", '"bits": 8']),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, ["dynamic", "no regular expression"]),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, ["group_size", "100"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["version", "gemv"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["block", "[128]"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt", "e5m2"]),
        (COMPRESSED, ["config_groups"]),
        ({**COMPRESSED, "config_groups": {"a": []}}, ["a must be an object"]),
        ({**COMPRESSED, "config_groups": {"a": {"weights": FP8, "targets": 5}}}, ["targets", "5"]),
        ({**COMPRESSED, "config_groups": {"a": {"weights": FP8, "input_activations": "x"}}}, ["input_activations"]),
        ({**COMPRESSED, "config_groups": {"a": {"weights": FP8}}, "ignore": 5}, ["ignore", "5"]),
        ({**COMPRESSED, "config_groups": {"a": {"weights": FP8}}, "sparsity_config": "x"}, ["sparsity_config"]),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, ["modules_to_not_convert"]),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {**FP8, "type": "int"}}}}, ["config_groups.a", "int8"]),
        (
            {**COMPRESSED, "config_groups": {"a": {"weights": FP8}}, "ignore": ["re:.*k_proj"]},
            ["differs", "k_proj: none"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_a_line(tmp_path: Path, config: dict[str, Any], words: list[str]) -> None:
    save_tiny(tmp_path, **SIZES)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(ConfigError) as raised:
        load_model(tmp_path)
    for word in words:
        assert word in raised.value.message
    assert "\n" not in raised.value.message


def test_int8_is_made_wide_so_no_memory_is_saved(tmp_path: Path) -> None:
    _, out = make(tmp_path, "int8")
    assert ModelConfig.from_folder(out).bytes_saved(2) == 0


def test_layers_left_out_stay_as_they_are() -> None:
    group = {"targets": ["Linear"], "weights": FP8}
    config = {
        **COMPRESSED,
        "config_groups": {"a": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.0.x_proj"],
    }
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    assert quantization.scheme_of("model.layers.1.x_proj") is not None
    assert quantization.scheme_of("layers.1.x_proj") is not None
    assert quantization.scheme_of("model.layers.0.x_proj") is None
    assert quantization.scheme_of("model.layers.0.mlp.gate") is None
    assert quantization.scheme_of("lm_head") is None
    fields = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["layers.2", "model.*.o_proj"],
    }
    quantization = read_quantization({"quantization_config": fields})
    assert quantization is not None
    assert quantization.scheme_of("model.layers.2.mlp.up_proj") is None
    assert quantization.scheme_of("model.layers.20.mlp.up_proj") is not None
    assert quantization.scheme_of("model.layers.3.self_attn.o_proj") is None
    assert quantization.scheme_of("model.mtp_layers.0.mlp.up_proj") is not None


def test_a_group_that_names_layers_counts_before_one_of_all() -> None:
    inputs = {"num_bits": 8, "type": "float"}
    groups = {
        "a": {"targets": ["Linear"], "weights": FP8},
        "b": {"targets": ["re:.*down_proj"], "weights": {**FP8, "strategy": "tensor"}},
        "c": {"targets": ["LlamaAttention"], "weights": None, "input_activations": inputs},
    }
    quantization = read_quantization({"quantization_config": {**COMPRESSED, "config_groups": groups}})
    assert quantization is not None
    down, up = (quantization.scheme_of(f"model.layers.0.mlp.{name}_proj") for name in ("down", "up"))
    assert down is not None and up is not None
    assert (down.block, up.block) == (0, 1)
    for config_groups in ({"c": groups["c"]}, {}):
        config = {**COMPRESSED, "config_groups": config_groups, "kv_cache_scheme": inputs}
        assert read_quantization({"quantization_config": config}) is None, "weights are as they were"


@pytest.mark.parametrize("scale", ["k_proj.output_scale", "k_scale", "q_scale"])
def test_scales_of_attention_and_of_its_cache_are_passed_over(tmp_path: Path, scale: str) -> None:
    _, out = make(tmp_path, "fp8")
    path, model, ids = out / "model-00001-of-00001.safetensors", load_model(out), token_ids(8)
    found = run_one(model, model.new_kv(8), ids, torch.arange(8))
    save_file({**load_file(path), f"model.layers.0.self_attn.{scale}": torch.full((1,), 0.5)}, path)
    model = load_model(out)
    assert torch.equal(run_one(model, model.new_kv(8), ids, torch.arange(8)), found)


@pytest.mark.parametrize("name", ["checkpoint_format", "format"])
def test_zeros_of_gptq_are_what_its_two_versions_say(name: str) -> None:
    """Version 1 subtracts one from each, word by word: a zero of 0 borrows from the one above it."""
    zeros = torch.tensor([[0, 8, 15, 0, 0, 7, 1, 0]])
    codes, rows = torch.randint(16, (8, 32), generator=torch.Generator().manual_seed(1)), torch.arange(32)
    words = nibble_words(zeros)
    matrices = []
    for version, stored in (("gptq", words - 0x11111111), ("gptq_v2", words)):
        fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, name: version}
        quantization = read_quantization({"quantization_config": fields})
        scheme = quantization and quantization.scheme_of("model.layers.0.mlp.down_proj")
        assert scheme is not None
        tensors = {
            "qweight": nibble_words(codes).t(),
            "qzeros": stored,
            "scales": torch.ones(1, 8),
            "g_idx": rows // 32,
        }
        matrices.append(decode(scheme, tensors).dequantized(torch.float32))
    expected = (codes - zeros.t()).float()
    assert [torch.equal(matrix, expected) for matrix in matrices] == [True, True]


def test_rules_of_gptq_leave_layers_out_and_change_groups() -> None:
    rules = {r"-:.*layers\.0\..*down": {}, r"+:model\.layers\.1\.": {"group_size": 32}, r".*\.layers\.2\..*": {}}
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": rules}
    quantization = read_quantization({"quantization_config": fields})
    assert quantization is not None
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") is None
    for layer, group in ((0, 128), (1, 32), (2, 128), (3, 128)):
        scheme = quantization.scheme_of(f"model.layers.{layer}.mlp.up_proj")
        assert scheme is not None and scheme.group == group


def test_quantizing_twice_and_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, out = make(tmp_path, "fp8")
    for folder, name, word in ((out, "fp8", "already"), (tmp_path / "source", "int4", "--group-size")):
        with pytest.raises(ConfigError, match=word):
            quantize(folder, tmp_path / "again", name, 128, torch.device("cpu"), 1 << 30, lambda *_: None)


def test_words_hold_eight_codes_the_first_in_the_lowest_bits() -> None:
    codes = torch.randint(16, (3, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = nibble_words(codes)
    assert found.dtype == torch.int32 and found.shape == (3, 3)
    parts = [(found.long() >> 4 * place) & 15 for place in range(8)]
    assert torch.equal(torch.stack(parts, -1).flatten(-2), codes.long())


def test_a_model_may_be_kept_from_libraries(tmp_path: Path) -> None:
    _, out = make(tmp_path, "int4")
    quantization = ModelConfig.from_folder(out).quantization
    assert quantization is not None
    scheme, own = (
        one.scheme_of("model.layers.0.mlp.down_proj") for one in (quantization, quantization.without_library())
    )
    assert scheme is not None and own is not None and scheme.library
    assert own == replace(scheme, library=False)


@pytest.mark.parametrize("ignored", ["language_model.lm_head", "lm_head", "re:.*lm_head"])
def test_a_head_is_left_out_by_any_of_its_names(ignored: str) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    inner = ["language_model.model.layers.0.mlp.down_proj", "model.language_model.layers.1.mlp.down_proj"]
    quantization = read_quantization({"quantization_config": fields | {"ignore": [ignored, *inner]}})
    assert quantization is not None
    names = ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert [quantization.scheme_of(name) for name in names] == [None] * 3
    assert quantization.scheme_of("model.layers.2.mlp.down_proj") is not None


def test_a_layer_is_left_out_by_its_number_and_a_dot() -> None:
    fields = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    quantization = read_quantization({"quantization_config": fields | {"modules_to_not_convert": ["model.layers.1."]}})
    assert quantization is not None
    assert quantization.scheme_of("model.layers.1.mlp.down_proj") is None
    assert quantization.scheme_of("model.layers.10.mlp.down_proj") is not None


@pytest.mark.parametrize("calibration", ["none", "own"])
def test_the_decoder_of_a_larger_model_is_quantized_as_it_is_alone(tmp_path: Path, calibration: str) -> None:
    source, found = tmp_path / "source", []
    save_tiny(source, "Mistral", sliding_window=None, **SIZES)
    for name in ("alone", "within"):
        if name == "within":
            put_within(source)
        quantize(source, tmp_path / name, "fp8", 32, torch.device("cpu"), 1 << 30, lambda *_: None, calibration)
        model = load_model(tmp_path / name)
        found.append(run_one(model, model.new_kv(8), token_ids(8), torch.arange(8)))
    assert torch.equal(*found)
    stored = load_file(tmp_path / "within" / "model-00001-of-00001.safetensors")
    assert stored["vision_tower.layers.0.attention.q_proj.weight"].dtype == torch.float32


def test_a_matrix_in_16_bits_is_rounded_to_fp8_and_what_is_fp8_stays() -> None:
    torch.manual_seed(0)
    wide = (torch.randn(40, 128) * torch.logspace(-4, 3, 40).unsqueeze(1)).bfloat16()
    wide[3] = 0
    rounded = decode(EIGHT_BITS, {"weight": wide}).dequantized(torch.float32)
    # Half a step of e4m3 with three bits behind the first, and of its subnormal numbers.
    bound = wide.float().abs() / 16 + 1e-5 * wide.float().abs().amax(1, keepdim=True)
    assert ((rounded - wide.float()).abs() <= bound).all() and not torch.equal(rounded, wide.float())
    assert torch.equal(decode(EIGHT_BITS, {"weight": rounded.bfloat16()}).dequantized(torch.float32), rounded)
