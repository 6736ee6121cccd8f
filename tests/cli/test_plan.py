from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.capacity import CONTEXT_BYTES, GIB
from outrider.models.config import ModelConfig
from outrider.models.cuts import cut
from outrider.models.drafters.config import MARKOV_INPUT, HeadConfig, block_config, eagle_config, mtp_config
from outrider.models.drafters.kinds import shipped_head
from outrider.models.elements import head_elements, kv_elements, model_elements
from outrider.models.store import config_folder
from outrider_tools.cli.plan import GPUS, count_graphs, parse_size, plan_draft, plan_target

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def allocated(model: object) -> int:
    """Bytes of the distinct tensors that an object holds, rotary tables aside."""
    import torch

    from outrider.layers.rotary import Rotary

    found: dict[int, int] = {}
    seen: set[int] = set()

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif type(value).__module__.startswith("outrider.") and not isinstance(value, Rotary) and id(value) not in seen:
            seen.add(id(value))
            for item in getattr(value, "__dict__", {}).values():
                walk(item)

    walk(model)
    return sum(found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_is_what_the_loader_allocates_for_smollm2(
    model_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from outrider.cache.kv import KVCache
    from outrider.layers.cpu_weight import can_pack
    from outrider.models.loader import load_model

    # On CPUs matrices may lie in blocks, and as codes besides, or in float32; the plan is of a GPU's memory.
    monkeypatch.setattr("outrider.layers.cpu_weight.fits", lambda weight: False)
    monkeypatch.setattr("outrider.layers.cpu_weight.bf16_flag", lambda: "bf16")
    kind = getattr(torch, dtype)
    packed = can_pack(torch.empty(1, 1, dtype=kind))
    model = load_model(model_path, kind)
    config = ModelConfig.from_folder(model_path)
    elements = model_elements(config)
    # On a CPU whose products need it, the output matrix lies in a layout of its own.
    extra = elements.embedding if packed and not elements.output else 0
    assert allocated(model) == (elements.total + extra) * kind.itemsize
    kv = KVCache(config.num_layers, 16, config.num_kv_heads, config.head_dim, kind)
    assert kv.k.nbytes + kv.v.nbytes == 16 * kv_elements(config) * kind.itemsize


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"attention_bias": True, "mlp_bias": True},
        {"architectures": ["Phi3ForCausalLM"]},
        {"architectures": ["Olmo2ForCausalLM"]},
        {"architectures": ["SmolLM3ForCausalLM"]},
        {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "mlp_only_layers": [1, 7]},
        {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "shared_expert_intermediate_size": 5632},
    ],
)
def test_every_family_is_counted_as_it_is_built(changes: dict[str, Any]) -> None:
    import torch

    from outrider.models.decoder import CausalLM

    config = ModelConfig.from_fields(LLAMA_8B | changes, {})
    assert allocated(CausalLM(config, torch.bfloat16, torch.device("meta"))) == 2 * model_elements(config).total


def test_a_model_needs_room_for_what_a_rank_has_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from outrider.models.decoder import CausalLM
    from verify_service.engine.loading import check_model

    part, device = cut(ModelConfig.from_fields(LLAMA_8B, {}), 4), torch.device("meta")
    free = [allocated(CausalLM(part, torch.bfloat16, device)), 80 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free)
    check_model(part, torch.bfloat16, device, 0.9)
    free[0] -= 1
    with pytest.raises(ConfigError, match="the weights take 4"):
        check_model(part, torch.bfloat16, device, 0.9)


def test_norms_behind_are_counted_and_heads_padded() -> None:
    import torch

    from outrider.models.decoder import CausalLM

    config = ModelConfig.from_fields(LLAMA_8B | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 96}, {})
    # Its norms are float32.
    expected = 2 * (model_elements(config).total + 4096 * (4 * 32 + 1))
    assert allocated(CausalLM(config, torch.bfloat16, torch.device("meta"))) == expected
    assert kv_elements(config) == 2 * 32 * 8 * 128


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, 4),
    ],
)
def test_quantized_weights_take_their_bits(fields: dict[str, Any], bits: int) -> None:
    config = ModelConfig.from_fields(LLAMA_8B | {"quantization_config": fields}, {})
    layers = config.num_layers * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    saved = config.bytes_saved(2)
    assert saved == pytest.approx(layers * (16 - bits) / 8, rel=0.03)
    assert saved < layers * (16 - bits) / 8, "scales take something"


