"""EAGLE-3 heads in every layout compute what their papers and the engines that serve them say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load, recompute_chain, run_chain
from safetensors.torch import save_file
from tiny_heads import (
    DRAFT_IDS,
    EAGLE3_FIELDS,
    EPS,
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    Layer,
    Maker,
    Tensors,
    eagle3_tensors,
    rms,
    save_head,
)
from tiny_models import relative_error, save_tiny, token_ids
from torch import Tensor

from draft_service.engine.worker import describe
from outrider.config.draft import DraftOptions
from outrider.drafting.model.drafter import find_mapper
from outrider.drafting.registry import build_drafter
from outrider.errors import ConfigError
from outrider.layers.formats import decode
from outrider.models.drafters import loader
from outrider.models.drafters.base import DraftModel, offered_projection
from outrider.models.quantization import EIGHT_BITS
from outrider.protocol.speculation import PROTOCOL_VERSION, Hello
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import agree, name_projection

STEPS = 4


def inputs(width: int = 3 * HIDDEN, count: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return token_ids(count), torch.randn(count, width, generator=generator)


def whole_of(
    tensors: Tensors, *, embedding: Tensor | None = None, before_residual: bool = False, norm_output: bool = False
) -> Any:
    """The formulas over a whole sequence."""
    embedding = tensors["embed_tokens.weight"] if embedding is None else embedding
    layer = Layer(tensors, "midlayer", head_norms="midlayer.self_attn.q_norm.weight" in tensors)

    def whole(ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = rms(features, tensors["midlayer.hidden_norm.weight"])
        tokens = rms(embedding[ids], tensors["midlayer.input_layernorm.weight"])
        stream = layer(torch.cat((tokens, hidden), 1), hidden if before_residual else features)
        normed = rms(stream, tensors["norm.weight"])
        return normed @ tensors["lm_head.weight"].T, normed if norm_output else stream

    return whole


def check(model: DraftModel, whole: Any, projected: Tensor, ids: Tensor, raw: Tensor) -> None:
    own = model.project(raw)
    assert relative_error(own, projected) <= 1e-5
    logits, guesses = run_chain(model, ids, own, STEPS)
    assert len(set(guesses)) > 1  # a chain of one token would prove little
    assert relative_error(logits, recompute_chain(whole, ids, projected, guesses)) <= 1e-5


def test_a_chain_computes_the_formulas(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    save_head(tmp_path, EAGLE3_FIELDS, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    assert model.feature_layers == (1, 2, 3)
    assert (model.hidden_size, model.feature_size, model.num_layers) == (HIDDEN, HIDDEN, 1)
    assert (model.vocab_size, model.target_vocab_size, model.max_positions) == (len(DRAFT_IDS), VOCAB, 128)
    assert model.target_ids is not None and model.target_ids.tolist() == DRAFT_IDS
    assert model.target_ids.dtype == torch.int32
    assert model.token_ids_hash == ""
    ids, raw = inputs()
    check(model, whole_of(tensors), raw @ tensors["fc.weight"].T, ids, raw)


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_names_of_other_engines_are_the_same_head(prefix: str, tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    save_head(tmp_path / "a", EAGLE3_FIELDS, tensors)
    other = {prefix + name: tensor for name, tensor in renamed(tensors, "midlayer.", "layers.0.").items()}
    save_head(tmp_path / "b", {**EAGLE3_FIELDS, "architectures": ["Eagle3LlamaForCausalLM"]}, other)
    ids, raw = inputs()
    found = []
    for name in "ab":
        model = load("EAGLE3", speculative_draft_model_path=str(tmp_path / name))
        found.append(run_chain(model, ids, model.project(raw), STEPS)[0])
    assert torch.equal(*found)


def test_biases_and_head_norms_are_told_by_their_tensors(tmp_path: Path) -> None:
    make = Maker(5)
    tensors = eagle3_tensors(bias=True) | {
        "fc.bias": make.matrix(HIDDEN),
        "midlayer.self_attn.o_proj.bias": make.matrix(HIDDEN),
        "midlayer.self_attn.q_norm.weight": make.norm(HEAD_DIM),
        "midlayer.self_attn.k_norm.weight": make.norm(HEAD_DIM),
    }
    save_head(tmp_path, {**EAGLE3_FIELDS, "architectures": ["Qwen3ForCausalLMEagle3"], "head_dim": HEAD_DIM}, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    ids, raw = inputs()
    check(model, whole_of(tensors), raw @ tensors["fc.weight"].T + tensors["fc.bias"], ids, raw)


@pytest.mark.parametrize("where", ["top", "eagle_config", "speculators"])
def test_residual_and_output_may_be_normed(where: str, tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    flags = {"norm_before_residual": True, "norm_output": True}
    fields: dict[str, Any] = {**EAGLE3_FIELDS}
    if where == "top":
        fields |= flags
    elif where == "eagle_config":
        fields["eagle_config"] = {**EAGLE3_FIELDS["eagle_config"], **flags}
    else:
        inner = {name: value for name, value in EAGLE3_FIELDS.items() if name not in ("eagle_config", "architectures")}
        fields = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": inner,
            "draft_vocab_size": len(DRAFT_IDS),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "target_hidden_size": None,
            "norm_output": True,
        }
    save_head(tmp_path, fields, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    assert model.feature_layers == (1, 2, 3)
    ids, raw = inputs()
    whole = whole_of(tensors, before_residual=True, norm_output=True)
    check(model, whole, raw @ tensors["fc.weight"].T, ids, raw)


@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc"])
def test_features_may_be_normed_before_fc(flag: str, tmp_path: Path) -> None:
    tensors, make = eagle3_tensors(), Maker(6)
    ids, raw = inputs()
    if flag == "fc_norm":
        norms = [make.norm(HIDDEN) for _ in range(3)]
        tensors |= {f"fc_norm.{number}.weight": norm for number, norm in enumerate(norms)}
        normed = torch.cat([rms(part, norm) for part, norm in zip(raw.chunk(3, 1), norms, strict=True)], 1)
    else:
        tensors["input_norm.weight"] = make.norm(3 * HIDDEN)
        normed = rms(raw, tensors["input_norm.weight"])
    save_head(tmp_path, {**EAGLE3_FIELDS, flag: True}, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    check(model, whole_of(tensors), normed @ tensors["fc.weight"].T, ids, raw)


def test_more_layers_follow_as_in_any_decoder(tmp_path: Path) -> None:
    tensors, make = eagle3_tensors(), Maker(8)
    tensors |= make.layer("layers.1", HIDDEN) | {"layers.1.input_layernorm.weight": make.norm(HIDDEN)}
    tensors["layers.1.hidden_norm.weight"] = make.norm(HIDDEN)  # some files hold it, unused
    save_head(tmp_path, {**EAGLE3_FIELDS, "num_hidden_layers": 2}, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    assert model.num_layers == 2
    first, second = Layer(tensors, "midlayer"), Layer(tensors, "layers.1")

    def whole(ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = rms(features, tensors["midlayer.hidden_norm.weight"])
        tokens = rms(tensors["embed_tokens.weight"][ids], tensors["midlayer.input_layernorm.weight"])
        stream = first(torch.cat((tokens, hidden), 1), features)
        stream = second(rms(stream, tensors["layers.1.input_layernorm.weight"]), stream)
        return rms(stream, tensors["norm.weight"]) @ tensors["lm_head.weight"].T, stream

    ids, raw = inputs()
    check(model, whole, raw @ tensors["fc.weight"].T, ids, raw)


def test_a_target_of_another_width(tmp_path: Path) -> None:
    tensors = eagle3_tensors(target_hidden=40)
    save_head(tmp_path, {**EAGLE3_FIELDS, "target_hidden_size": 40}, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    assert (model.hidden_size, model.feature_size) == (40, HIDDEN)
    ids, raw = inputs(3 * 40)
    check(model, whole_of(tensors), raw @ tensors["fc.weight"].T, ids, raw)


def test_what_the_head_lacks_is_the_targets(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "target")
    tensors = eagle3_tensors()
    embedding = tensors.pop("embed_tokens.weight")
    for name in ("lm_head.weight", "d2t", "t2d"):
        tensors.pop(name)
    fields = {name: value for name, value in EAGLE3_FIELDS.items() if name != "draft_vocab_size"}
    save_head(tmp_path / "head", fields, tensors)
    head, target = str(tmp_path / "head"), str(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"no embed_tokens.weight and no lm_head.weight .*--target-model-path"):
        load("EAGLE3", speculative_draft_model_path=head)
    model = load("EAGLE3", speculative_draft_model_path=head, target_model_path=target)
    assert (model.vocab_size, model.target_ids) == (VOCAB, None)
    embedding = reference.model.embed_tokens.weight.detach()
    full = tensors | {"lm_head.weight": reference.lm_head.weight.detach()}
    ids, raw = inputs()
    check(model, whole_of(full, embedding=embedding), raw @ tensors["fc.weight"].T, ids, raw)


def test_a_tied_targets_embedding_is_its_output_matrix(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "target", tie_word_embeddings=True)
    tensors = {name: tensor for name, tensor in eagle3_tensors().items() if name not in ("lm_head.weight", "d2t")}
    save_head(tmp_path / "head", {**EAGLE3_FIELDS, "draft_vocab_size": VOCAB}, tensors)
    model = load(
        "EAGLE3", speculative_draft_model_path=str(tmp_path / "head"), target_model_path=str(tmp_path / "target")
    )
    full = tensors | {"lm_head.weight": reference.model.embed_tokens.weight.detach()}
    ids, raw = inputs()
    check(model, whole_of(full), raw @ tensors["fc.weight"].T, ids, raw)


def test_default_feature_layers_follow_the_targets_depth(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", num_hidden_layers=12)
    fields = {name: value for name, value in EAGLE3_FIELDS.items() if name != "eagle_config"}
    save_head(tmp_path / "head", fields, eagle3_tensors())
    with pytest.raises(ConfigError, match="--target-model-path"):
        load("EAGLE3", speculative_draft_model_path=str(tmp_path / "head"))
    model = load(
        "EAGLE3", speculative_draft_model_path=str(tmp_path / "head"), target_model_path=str(tmp_path / "target")
    )
    assert model.feature_layers == (2, 6, 9)


def test_a_head_without_aux_layers_takes_the_last_hidden_state(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    tensors = eagle3_tensors()
    tensors.pop("fc.weight")
    save_head(tmp_path / "head", {**EAGLE3_FIELDS, "eagle_config": {"use_aux_hidden_state": False}}, tensors)
    model = load(
        "EAGLE3", speculative_draft_model_path=str(tmp_path / "head"), target_model_path=str(tmp_path / "target")
    )
    assert model.feature_layers == (4,)  # three layers, and the final norm
    ids, raw = inputs(HIDDEN)
    check(model, whole_of(tensors), raw, ids, raw)


def test_fc_may_be_done_elsewhere(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    tensors["fc.bias"] = torch.randn(HIDDEN)
    save_head(tmp_path, EAGLE3_FIELDS, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    _, raw = inputs()
    offered = offered_projection(model)
    assert offered is not None and offered.layers == model.feature_layers
    matrix = torch.frombuffer(bytearray(offered.data), dtype=torch.float32).view(offered.num_columns, -1)
    assert torch.equal(matrix, tensors["fc.weight"])
    assert offered.name == name_projection(offered.layers, HIDDEN, "float32", matrix.numpy().tobytes())
    assert relative_error(model.finish_product(raw @ matrix.T), model.project(raw)) <= 1e-5


def test_the_service_offers_it_in_its_hello(tmp_path: Path) -> None:
    save_head(tmp_path, EAGLE3_FIELDS, eagle3_tensors())
    options = DraftOptions(
        speculative_algorithm=("EAGLE3",), speculative_draft_model_path=str(tmp_path), device="cpu", max_positions=64
    )
    drafter = build_drafter(options)
    hello = describe(drafter, options).hello
    projection = drafter.needs.projection
    assert projection is not None
    assert (hello.projection_columns, hello.projection_hash) == (HIDDEN, projection.name)
    target = Hello(PROTOCOL_VERSION, NOISE_VERSION, vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=4)
    assert agree(target, hello).projection_hash == projection.name
    assert find_mapper(drafter) is None, "a CPU maps no device memory"


@pytest.mark.parametrize("changes", [{"norm_before_fc": True}, {"fc_norm": True}, {"one layer": True}])
def test_what_is_not_linear_or_makes_nothing_smaller_is_not_offered(changes: dict[str, bool], tmp_path: Path) -> None:
    tensors = eagle3_tensors(num_features=1 if "one layer" in changes else 3)
    fields = {**EAGLE3_FIELDS, **changes}
    if "norm_before_fc" in changes:
        tensors["input_norm.weight"] = torch.ones(3 * HIDDEN)
    if "fc_norm" in changes:
        tensors |= {f"fc_norm.{number}.weight": torch.ones(HIDDEN) for number in range(3)}
    if "one layer" in changes:
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1], "use_aux_hidden_state": True}
    save_head(tmp_path, fields, tensors)
    assert offered_projection(load("EAGLE3", speculative_draft_model_path=str(tmp_path))) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_formats_stay_close(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    save_head(tmp_path, EAGLE3_FIELDS, tensors)
    model = load("EAGLE3", dtype, speculative_draft_model_path=str(tmp_path))
    ids, raw = inputs()
    features = model.project(raw)
    assert features.dtype == dtype
    logits, guesses = run_chain(model, ids, features, STEPS)
    expected = recompute_chain(whole_of(tensors), ids, raw @ tensors["fc.weight"].T, guesses)
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < 0.1


@pytest.mark.parametrize(
    ("fields", "tensors", "problem"),
    [
        ({}, {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, r"fc.weight has shape \[32, 64\].*\[32, 96\]"),
        (
            {},
            {"midlayer.self_attn.q_proj.weight": torch.zeros(32, 32)},
            r"midlayer.self_attn.q_proj.weight .*\[32, 64\]",
        ),
        ({}, {"norm.weight": None}, "norm.weight missing"),
        ({}, {"d2t": None}, "d2t missing .* vocabulary of 50 is not the target's of 97"),
        ({}, {"d2t": torch.zeros(50)}, "d2t is torch.float32"),
        ({}, {"d2t": torch.zeros(49, dtype=torch.int64)}, r"d2t is torch.int64 \[49\]"),
        ({}, {"d2t": torch.full((50,), 60)}, "d2t leads outside the vocabulary of 97"),
        ({}, {"d2t": -torch.arange(50)}, "one token from two draft ids"),
        ({}, {"extra.weight": torch.zeros(1)}, "unexpected tensor extra.weight; the draft's config.json does not call"),
        ({"hidden_size": None}, {}, "hidden_size is missing"),
        ({"draft_vocab_size": 98}, {}, "draft_vocab_size 98 is above vocab_size 97"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, "exclude each other"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["x"]}}, {}, "must be layer numbers"),
        ({"eagle_config": 3}, {}, "eagle_config must be an object"),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
    ],
)
def test_what_does_not_fit_is_named(
    fields: dict[str, Any], tensors: dict[str, Tensor | None], problem: str, tmp_path: Path
) -> None:
    changed = {name: tensor for name, tensor in (eagle3_tensors() | tensors).items() if tensor is not None}
    save_head(tmp_path, {**EAGLE3_FIELDS, **fields}, changed)
    with pytest.raises(ConfigError, match=problem):
        load("EAGLE3", speculative_draft_model_path=str(tmp_path))


def test_a_target_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "wide", hidden_size=40)
    save_tiny(tmp_path / "shallow", num_hidden_layers=2)
    save_tiny(tmp_path / "other", vocab_size=101)
    tensors = eagle3_tensors()
    tensors.pop("embed_tokens.weight")
    save_head(tmp_path / "head", EAGLE3_FIELDS, tensors)
    for target, problem in (
        ("wide", "hidden size 32, the target's is 40"),
        ("shallow", "beyond the target's 2 layers"),
        ("other", r"other.*model.embed_tokens.weight has shape \[101, 32\], .* calls for \[97, 32\]"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load(
                "EAGLE3",
                speculative_draft_model_path=str(tmp_path / "head"),
                target_model_path=str(tmp_path / target),
            )


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    save_head(tmp_path, EAGLE3_FIELDS, eagle3_tensors())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="outrider convert"):
        load("EAGLE3", speculative_draft_model_path=str(tmp_path))


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()
    save_head(tmp_path, EAGLE3_FIELDS, tensors)
    with pytest.raises(ConfigError, match="there twice"):
        load("EAGLE3", speculative_draft_model_path=str(tmp_path))


def test_a_token_map_cuts_a_reduced_vocabulary_further(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    save_head(tmp_path / "head", EAGLE3_FIELDS, tensors)
    head = str(tmp_path / "head")
    save_file({"ids": torch.tensor([DRAFT_IDS[7], 1, DRAFT_IDS[3], DRAFT_IDS[3]])}, tmp_path / "map.safetensors")
    model = load("EAGLE3", speculative_draft_model_path=head, speculative_token_map=str(tmp_path / "map.safetensors"))
    assert model.target_ids is not None
    assert model.target_ids.tolist() == [DRAFT_IDS[3], DRAFT_IDS[7]]
    full = load("EAGLE3", speculative_draft_model_path=head)
    rows = torch.randn(3, HIDDEN)
    assert relative_error(model.logits(rows), full.logits(rows)[:, [3, 7]]) <= 1e-6
    (tmp_path / "none.json").write_text("[1, 4]")  # in the target's vocabulary, not in the head's
    with pytest.raises(ConfigError, match="none of its tokens"):
        load("EAGLE3", speculative_draft_model_path=head, speculative_token_map=str(tmp_path / "none.json"))


def test_on_a_cpu_a_head_guesses_the_tokens_that_its_folder_lists(tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    (tmp_path / "head" / "frequent_tokens.json").write_text(f"[{DRAFT_IDS[5]}, {DRAFT_IDS[2]}]")
    head = str(tmp_path / "head")
    listed = load("EAGLE3", speculative_draft_model_path=head).target_ids
    assert listed is not None and listed.tolist() == [DRAFT_IDS[2], DRAFT_IDS[5]]
    (tmp_path / "map.json").write_text(f"[{DRAFT_IDS[0]}]")
    mapped = load("EAGLE3", speculative_draft_model_path=head, speculative_token_map=str(tmp_path / "map.json"))
    assert mapped.target_ids is not None and mapped.target_ids.tolist() == [DRAFT_IDS[0]], "a map that is named"


def test_a_head_in_eight_bits_is_one_of_rounded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = eagle3_tensors()
    save_head(tmp_path / "head", EAGLE3_FIELDS, tensors)
    rounded = {
        name: decode(EIGHT_BITS, {"weight": tensor.bfloat16()}).dequantized(torch.float32)
        if "_proj." in name or name == "lm_head.weight"
        else tensor
        for name, tensor in tensors.items()
    }
    save_head(tmp_path / "rounded", EAGLE3_FIELDS, rounded)
    monkeypatch.setattr(loader, "fits", lambda _: False)  # what a CPU rounds
    expected = load("EAGLE3", speculative_draft_model_path=str(tmp_path / "rounded"))
    plain = load("EAGLE3", speculative_draft_model_path=str(tmp_path / "head"))
    monkeypatch.setattr(loader, "_reads_less_in_eight_bits", lambda *_: True)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path / "head"))
    ids, raw = inputs()
    logits, _ = run_chain(model, ids, model.project(raw), 1)
    assert relative_error(logits, run_chain(expected, ids, expected.project(raw), 1)[0]) <= 1e-6
    assert relative_error(logits, run_chain(plain, ids, plain.project(raw), 1)[0]) > 1e-3


def test_epsilon_is_the_heads_own(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    save_head(tmp_path, {**EAGLE3_FIELDS, "rms_norm_eps": 0.5}, tensors)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path))
    ids, raw = inputs()
    logits, guesses = run_chain(model, ids, model.project(raw), 1)
    expected = recompute_chain(whole_of(tensors), ids, raw @ tensors["fc.weight"].T, guesses)
    assert EPS != 0.5 and relative_error(logits, expected) > 1e-2
