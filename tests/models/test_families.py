"""Every dense family computes what transformers does: at once, in chunks, on trees, from a prefix, on both backends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_table import FAMILIES, SIZES
from paged_runs import PagedRun, load_for_kernels
from tiny_models import relative_error, run_one, save_tiny, token_ids
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.decoder import CausalLM
from outrider.models.drafters.config import OUTPUT
from outrider.models.drafters.loader import shared_tensors
from outrider.models.families import FAMILIES as ARCHITECTURES
from outrider.models.loader import load_model

LENGTH = 40


class Made:
    """A checkpoint of a family, as transformers runs it and as we do."""

    def __init__(self, folder: Path, name: str) -> None:
        family, changes = FAMILIES[name]
        self.reference = save_tiny(folder, family, **{**SIZES, **changes})
        self.model: CausalLM = load_model(folder)
        self.for_kernels = load_for_kernels(folder)
        self.ids = token_ids(LENGTH)
        self.expected = self.truth(self.ids)

    @torch.inference_mode()
    def truth(self, ids: Tensor) -> Tensor:
        """Logits by transformers."""
        return self.reference(ids[None]).logits[0]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield Made(tmp_path_factory.mktemp("family"), request.param)


def near(actual: Tensor, expected: Tensor) -> None:
    assert relative_error(actual, expected) <= 1e-4


def test_a_prompt_at_once_and_in_chunks(made: Made) -> None:
    model = made.model
    near(run_one(model, model.new_kv(LENGTH), made.ids, torch.arange(LENGTH)), made.expected)
    kv, parts = model.new_kv(LENGTH), []
    for begin, end in ((0, 7), (7, 30), (30, 31), (31, LENGTH)):
        parts.append(run_one(model, kv, made.ids[begin:end], torch.arange(end)))
    near(torch.cat(parts), made.expected)


def test_trees_behind_a_prefix_on_both_backends(made: Made) -> None:
    """A tree over the prompt's KV: each node's logits are those of its path alone."""
    parents = [-1, 0, 0, 1, 3, 2, 4, 6, 7, 8, 9, 10]
    nodes = token_ids(len(parents), seed=3)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    depths = torch.tensor([len(path) - 1 for path in paths])
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    context = 25
    kv = made.model.new_kv(64)
    run_one(made.model, kv, made.ids[:context], torch.arange(context))
    slots = torch.arange(context + len(paths))
    logits = run_one(made.model, kv, nodes, slots, mask, context + depths)
    for node in (5, 6, 11):
        near(logits[node], made.truth(torch.cat([made.ids[:context], nodes[paths[node]]]))[-1])
    for by_path in (False, True):
        paged = PagedRun(made.for_kernels)
        near(paged.prompt(made.ids[:10], 0), made.expected[:10])
        near(paged.prompt(made.ids[10:context], 10), made.expected[10:context])
        near(paged.tree(nodes, parents, context, by_path), logits)


def test_greedy_text_is_transformers(made: Made) -> None:
    """Behind a prompt for which longrope is long already: transformers changes over when a sequence gets there."""
    prompt = made.ids[:18]
    with torch.inference_mode():
        expected = made.reference.generate(
            prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0]
    kv, text = made.model.new_kv(64), prompt
    logits = run_one(made.model, kv, prompt, torch.arange(18))
    while len(text) < len(expected):
        text = torch.cat((text, logits[-1:].argmax(1)))
        logits = run_one(made.model, kv, text[-1:], torch.arange(len(text)))
    assert text.tolist() == expected.tolist()


def test_features_are_the_residual_stream_entering_each_layer(made: Made) -> None:
    layers = (1, 0, 2)
    batch = ForwardBatch(made.ids, torch.arange(LENGTH), [Segment(LENGTH, torch.arange(LENGTH))])
    kv = made.model.new_kv(LENGTH)
    _, features = made.model.forward_with_features(batch, kv, TorchAttention(), layers)
    with torch.inference_mode():
        expected = made.reference(made.ids[None], output_hidden_states=True).hidden_states
    for layer, feature in zip(layers, features, strict=True):
        # Transformers has the last one behind the final norm.
        if layer < made.model.config.num_layers:
            near(feature, expected[layer][0])


def test_the_page_names_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", page))
    assert named == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "larger"), [("gemma3", "Gemma3"), ("mistral", "Mistral3")])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_larger_model(prefix: str, name: str, larger: str, tmp_path: Path) -> None:
    """Named as the hub does, or as transformers 5 writes it; what is no text is not read."""
    from safetensors.torch import load_file, save_file

    family, changes = FAMILIES[name]
    reference = save_tiny(tmp_path, family, **{**SIZES, **changes})
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.patch.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outside = {"architectures": [f"{larger}ForConditionalGeneration"], "eos_token_id": [1, 2], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**outside, "text_config": {**text, "architectures": None}}))
    model = load_model(tmp_path)
    output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert torch.equal(shared_tensors(tmp_path)[OUTPUT].read(), output)
    ids = token_ids(20)
    with torch.inference_mode():
        near(run_one(model, model.new_kv(20), ids, torch.arange(20)), reference(ids[None]).logits[0])


def test_longrope_follows_the_context_that_is_served(tmp_path: Path) -> None:
    """Short factors where no sequence can be longer than the original context, as transformers has for short ones."""
    family, changes = FAMILIES["phi4-mini"]
    reference = save_tiny(tmp_path, family, **{**SIZES, **changes, "original_max_position_embeddings": 30})
    ids = token_ids(30)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    short = load_model(tmp_path, context_length=30)
    near(run_one(short, short.new_kv(30), ids, torch.arange(30)), expected)
    whole = load_model(tmp_path)
    assert relative_error(run_one(whole, whole.new_kv(30), ids, torch.arange(30)), expected) > 1e-3
