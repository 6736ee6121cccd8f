"""Inflated checkpoints compute what their sources do, in shapes that divide badly on purpose."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from silent_progress import silent
from tiny_models import SIZES, put_within, relative_error, run_one, save_tiny, token_ids
from tokenizers import Tokenizer, models
from torch import Tensor

from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.layers.experts import ExpertMlp
from outrider.models.config import ModelConfig
from outrider.models.loader import load_model
from outrider_tools.inflate.folder import InflateOptions, compare, inflate, streamed_logits
from outrider_tools.inflate.shapes import SHAPES, Shape, ShapeMap, parse_shape, shape_of

# The tiny sources have hidden 32, 3 layers, 4 heads over 2 KV heads of 8 channels, and 48 MLP channels.
WIDER = Shape(hidden=48, layers=5, heads=12, kv_heads=4, head_dim=16, intermediate=56)
LARGER_GROUPS = Shape(hidden=36, layers=3, heads=9, kv_heads=3, head_dim=32, intermediate=48)
SMALLER_GROUPS = Shape(hidden=50, layers=4, heads=5, kv_heads=5, head_dim=24, intermediate=64)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits_of(folder: Path, ids: Tensor) -> Tensor:
    model = load_model(folder)
    return run_one(model, model.new_kv(ids.numel()), ids, torch.arange(ids.numel()))


def inflated(folder: Path, shape: Shape = WIDER, **changes: Any) -> Path:
    """`folder`'s model in float32 and `shape`."""
    out = folder.parent / f"{folder.name}-{len(list(folder.parent.iterdir()))}"
    inflate(folder, out, InflateOptions(shape, **{"dtype": torch.float32, **changes}), silent)
    return out


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("shape", [WIDER, LARGER_GROUPS, SMALLER_GROUPS], ids=["wider", "larger groups", "copied kv"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 0.5}),
        ("Qwen2", {}),
    ],
    ids=["llama", "biases, tied", "llama3 rope, large epsilon", "qwen2"],
)
def test_the_logits_are_the_sources(tmp_path: Path, family: str, changes: dict[str, Any], shape: Shape) -> None:
    save_tiny(tmp_path / "tiny", family, **changes)
    ids = token_ids(80)
    out = inflated(tmp_path / "tiny", shape)
    assert shape_of(ModelConfig.from_folder(out)) == shape
    assert relative_error(logits_of(out, ids), logits_of(tmp_path / "tiny", ids)) <= 2e-5


def test_groups_larger_than_the_targets_are_split_over_copies_of_their_kv_head(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", hidden_size=36, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    shape = Shape(hidden=40, layers=3, heads=10, kv_heads=5, head_dim=8, intermediate=48)
    assert ShapeMap.of(ModelConfig.from_folder(tmp_path / "tiny"), shape).kv_heads == [0, 0, 1, 1, -1]
    out, ids = inflated(tmp_path / "tiny", shape), token_ids(30)
    assert relative_error(logits_of(out, ids), logits_of(tmp_path / "tiny", ids)) <= 2e-5


def test_the_rest_is_random_and_not_zero(tiny: Path) -> None:
    weights = load_file(inflated(tiny) / "model-00001-of-00001.safetensors")
    other = load_file(inflated(tiny, seed=1) / "model-00001-of-00001.safetensors")
    again = load_file(inflated(tiny) / "model-00001-of-00001.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    idle = "model.layers.2.mlp.up_proj.weight"  # five layers hold three: in 0, 1 and 3
    assert 0.015 < float(weights[idle].std()) < 0.025
    assert not torch.equal(weights[idle], other[idle])
    assert not weights["model.layers.2.mlp.down_proj.weight"].any()
    assert (weights["model.layers.0.self_attn.k_proj.weight"] != 0).all()


def test_rows_added_to_the_vocabulary_are_never_chosen(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", rms_norm_eps=1e-5)
    ids = token_ids(60)
    expected = logits_of(tmp_path / "tiny", ids)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 5e-2)):
        logits = logits_of(inflated(tmp_path / "tiny", vocab_size=128, dtype=dtype), ids)
        assert logits.shape[1] == 128
        assert relative_error(logits[:, :97], expected) <= tolerance
        assert bool((logits[:, 97:].amax(1) < logits[:, :97].amin(1) - 100).all())


def test_a_vocabulary_is_padded_only_where_there_is_room(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="below the source's 97"):
        inflated(tiny, vocab_size=96)
    with pytest.raises(ConfigError, match="hidden above the source's"):
        inflated(tiny, Shape(32, 3, 8, 4, 8, 48), vocab_size=128)


def test_shards_are_no_larger_than_asked_and_load_as_any_checkpoint(tiny: Path) -> None:
    out = inflated(tiny, max_shard_bytes=20_000)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    tensors = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for path in shards:
        content = load_file(path)
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 20_000
    assert relative_error(logits_of(out, token_ids(9)), logits_of(tiny, token_ids(9))) <= 2e-5


# Two experts hold the source's 48 channels together, or three with room to spare; one alone could.
EXPERTS = [(24, 8, 4), (20, 15, 6), (64, 5, 2)]


@pytest.mark.parametrize(("size", "experts", "active"), EXPERTS)
@pytest.mark.parametrize("vocab_size", [None, 128])
def test_experts_compute_the_sources_mlp_whichever_are_chosen(
    tmp_path: Path, size: int, experts: int, active: int, vocab_size: int | None
) -> None:
    save_tiny(tmp_path / "tiny", rms_norm_eps=1e-3)
    shape = Shape(80, 5, 12, 4, 16, size, experts, active)
    out, ids = inflated(tmp_path / "tiny", shape, vocab_size=vocab_size), token_ids(60)
    assert shape_of(ModelConfig.from_folder(out)) == shape
    assert relative_error(logits_of(out, ids)[:, :97], logits_of(tmp_path / "tiny", ids)) <= 2e-5
    chosen = chosen_experts(out, ids)
    for layer in chosen:
        # The same token wakes the same ones, and all together wake all.
        assert len({tuple(row) for row in layer.tolist()}) > 5
        assert len(layer.unique()) == experts
    assert not torch.equal(chosen[0], chosen[1])


def chosen_experts(folder: Path, ids: Tensor) -> list[Tensor]:
    """Experts of each token [M, K], layer by layer."""
    model, found = load_model(folder), []
    for layer in model.layers:
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMlp)
        choose = mlp.router.to_float32

        def noted(rows: Tensor, choose: Any = choose, count: int = mlp.config.num_active) -> Tensor:
            logits: Tensor = choose(rows)
            found.append(logits.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values)
            return logits

        mlp.router.to_float32 = noted  # type: ignore[method-assign]
    run_one(model, model.new_kv(ids.numel()), ids, torch.arange(ids.numel()))
    return found


