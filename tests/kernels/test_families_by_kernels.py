"""Families with rules of their own, through whole forwards by Triton's kernels, against transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Tiny models are described with the layer above.
sys.path.append(str(Path(__file__).parent.parent / "models"))

from family_table import FAMILIES, SIZES
from paged_runs import PagedRun, load_for_kernels
from tiny_models import relative_error, save_tiny, token_ids

from outrider.models.loader import load_model

PARENTS = [-1, 0, 0, 1, 3, 2, 4, 6, 7, 8, 9, 10]
PATH = [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]
CONTEXT = 25


@pytest.mark.parametrize(("name", "by_path"), [("gemma2", False), ("gpt-oss", True)])
def test_a_prompt_and_a_tree_equal_transformers(name: str, by_path: bool, tmp_path: Path, device: str) -> None:
    family, changes = FAMILIES[name]
    reference = save_tiny(tmp_path, family, **{**SIZES, **changes})
    ids, nodes = token_ids(CONTEXT), token_ids(len(PARENTS), seed=3)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        leaf = reference(torch.cat([ids, nodes[PATH]])[None]).logits[0, -1]
    run = PagedRun(load_for_kernels(tmp_path, device))
    assert relative_error(run.prompt(ids, 0).cpu(), expected) <= 1e-4
    logits = run.tree(nodes, PARENTS, CONTEXT, by_path).cpu()
    assert relative_error(logits[PATH[-1]], leaf) <= 1e-4


def test_norms_over_all_heads_of_fused_products_equal_transformers(tmp_path: Path, device: str) -> None:
    """Their rows are columns of wider ones where our modules take the place of a family's own."""
    reference = save_tiny(tmp_path, "Olmo3", **SIZES)
    ids = token_ids(12)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    run = PagedRun(load_model(tmp_path, torch.float32, device, impl="transformers"))
    assert relative_error(run.prompt(ids, 0).cpu(), expected) <= 1e-4