def test_a_quantized_draft_in_float32_is_counted_as_it_is_dequantized(tmp_path: Path) -> None:
    fields = LLAMA_8B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = DraftOptions(speculative_algorithm=("STANDALONE",), speculative_draft_model_path=str(tmp_path))
    config = ModelConfig.from_fields(LLAMA_8B, {})
    elements = model_elements(config)
    whole, half = (plan_draft(replace(options, dtype=dtype), tmp_path) for dtype in ("float32", "bfloat16"))
    assert whole is not None and half is not None
    assert (whole.weights, whole.read) == (4 * elements.total, 4 * elements.read)
    assert half.weights < 2 * elements.total


def test_of_experts_those_are_read_that_tokens_wake() -> None:
    config = ModelConfig.from_fields(LLAMA_8B | {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}, {})
    elements, expert = model_elements(config), 3 * 4096 * 768
    assert elements.layers - elements.idle == elements.read - elements.output
    assert elements.idle == 32 * 120 * expert
    assert elements.read_by(1) == elements.read
    # The second token's eight are among the first one's with a chance of one in sixteen.
    assert elements.read_by(2) - elements.read == 32 * 8 * 15 * expert // 16
    assert elements.read_by(1000) == elements.read + elements.idle


def test_heads_are_counted_as_they_are_built(model_path: Path) -> None:
    import torch

    from outrider.models.drafters.heads import BlockHead, EagleHead, MtpHead
    from outrider.models.drafters.kinds import DraftOptions, choose_drafters
    from outrider.models.drafters.loader import load_draft_model

    meta = torch.device("meta")
    folder = shipped_head("smollm2")
    assert folder is not None
    options = choose_drafters(DraftOptions(target_model_path=str(model_path)), "smollm2")
    head: Any = load_draft_model(options, meta, torch.bfloat16)
    config: HeadConfig = head.config
    # The ids that it may guess, and what is made of fc when it is loaded, are no weights.
    built = sum(tensor.numel() for tensor in head.checkpoint_tensors().values())
    assert head_elements("EAGLE3", replace(config, draft_vocab_size=head.vocab_size)).total == built
    eagle = eagle_config(LLAMA_8B | {"num_hidden_layers": 2}, ("fc.bias",), 32, 4096)
    mtp = mtp_config(ModelConfig.from_fields(LLAMA_8B, {}), ("input_proj.weight",))
    fields = LLAMA_8B | {"num_hidden_layers": 2, "block_size": 7, "mask_token_id": 5, "target_layer_ids": [1, 9]}
    block = block_config(fields | {"markov_rank": 16}, (MARKOV_INPUT,), 32, 4096)
    heads = (("EAGLE", EagleHead, eagle), ("NEXTN", MtpHead, mtp), ("DSPARK", BlockHead, block))
    for name, kind, described in heads:
        assert allocated(kind(described, torch.bfloat16, meta)) == 2 * head_elements(name, described).total


@pytest.mark.parametrize("deterministic", [False, True])
def test_kv_is_sized_as_the_service_sizes_it(
    monkeypatch: pytest.MonkeyPatch, llama_8b: Path, deterministic: bool
) -> None:
    import torch

    from outrider.models.decoder import CausalLM
    from verify_service.engine.build import gpu_tokens

    config = ModelConfig.from_folder(llama_8b)
    options = VerifyOptions(
        max_running_requests=48, max_draft_tokens=31, mem_fraction_static=0.8, deterministic=deterministic
    )
    plan = plan_target(config, model_elements(config), "bfloat16", options, 80 * GIB)
    free = 80 * GIB - CONTEXT_BYTES - plan.weights
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 80 * GIB))
    model = CausalLM(config, torch.bfloat16, torch.device("meta"))
    assert plan.kv_tokens == gpu_tokens(options, model, None) // 16 * 16