@pytest.mark.parametrize(
    ("shape", "changes", "problem"),
    [
        (Shape(80, 5, 12, 4, 16, 24, 8, 3), {}, "multiples of 2"),
        (Shape(60, 5, 12, 4, 16, 24, 8, 4), {}, "hidden must be at least 65"),
        (Shape(80, 5, 12, 4, 16, 24, 8, 4), {"mlp_bias": True}, "a Mixtral has none"),
    ],
)
def test_experts_that_cannot_hold_the_source_are_refused(
    tmp_path: Path, shape: Shape, changes: dict[str, Any], problem: str
) -> None:
    save_tiny(tmp_path / "tiny", **changes)
    with pytest.raises(ConfigError, match=problem):
        inflated(tmp_path / "tiny", shape)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_streamed_logits_are_those_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path / "tiny", family, tie_word_embeddings=family == "Qwen3")
    ids = token_ids(20)
    streamed = streamed_logits(tmp_path / "tiny", ids.tolist(), torch.device("cpu"))
    assert relative_error(streamed, logits_of(tmp_path / "tiny", ids)) <= 1e-5


def test_the_check_tells_a_copy_from_another_model(tiny: Path) -> None:
    out, ids, device = inflated(tiny, vocab_size=100), token_ids(20).tolist(), torch.device("cpu")
    good = compare(tiny, out, ids, device)
    assert good.passes(torch.float32)
    assert good.agreement == 1.0
    save_tiny(tiny.parent / "other", rms_norm_eps=1e-1)
    assert not compare(tiny.parent / "other", out, ids, device).passes(torch.float32)


@given(
    source_kv=st.integers(1, 4),
    source_group=st.integers(1, 6),
    kv_heads=st.integers(1, 30),
    group=st.integers(1, 6),
    layers=st.integers(1, 40),
    more=st.integers(0, 40),
)
def test_heads_stay_with_their_kv_head_and_layers_in_their_order(
    source_kv: int, source_group: int, kv_heads: int, group: int, layers: int, more: int
) -> None:
    source = Shape(source_kv * source_group, layers, source_kv * source_group, source_kv, 4, 8)
    target = Shape(1000, layers + more, kv_heads * group, kv_heads, 8, 8)
    if kv_heads < source_kv * math.ceil(source_group / group):
        with pytest.raises(ConfigError, match="kv_heads must be at least"):
            ShapeMap.of(config_of(source), target)
        return
    shape_map = ShapeMap.of(config_of(source), target)
    assert len(set(shape_map.heads)) == source.heads
    assert [shape_map.kv_heads[head // group] for head in shape_map.heads] == [
        head // source_group for head in range(source.heads)
    ]
    assert shape_map.layers == sorted(set(shape_map.layers))
    assert 0 <= shape_map.layers[0] <= shape_map.layers[-1] < target.layers


def config_of(shape: Shape, **changes: Any) -> ModelConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 64,
    }
    return ModelConfig.from_fields({**fields, **changes}, {})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_dim": 12}, "head_dim must be a multiple"),
        ({"hidden": 31}, "hidden is below the source's 32"),
        ({"layers": 2}, "layers is below the source's 3"),
        ({"intermediate": 47}, "intermediate is below the source's 48"),
        ({"heads": 3, "kv_heads": 1}, "kv_heads must be at least 2"),
    ],
)
def test_a_shape_that_cannot_hold_the_source_is_refused(tiny: Path, changes: dict[str, int], problem: str) -> None:
    shape = Shape(**{**dict(zip(Shape.__slots__, (48, 5, 12, 4, 16, 56), strict=False)), **changes})
    with pytest.raises(ConfigError, match=problem):
        inflated(tiny, shape)
    assert [path.name for path in tiny.parent.iterdir()] == ["tiny"]


