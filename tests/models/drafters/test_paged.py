"""Heads on pages, as the services run them, against the same heads on plain segments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tiny_models import token_ids
from torch import Tensor

from kernels.launch import triton_on_cpu
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.paged import PagedBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.models.config import ModelConfig
from outrider.models.drafters.base import DraftHead
from outrider.models.drafters.config import HeadConfig
from outrider.models.drafters.heads import Eagle3Head, EagleHead, MtpHead
from outrider.models.quantization import HEAD_IN_EIGHT_BITS

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")

HIDDEN, PAGE, CONTEXT = 256, 16, 40
PARENTS = [-1, 0, 1, 1, 0, 4, 2, 6, 7, 0, 5]
"""A tree of 11 tokens below a prompt."""

DECODER = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": HIDDEN,
    "intermediate_size": 448,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass
class Case:
    build: type[DraftHead]
    config: HeadConfig

    def head(self, dtype: torch.dtype, device: str) -> DraftHead:
        head = self.build(self.config, dtype, torch.device(device))
        generator = torch.Generator().manual_seed(3)
        with torch.inference_mode():
            for name, tensor in sorted(head.checkpoint_tensors().items()):
                spread = 0.1 if name.endswith("norm.weight") else 0.06
                values = torch.randn(tensor.shape, generator=generator) * spread
                tensor.copy_(values + 1 if name.endswith("norm.weight") else values)
            head.finish_loading()
        return head


def config(**changes: object) -> HeadConfig:
    decoder = ModelConfig.from_fields(DECODER, {})
    fields = {"draft_vocab_size": 320, "target_hidden_size": HIDDEN, "feature_layers": (1, 2, 3), **changes}
    return HeadConfig(**{"decoder": decoder, **fields})  # type: ignore[arg-type]


def decoder_in_eight_bits() -> ModelConfig:
    return replace(ModelConfig.from_fields(DECODER, {}), quantization=HEAD_IN_EIGHT_BITS)


CASES = {
    "eagle3": Case(Eagle3Head, config()),
    "eagle3.1": Case(Eagle3Head, config(norm_each=True, norm_before_residual=True, norm_output=True)),
    "eagle3 joint norm": Case(Eagle3Head, config(norm_all=True, fc_bias=True)),
    "eagle3 in eight bits": Case(Eagle3Head, config(decoder=decoder_in_eight_bits())),
    "eagle": Case(EagleHead, config(feature_layers=(5,), fc_bias=True)),
    "mtp": Case(MtpHead, config(feature_layers=(5,))),
}


def tree_of(parents: list[int]) -> tuple[list[int], Tensor]:
    """Depths, and who sees whom, bool [n, n]."""
    seen, depths = torch.eye(len(parents), dtype=torch.bool), []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            seen[node] |= seen[parent]
    return depths, seen


@torch.inference_mode()
def on_segments(head: DraftHead, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and children's features of a prompt's last token and of the tree's."""
    count = CONTEXT + len(PARENTS)
    ids, features = token_ids(count, 320), head.project(raw)
    depths, seen = tree_of(PARENTS)
    kv, slots = head.new_kv(count), torch.arange(count)
    prompt = ForwardBatch(ids[:CONTEXT], slots[:CONTEXT], [Segment(CONTEXT, slots[:CONTEXT])])
    first, own = head.forward(prompt, features[:CONTEXT], kv, TorchAttention())
    tree = ForwardBatch(ids[CONTEXT:], CONTEXT + torch.tensor(depths), [Segment(len(PARENTS), slots, seen)])
    rows, tree_own = head.forward(tree, features[CONTEXT:], kv, TorchAttention())
    assert own is not None and tree_own is not None
    return head.logits(torch.cat((first[-1:], rows))), torch.cat((own[-1:], tree_own))


@torch.inference_mode()
def on_pages(head: DraftHead, raw: Tensor) -> tuple[Tensor, Tensor]:
    count, device = CONTEXT + len(PARENTS), head.device
    ids = token_ids(count, 320).to(device, torch.int32)
    features = head.project(raw.to(device))
    pages = torch.tensor([[3, 0, 2, 1]], dtype=torch.int32, device=device)
    slots = (pages.T * PAGE + torch.arange(PAGE, device=device)).flatten().to(torch.int32)
    depths, seen = tree_of(PARENTS)
    bits = (seen.long() << torch.arange(len(PARENTS))).sum(1, keepdim=True).to(device, torch.int32)
    kv, attention = head.new_kv(4 * PAGE), TritonAttention()

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def batch(start: int, end: int, positions: list[int], mask: Tensor | None) -> PagedBatch:
        return PagedBatch(
            token_ids=ids[start:end],
            positions=ints(*positions),
            first=ints(0, end - start),
            cached_len=ints(start),
            table_rows=ints(0),
            page_tables=pages,
            slots=slots[start:end],
            page_size=PAGE,
            max_row_tokens=end - start,
            mask=mask,
        )

    prompt = batch(0, CONTEXT, list(range(CONTEXT)), None)
    first, own = head.forward(prompt, features[:CONTEXT], kv, attention)
    tree = batch(CONTEXT, count, [CONTEXT + depth for depth in depths], bits)
    rows, tree_own = head.forward(tree, features[CONTEXT:], kv, attention)
    assert own is not None and tree_own is not None
    return head.logits(torch.cat((first[-1:], rows))).cpu(), torch.cat((own[-1:], tree_own)).float().cpu()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        pytest.param("interpreter", torch.float32, 1e-5, marks=NO_GPU),
        pytest.param("cuda", torch.float32, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 3e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 5e-3, marks=pytest.mark.gpu),
    ],
)
def test_pages_are_segments(name: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    case = CASES[name]
    width = len(case.config.feature_layers) * HIDDEN
    raw = torch.randn(CONTEXT + len(PARENTS), width, generator=torch.Generator().manual_seed(5))
    expected = on_segments(case.head(torch.float32, "cpu"), raw)
    if device == "interpreter":
        import interpreter  # noqa: F401

        with triton_on_cpu():
            found = on_pages(case.head(dtype, "cpu"), raw)
    else:
        found = on_pages(case.head(dtype, device), raw)
    for actual, truth in zip(found, expected, strict=True):
        error = float((actual - truth).norm() / truth.norm())
        assert error <= tolerance, f"{name} on {device} in {dtype}: relative error {error:.2g}"