def test_drafting_inside_rounds_is_sized_as_the_service_sizes_it(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from outrider.models.decoder import CausalLM
    from outrider.models.drafters.loader import load_draft_model
    from verify_service.engine.build import gpu_tokens
    from verify_service.engine.loading import RoundDraft
    from verify_service.executors.round_drafts import DraftingOptions

    head = shipped_head("smollm2")
    words = ["--model=smollm2", "--gpu=L4", "--draft-placement=colocated", "--speculative-algorithm=EAGLE3"]
    _, report = plan(capsys, *words, f"--speculative-draft-model-path={head}")
    meta, options = torch.device("meta"), VerifyOptions(speculative_algorithm=("EAGLE3",))
    options = replace(options, speculative_draft_model_path=str(head))
    draft = load_draft_model(options.draft_model(str(model_path)), meta, torch.bfloat16)
    memory = GPUS["L4"].memory
    free = memory - CONTEXT_BYTES - report["weights"] - report["draft"]["weights"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, memory))
    target = CausalLM(ModelConfig.from_folder(model_path), torch.bfloat16, meta)
    real = gpu_tokens(options, target, RoundDraft(draft, DraftingOptions("eagle3"), False))
    assert report["kv_tokens"] == pytest.approx(real, abs=16) and report["colocated_per_token"] > 0
    assert report["features_per_token"] == 0, "they are in the budget"
    _, remote = plan(capsys, *words[:2])
    assert report["kv_tokens"] < remote["kv_tokens"]


@pytest.mark.parametrize(
    ("running", "nodes", "most"), [(32, 63, 64), (1, 0, 64), (16, 31, 8), (100, 63, 64), (48, 200, 32)]
)
def test_graphs_are_counted_as_they_are_captured(running: int, nodes: int, most: int) -> None:
    from verify_service.executors.round_buffers import Buckets

    options = VerifyOptions(max_running_requests=running, max_draft_tokens=nodes, cuda_graph_max_bs=most)
    captured = [one for one in Buckets(running + nodes, running).all() if one.rows <= most]
    assert count_graphs(running + nodes, options) == len(captured)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--json", *words])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def test_an_8b_model_on_a_known_gpu(llama_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = plan(capsys, f"--model={llama_8b}", "--gpu=h100", "--request-tokens=4096")
    assert code == 0 and report["fits"]
    assert (report["kv_per_token"], report["kv_per_page"]) == (131072, 2 << 20)
    assert report["weights"] == 2 * report["parameters"] == 16060522496
    assert report["requests"] == 32, "as many as a round takes"
    # All but the embedding's 1 GiB is read.
    assert report["round_floor_seconds"] == pytest.approx((16060522496 - 2 * 128256 * 4096) / 3.35e12)
    assert report["num_graphs"] == 48


