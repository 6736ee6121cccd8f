"""Dense families on the GPU: Triton's kernels against transformers, graphs, and drafts in deterministic mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from cuda_harness import small_model
from deterministic_drafts import Start, check_drafts_change_nothing
from family_table import FAMILIES, KINDS, LOCAL_AND_GLOBAL, SIZES
from paged_runs import PagedRun
from tiny_models import relative_error, save_tiny, token_ids

from outrider.models.loader import load_decoder

pytestmark = pytest.mark.gpu

PARENTS = [-1, 0, 0, 1, 3, 2, 4, 6, 7, 8, 9, 10]
PATH = [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]
CONTEXT = 25


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_trees_and_graphs_equal_transformers(name: str, tmp_path: Path) -> None:
    """In float32 within its rounding, in bfloat16 within that of its weights."""
    family, changes = FAMILIES[name]
    if not hasattr(transformers.GptOssConfig(), "swiglu_limit"):
        # Older ones clamp at 7, as published checkpoints want, whatever the configuration says.
        changes = {**changes, "swiglu_limit": 7.0}
    reference = save_tiny(tmp_path, family, **{**SIZES, **changes}).cuda()
    ids, nodes = token_ids(40).cuda(), token_ids(len(PARENTS), seed=3).cuda()
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        expected_leaf = reference(torch.cat([ids[:CONTEXT], nodes[PATH]])[None]).logits[0, -1]
    # In bfloat16 a token near a tie goes to another expert, which is no rounding.
    has_experts = any("experts" in key for key in changes)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, torch.inf if has_experts else 0.12)):
        run = PagedRun(load_decoder(tmp_path, dtype, "cuda"))
        assert relative_error(run.prompt(ids[:10], 0), expected[:10]) <= limit
        assert relative_error(run.prompt(ids[10:CONTEXT], 10), expected[10:CONTEXT]) <= limit
        for by_path in (False, True):
            eager = run.tree(nodes, PARENTS, CONTEXT, by_path)
            assert relative_error(eager[PATH[-1]], expected_leaf) <= limit
            captured = run.captured_tree(nodes, PARENTS, CONTEXT, by_path)
            assert torch.equal(captured, eager)


ENGINES = {
    "Mistral": {"sliding_window": 9},
    "Gemma2": {"sliding_window": 9, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "Gemma3Text": {"sliding_window": 9, "layer_types": KINDS[:2], "rope_parameters": LOCAL_AND_GLOBAL},
    "Olmo2": {},
}


@pytest.mark.parametrize("family", ENGINES)
def test_deterministic_answers_are_those_without_drafts(tmp_path: Path, start: Start, family: str) -> None:
    model = small_model(tmp_path, family, 64, torch.bfloat16, "cuda", pad_token_id=0, **ENGINES[family])
    check_drafts_change_nothing(start, model)
