"""Forwards of few rows in bfloat16 on a CPU: all layers in one function, against layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_rows import round_to_four_bits
from tiny_models import save_tiny
from torch import Tensor

from kernels.cpu.head_step import Links, Stepped
from kernels.cpu.isa import Isa
from kernels.cpu.products import MAX_ROWS
from kernels.cpu.stack import mask_of, pieces
from kernels.expert_tiles import SWIGLU, Gating
from kernels.experts import expert_linear, route
from outrider.attention.base import ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import RegionAttention, RowSteps, StepBatch, TorchAttention
from outrider.config.draft import DraftOptions
from outrider.layers.experts import ExpertLinear
from outrider.models.decoder import CausalLM, LayerStack
from outrider.models.drafters.heads import Eagle3Head
from outrider.models.drafters.loader import load_draft_model
from outrider.models.loader import load_model
from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import HostProposer

pytestmark = pytest.mark.usefixtures("isa")
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
ROOT = Path(__file__).parents[2]


def near(found: Tensor, expected: Tensor) -> bool:
    """Whether both differ by the rounding of bfloat16."""
    return bool((found.float() - expected.float()).norm() < 0.02 * expected.float().norm())


def loaded(folder: Path, family: str, **changes: Any) -> CausalLM:
    save_tiny(folder, family, **{**SIZES, **changes})
    model = load_model(folder, torch.bfloat16)
    assert isinstance(model, CausalLM)
    return model


def a_tree() -> tuple[ForwardBatch, Tensor]:
    """Two requests: a root above three nodes, and five causal tokens; and the slots of their contexts."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    segments = [Segment(4, slots[:24], mask), Segment(5, slots[24:40])]
    positions = torch.tensor([20, 21, 21, 22, 11, 12, 13, 14, 15])
    return ForwardBatch(torch.arange(9) * 11 + 1, positions, segments), torch.cat((slots[:20], slots[24:35]))