def test_a_rank_has_its_part(llama_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", f"--model={llama_8b}", "--speculative-algorithm=NGRAM", "--gpu=h200", "--json"]
    reports = []
    for more in ([], ["--tensor-parallel-size=4"]):
        assert main([*argv, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    one, four = reports
    assert four["num_ranks"] == 4 and four["kv_per_token"] * 4 == one["kv_per_token"]
    # Of the embedding every rank has all, and norms are small.
    embedding = 2 * 128256 * 4096
    assert four["weights"] - embedding == pytest.approx((one["weights"] - embedding) / 4, rel=1e-3)
    assert main([*argv, "--tensor-parallel-size=3"]) == 2
    assert "num_attention_heads 32 cannot be divided among 3 ranks" in capsys.readouterr().err


def test_a_rank_has_its_part_of_a_head_inside_rounds(
    llama_8b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    words = [f"--model={llama_8b}", "--gpu=h100", "--draft-placement=colocated", "--speculative-algorithm=EAGLE3"]
    words += [f"--speculative-draft-model-path={head}"]
    for channels, is_cut in ((14336, True), (14337, False)):
        fields = {"num_hidden_layers": 1, "draft_vocab_size": 32000, "intermediate_size": channels}
        (head / "config.json").write_text(json.dumps(LLAMA_8B | fields))
        one, two = (plan(capsys, *words, f"--tensor-parallel-size={count}")[1]["draft"] for count in (1, 2))
        # Embedding and fc are whole on every rank, and norms are small.
        kept = 2 * (128256 * 4096 + 3 * 4096 * 4096)
        share = 2 if is_cut else 1
        assert two["weights"] - kept == pytest.approx((one["weights"] - kept) / share, rel=1e-3)
        assert two["kv_per_token"] * share == one["kv_per_token"] and two["vocab_size"] == 32000


def test_a_model_that_does_not_fit_is_said_and_the_exit_code_tells(
    llama_8b: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = plan(capsys, f"--model={llama_8b}", "--gpu-memory=12GiB")
    assert code == 1 and not report["fits"] and "do not fit" in report["warnings"][0]
    assert report["context"] == report["requests"] == 0
    assert main(["plan", f"--model={llama_8b}", "--gpu-memory=12GiB"]) == 1
    text = capsys.readouterr().out
    assert "warning: weights and KV do not fit" in text
    assert "longest request" not in text and "131072" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-total-tokens=64"], "--max-total-tokens: 64 tokens are too few to warm up; allow at least 512"),
        (["--context-length=200000"], "--context-length: 200000 is over the 131072 positions of the model"),
        (
            ["--context-length=100000", "--max-total-tokens=4096"],
            "--context-length: 100000 is over the 4017 tokens that the KV cache has room for",
        ),
        (["--context-length=100000", "--gpu-memory=20GiB"], "tokens that the KV cache has room for; lower it"),
    ],
)
def test_what_the_service_refuses_is_refused(
    llama_8b: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={llama_8b}", "--gpu=L4", *words]) == 2
    assert message in capsys.readouterr().err


def test_cuda_itself_is_counted_once_with_what_the_share_is_for(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--model={model_path}", "--mem-fraction-static=0.98", "--speculative-algorithm=NGRAM"]
    _, report = plan(capsys, *words, "--gpu=L4")
    assert report["graphs"] < report["outside"] < report["graphs"] + CONTEXT_BYTES and report["warnings"] == []
    _, report = plan(capsys, *words, "--gpu-memory=8GiB")
    assert report["warnings"] == ["--mem-fraction-static leaves too little for CUDA graphs; lower it"]


def test_more_tokens_than_a_gpu_holds_do_not_fit(llama_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = plan(capsys, f"--model={llama_8b}", "--gpu=L4", "--max-total-tokens=10000000")
    assert code == 1 and not report["fits"] and "--max-total-tokens" in report["warnings"][0]
    assert plan(capsys, f"--model={llama_8b}", "--gpu=L4", "--max-total-tokens=4096")[0] == 0


def test_a_draft_on_the_same_gpu_takes_room_from_the_cache(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, alone = plan(capsys, f"--model={model_path}", "--gpu=L4")
    _, beside = plan(capsys, f"--model={model_path}", "--gpu=L4", "--same-gpu")
    assert alone["draft"]["algorithm"] == "EAGLE3" and alone["features_per_token"] == 2 * 576
    lost = (alone["kv_tokens"] - beside["kv_tokens"]) * alone["kv_per_token"]
    assert lost == pytest.approx(alone["draft"]["weights"] + alone["draft"]["tree_slots"], abs=1.1 * GIB)
    assert lost > 0


def test_without_speculation_nothing_is_kept_for_drafts(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model=smollm2", "--gpu=L4", "--no-speculation"]
    inside, beside = (plan(capsys, *words, f"--draft-placement={place}")[1] for place in ("colocated", "remote"))
    assert inside == beside and "draft" not in inside and inside["colocated_per_token"] == 0


def test_a_cache_sized_by_memory_has_as_many_tokens_as_the_service_wants(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tokens, fits in ((768, False), (1040, True)):
        wanted = VerifyOptions(max_total_tokens=tokens)
        config = ModelConfig.from_folder(model_path)
        whole = plan_target(config, model_elements(config), "bfloat16", wanted, 0)
        memory = int((whole.weights + whole.scratch + CONTEXT_BYTES + tokens * whole.kv_per_token) / 0.98) + 1
        sized = replace(wanted, max_total_tokens=0, mem_fraction_static=0.98)
        found = plan_target(config, model_elements(config), "bfloat16", sized, memory)
        assert bool(found.kv_tokens) == fits and found.kv_tokens in (0, 1040)


def test_features_that_find_no_room_are_warned_of(
    llama_8b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 1, "draft_vocab_size": 32000}))
    words = [f"--model={llama_8b}", "--gpu=H200", "--speculative-algorithm=EAGLE3"]
    words += [f"--speculative-draft-model-path={head}"]
    _, report = plan(capsys, *words, "--mem-fraction-static=0.98")
    assert report["features_per_token"] == 8192 and "the head is not used" in report["warnings"][0]
    _, report = plan(capsys, *words, "--mem-fraction-static=0.8")
    assert report["warnings"] == []


def test_without_a_gpu_the_sizes_alone_are_told(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--model={model_path}"]) == 0
    out = capsys.readouterr().out
    assert "134.5 M parameters in bfloat16" in out and "KV of a page" in out and "requests at once" not in out


def test_what_fits_is_said_once_and_shares_of_a_gpu_s_memory_by_their_option(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={model_path}", "--gpu=L4"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "requests at once 32 of 8192 tokens" in lines
    assert "GPU memory 22.50 GiB --mem-fraction-static gives 19.80 GiB to weights, KV, scratch and CUDA itself" in lines
    assert "KV of a token 22.5 KiB each token of prompt and answer takes it" in lines
    assert main(["plan", f"--model={model_path}", "--gpu=L4", "--request-tokens=100"]) == 0
    assert "of 100 tokens; or 32 of 8192" in capsys.readouterr().out


def test_the_parts_of_a_gpu_s_memory_add_up(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    assert main(["plan", f"--model={model_path}", "--gpu=L4"]) == 0
    words = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()}
    parts = ("weights", "logits and sampling", "CUDA itself, about", "KV cache")
    total = sum(float(words[name][0]) * units[words[name][1]] for name in parts)
    assert total == pytest.approx(0.88 * 22.5 * GIB, rel=1e-3)


def test_a_round_of_all_requests_says_how_many_and_how_long(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={model_path}", "--gpu=L4"]) == 0
    out = capsys.readouterr().out
    assert "cache full" not in out, "32 requests of 8192 tokens fill a quarter of this one"
    assert "32 requests of 8192 tokens" in out


def test_what_does_not_fit_has_no_requests_at_all(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--model={model_path}", "--gpu-memory=100MiB"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "requests at once 0 it does not fit" in lines


def test_requests_longer_than_the_context_are_refused(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        assert main(["plan", f"--model={model_path}", "--gpu=L4", "--request-tokens=8193", *more]) == 2
        assert "--request-tokens: 8193 is over 8192, the longest request here; lower it" in capsys.readouterr().err
    assert main(["plan", f"--model={model_path}", "--gpu=L4", "--request-tokens=8192"]) == 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("EAGLE9", "'EAGLE9' is not known; use one of DFLASH"),
        ("EAGLE9,NGRAM", "'EAGLE9' is not known; use one of DFLASH"),
        ("EAGLE,EAGLE3", "EAGLE,EAGLE3 are models and do not run together"),
    ],
)
def test_a_drafter_that_there_is_not_is_no_missing_draft_model(
    names: str, message: str, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={model_path}", f"--speculative-algorithm={names}"]) == 2
    assert f"--speculative-algorithm: {message}" in capsys.readouterr().err


def test_sizes_and_names_that_are_wrong_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert parse_size("80GiB", "x") == 80 * GIB and parse_size("4.8TB/s", "x") == 4.8e12
    for words in (["--gpu-memory=many"], ["--gpu=H300"], ["--bandwidth=-1"], [f"--model={tmp_path}"]):
        assert main(["plan", *words]) == 2
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        config_folder(str(tmp_path))


def test_sizes_that_are_none_and_models_that_are_not_there_are_named(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model={model_path}"
    for words, message in (
        ([model, "--gpu="], "--gpu: '' is not known"),
        ([model, "--gpu-memory="], "--gpu-memory: '' is no size"),
        ([model, "--bandwidth=1e-300"], "--bandwidth: '1e-300' is no size"),
        ([model, "--gpu-memory=80GiB-x"], "--gpu-memory: '80GiB-x' is no size"),
        (["--model="], "--model: : no config.json there"),
        (
            [model, "--speculative-algorithm=STANDALONE", "--speculative-draft-model-path=nosuch"],
            "--speculative-draft-model-path: nosuch: no config.json there",
        ),
    ):
        assert main(["plan", *words]) == 2
        assert f"error: {message}" in capsys.readouterr().err