def test_sources_that_depend_on_their_head_size_are_refused() -> None:
    shape = Shape(32, 3, 4, 2, 8, 48)
    with pytest.raises(ConfigError, match="Qwen3"):
        ShapeMap.of(config_of(shape, architectures=["Qwen3ForCausalLM"]), WIDER)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="yarn"):
        ShapeMap.of(config_of(shape, rope_parameters=yarn), WIDER)


def test_a_folder_that_exists_is_left_alone(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="exists; remove it"):
        inflate(tiny, tiny, InflateOptions(WIDER), silent)
    assert (tiny / "config.json").exists()


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    config["attention_bias"] = True  # the weights have none
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"k_proj\.bias and 11 more missing"):
        inflated(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_shapes_are_named_changed_or_spelled_out() -> None:
    assert parse_shape("llama-8b") == SHAPES["llama-8b"]
    assert parse_shape("llama-1b,layers=30") == Shape(2048, 30, 32, 8, 64, 8192)
    assert parse_shape(str(WIDER)) == WIDER
    assert parse_shape(str(SHAPES["qwen3-30b-a3b"])) == SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("llama-9b", "no such shape; choose one of llama-1b,"),
        ("", "no such shape"),
        ("llama-8b,depth=3", "'depth' is no size; the sizes are hidden,"),
        ("llama-8b,layers=0", "layers must be a positive integer"),
        ("llama-8b,layers=x", "layers must be a positive integer"),
        ("hidden=64,layers=2", "heads, kv_heads, head_dim, intermediate missing"),
        ("llama-8b,kv_heads=5", "heads 32 must be a multiple of kv_heads 5"),
        ("llama-8b,experts=8", "active must be 1 to experts 8, got 0"),
        ("llama-8b,head_dim=65", "head_dim must be even"),
    ],
)
def test_a_wrong_shape_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_shape(text)


@pytest.fixture
def model_folder(tiny: Path) -> Path:
    """One that the command line takes: with a tokenizer."""
    vocab = {chr(33 + index): index for index in range(SIZES["vocab_size"])}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(tiny / "tokenizer.json"))
    return tiny


def test_the_command_writes_checks_and_reports(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model_folder.parent / "big"
    words = ["inflate", "--model", str(model_folder), "--shape", str(WIDER), "--out", str(out), "--device", "cpu"]
    assert main([*words, "--vocab-size", "100", "--shard-gb", "0.001"]) == 0
    printed = capsys.readouterr().out
    assert "GB of weights" in printed
    assert "relative error" in printed
    assert "added tokens at least" in printed
    assert (out / "tokenizer.json").exists()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 100
    assert json.loads((out / "inflated.json").read_text())["layers"] == [0, 1, 3]
    assert load_model(out, torch.bfloat16).config.dtype == "bfloat16"
    head = model_folder.parent / "head"
    for others in ([], ["--random-draft", "--draft-out", str(head)]):
        assert main([*words, *others]) == 2
        assert f"--out {out}: exists; remove it" in capsys.readouterr().err
    assert not head.exists(), "nothing is made where not all can be"


@pytest.mark.parametrize(
    ("words", "problem"), [(["--shard-gb", "0"], "--shard-gb: '0' is not"), (["--seed=-1"], "--seed: '-1' is not")]
)
def test_the_command_names_a_wrong_option(
    model_folder: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(model_folder.parent / "big")
    with pytest.raises(SystemExit, match="2"):
        main(["inflate", "--model", str(model_folder), "--shape", "llama-8b", "--out", out, *words])
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_model_inflated_says_the_same(model_path: Path, tmp_path: Path) -> None:
    shape = Shape(hidden=640, layers=32, heads=16, kv_heads=4, head_dim=128, intermediate=1600)
    inflate(model_path, tmp_path / "big", InflateOptions(shape, torch.float32), silent)
    ids = token_ids(16, 49152).tolist()
    found = compare(model_path, tmp_path / "big", ids, torch.device("cpu"))
    assert found.relative_error <= 1e-5
    assert found.agreement == 1.0


def test_the_decoder_of_a_larger_model_is_inflated_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", "Mistral", sliding_window=None)
    put_within(tmp_path / "tiny")
    out, ids = inflated(tmp_path / "tiny"), token_ids(30)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert relative_error(logits_of(out, ids), logits_of(tmp_path / "tiny", ids)) < 1e-4