def both(
    model: CausalLM, batch: TokenBatch, context: Tensor, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Hidden rows, features and KV, by the one function and layer by layer."""
    found = []
    for few in (True, False):
        if not few:
            monkeypatch.setattr(model._stack, "few", None)
        kv = model.new_kv(64)
        for cache in (kv.k, kv.v):
            values = torch.randn(cache[:, context].shape, generator=torch.Generator().manual_seed(5))
            cache[:, context] = values.bfloat16()
        hidden, features = model.forward_with_features(batch, kv, TorchAttention(), layers)
        found.append(([hidden, *features], [kv.k, kv.v]))
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Llama", {"num_key_value_heads": 1}), ("Qwen2", {}), ("Qwen3", {}), ("Mistral", {})],
)
def test_a_family_s_layers_give_the_same(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "Mistral":
        changes = {"sliding_window": None}
    if family == "Qwen2":
        changes = {"hidden_size": 128}
    model = loaded(tmp_path, family, **changes)
    assert model._stack.few is not None
    batch, context = a_tree()
    (rows, caches), (expected, kept) = both(model, batch, context, (0, 2, 1, 3, 4), monkeypatch)
    for found, wanted in zip([*rows, *caches], [*expected, *kept], strict=True):
        assert near(found, wanted)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Gemma2", {}),
        ("Granite", {"residual_multiplier": 0.5}),
        ("Mistral", {"sliding_window": 8}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"hidden_size": 104}),
    ],
)
def test_what_the_function_does_not_do_runs_layer_by_layer(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = loaded(tmp_path, family, **changes)
    assert model._stack.few is None
    batch, _ = a_tree()
    assert model.forward(batch, model.new_kv(64), TorchAttention()).isfinite().all()


def test_many_rows_and_float32_run_layer_by_layer(tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama")
    kv = model.new_kv(128)
    for count, is_few in ((MAX_ROWS, True), (MAX_ROWS + 1, False)):
        batch = ForwardBatch(torch.arange(count), torch.arange(count), [Segment(count, torch.arange(count))])
        assert bool(model._stack.plans(batch, kv)) is is_few
    assert not model._stack.plans(TokenBatch(torch.arange(3), torch.arange(3)), kv), "keys that no host knows"
    exact = load_model(tmp_path, torch.float32)
    assert isinstance(exact, CausalLM) and exact._stack.few is None


def test_any_number_of_rows_has_the_same_bits_however_cut_if_codes_are_multiplied_as_they_are(
    tmp_path: Path, isa: Isa
) -> None:
    loaded(tmp_path, "Llama")
    round_to_four_bits(tmp_path)
    model = load_model(tmp_path, torch.bfloat16)
    assert isinstance(model, CausalLM)
    assert model._stack.few is not None and model._stack.few.shape.kind == "four"
    assert (model.steady_rows > MAX_ROWS) is isa.has_dots("four")
    ends, found = ([MAX_ROWS], [150], [100, 101, 150]), []
    for cuts in ends:
        kv, start = model.new_kv(150), 0
        parts = []
        for end in cuts:
            places = torch.arange(end)
            batch = ForwardBatch(places[start:] % 128, places[start:], [Segment(end - start, places)])
            hidden, features = model.forward_with_features(batch, kv, TorchAttention(), (0, 1, 3))
            parts.append(torch.cat([hidden, *features], 1))
            start = end
        found.append(torch.cat(parts))
    few, whole, cut = found
    if isa.has_dots("four"):
        assert torch.equal(few, whole[:MAX_ROWS]) and torch.equal(whole, cut)
    else:
        assert near(few, whole[:MAX_ROWS]) and near(whole, cut)


def test_masks_of_a_long_prompt_do_not_grow_with_the_square_of_its_length() -> None:
    slots = torch.randperm(2100)
    found = ForwardBatch(torch.arange(2000), torch.arange(2000), [Segment(2000, slots)]).queries()
    assert found is not None
    queries, own = found
    assert torch.equal(own, slots[100:])
    queries = [part for piece, _, _ in pieces(queries, own, own) for part in piece]
    masks = [mask for part in queries if (mask := mask_of(part)) is not None]
    assert sum(mask.numel() for mask in masks) <= 2000 * MAX_ROWS
    unseen = [(~mask).sum(1) for mask in masks]
    counts = torch.cat([len(part.slots) - hidden for part, hidden in zip(queries, unseen, strict=True)])
    assert torch.equal(counts, torch.arange(101, 2101)), "all before it, and itself"
    assert all(torch.equal(part.slots, slots[: len(part.slots)]) for part in queries)


@pytest.fixture(scope="module")
def head(model_path: Path, isa: Isa) -> Eagle3Head:
    """The shipped one, as it is loaded where the processor has this instruction set."""
    options = DraftOptions(
        speculative_algorithm=("EAGLE3",),
        speculative_draft_model_path=str(ROOT / "models" / "SmolLM2-135M-Instruct-EAGLE3"),
        target_model_path=str(model_path),
    )
    loaded = load_draft_model(options, torch.device("cpu"), torch.bfloat16)
    assert isinstance(loaded, Eagle3Head)
    return loaded


def test_a_step_of_the_shipped_head_gives_the_same(head: Eagle3Head, monkeypatch: pytest.MonkeyPatch) -> None:
    assert head.stack.few is not None
    generator = torch.Generator().manual_seed(1)
    region, context = 8, torch.randperm(30, generator=generator)
    places = torch.cat((context, torch.arange(40, 40 + region)))
    seen = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]]).bool()
    own = torch.tensor([2, 1, 3])
    steps = [RowSteps(0, own, places[: len(context) + 4], seen)]
    batch = StepBatch(torch.tensor([5, 900, 77]), torch.tensor([31, 31, 31]), 40 + own, steps)
    features = torch.randn(3, head.feature_size, generator=generator).bfloat16()
    given = features.clone()
    results = []
    for few in (True, False):
        if not few:
            monkeypatch.setattr(head.stack, "few", None)
        kv = head.new_kv(64)
        for cache in (kv.k, kv.v):
            cache[:] = torch.randn(cache.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        results.append((*head.forward(batch, features, kv, RegionAttention(kv, [places], region)), kv.k, kv.v))
    for found, expected in zip(*results, strict=True):
        assert found is not None and expected is not None and near(found, expected)
    assert torch.equal(features, given), "features are the caller's"


def test_each_row_of_a_head_s_long_prompt_gets_the_input_given_for_it(head: Eagle3Head, isa: Isa) -> None:
    if not isa.has_dots("eight"):
        pytest.skip("more than 64 rows run layer by layer")
    count, found = MAX_ROWS + 30, []
    assert head.stack.few is not None and head.stack.few.shape.qkv_input_size
    features = torch.randn(count, head.feature_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    for ends in ([count], [MAX_ROWS, count]):
        kv, start, parts = head.new_kv(count), 0, []
        for end in ends:
            places = torch.arange(end)
            batch = ForwardBatch(7 * places[start:], places[start:], [Segment(end - start, places)])
            parts.append(head.forward(batch, features[start:end], kv, TorchAttention())[0])
            start = end
        found.append(torch.cat(parts))
    assert torch.equal(*found)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_step_of_the_shipped_head_finds_what_its_parts_find(head: Eagle3Head, noisy: bool) -> None:
    proposer = HostProposer(3, head.vocab_size, head.target_vocab_size, head.target_ids, scale=head.edge_scale)
    proposer.admit(1, SamplingParams(temperature=0.8 if noisy else 0.0, seed=4))
    generator = torch.Generator().manual_seed(1)
    places, rows, positions = torch.randperm(40, generator=generator), [0, 1, 2], torch.tensor([31, 31, 31])
    seen = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]]).bool()
    steps = [RowSteps(0, torch.tensor([2, 1, 3]), places[:34], seen)]
    batch = StepBatch(torch.tensor([5, 900, 77]), positions, places[:34][-4:][[2, 1, 3]], steps)
    store, results = torch.randn(20, head.feature_size, generator=generator).bfloat16(), []
    for whole in (True, False):
        links, kv = Links(store.clone(), torch.tensor([3, 3, 7]), torch.tensor([10, 11, 12])), head.new_kv(64)
        for cache in (kv.k, kv.v):
            cache[:] = torch.randn(cache.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        if whole:
            ranking = proposer.ranking(rows, 8)
            assert (ranking is None) is noisy, "noise is added by the host"
            found = head.step(batch, links, kv, ranking)
            assert found is not None
        else:
            attention = RegionAttention(kv, [places], 6)
            hidden, left = head.forward(batch, links.features[links.taken], kv, attention)
            assert left is not None
            links.features[links.left] = left
            found = Stepped(head.logits(hidden))
        if found.tokens is None or found.scores is None:
            found = Stepped(found.logits, torch.empty(3, 8, dtype=torch.int32), torch.empty(3, 8))
            proposer(found.logits, torch.tensor(rows), positions, *found[1:])
        results.append((*found, links.features, kv.k, kv.v))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_layers_of_two_kinds_run_layer_by_layer(tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama")
    model.layers[1].attention_norm = None
    mixed = LayerStack(model.layers, model.config, model.rotary)
    assert [layer.few_rows(model.config) is not None for layer in mixed.layers] == [True] * 3
    for layer in mixed.layers:
        layer.finish_loading = lambda: None  # type: ignore[method-assign]
    mixed.finish_loading()
    assert mixed.few is None, "one normed stream, and one that is given"


@pytest.mark.parametrize(("gating", "interleaved"), [(None, False), (SWIGLU, False), (SWIGLU, True)])
def test_experts_give_the_same_and_each_row_the_same_bits_whatever_is_beside_it(
    gating: Gating | None, interleaved: bool
) -> None:
    experts = ExpertLinear(4, 64, [32, 32], True, torch.bfloat16, torch.device("cpu"), None)
    assert experts.bias is not None
    generator = torch.Generator().manual_seed(7)
    for tensor in (experts.weight, experts.bias):
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    weight, rows = experts.weight.clone(), torch.randn(9, 64, generator=generator).bfloat16()
    experts.pack()
    assert len(experts.on_cpu) == 4
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -1], dtype=torch.int32)
    logits = torch.randn(9, 4, generator=generator)
    routes = route(logits, 2, True, slots)
    found = experts(rows, routes, gating, interleaved)
    expected = expert_linear(rows, weight, routes, bias=experts.bias, gating=gating, interleaved=interleaved)
    assert near(found[:-2], expected[:-2])
    alone = experts(rows[3:4], route(logits[3:4], 2, True, slots[:1]), gating, interleaved)
    assert torch.equal(alone, found[6:8])
