"""The launches of a small model's layers one behind the other: each begins before the one in front of it ends."""

from __future__ import annotations

import pytest
import torch
from test_branches import make_step
from torch import Tensor

from kernels.attention import branch_attention
from kernels.compiling import share_l1
from kernels.linear import norm_linear, norm_qkv

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS, DIM, MLP, EPS = 6, 9, 3, 64, 1536, 1e-5
HIDDEN = HEADS * DIM


class Layers:
    """Of SmolLM2-135M's shape, bfloat16, over a step of nodes that see each other and others."""

    def __init__(self, count: int, context: int) -> None:
        made = make_step(
            [count], [context], [96], device="cuda", heads=(HEADS, KV_HEADS, DIM), dtype=torch.bfloat16, region=128,
            page_size=16,
        )  # fmt: skip
        nodes = torch.arange(count, device="cuda")
        # Node i lies in tree slot i, and sees itself.
        made.mask[nodes, nodes // 32] |= (1 << (nodes % 32)).int()
        logical = made.base + nodes
        table = made.page_tables[int(made.table_rows[0])].long()
        self.slots = (table[logical // 16] * 16 + logical % 16).int()
        self.made, self.count = made, count
        self.caches = [(torch.randn_like(made.k), torch.randn_like(made.k)) for _ in range(LAYERS)]

        def weights(*size: int) -> list[Tensor]:
            return [torch.randn(*size, device="cuda").div(size[1] ** 0.5).bfloat16() for _ in range(LAYERS)]

        self.qkv, self.out = weights((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), weights(HIDDEN, HIDDEN)
        self.gate_up, self.down = weights(2 * MLP, HIDDEN), weights(HIDDEN, MLP)
        self.norm = torch.ones(HIDDEN, device="cuda").bfloat16()
        self.angles = torch.rand(2, count, DIM // 2, device="cuda")
        self.start = torch.randn(count, HIDDEN, device="cuda").bfloat16()

    def run(self, short: bool) -> Tensor:
        """All layers."""
        tables, rows, first, cached = self.made.lengths
        branches = self.made.branches()
        shape = {"page_size": 16, "max_row_tokens": self.count, "num_splits": 8, "scale": DIM**-0.5}
        stream = self.start.clone()
        for layer, (k, v) in enumerate(self.caches):
            q = norm_qkv(stream, self.qkv[layer], *self.angles, self.slots, k, v, HEADS, norm=self.norm, eps=EPS)
            seen = branch_attention(q, k, v, tables, rows, first, cached, branches, short=short, **shape)  # type: ignore[arg-type]
            stream = norm_linear(seen, self.out[layer], residual=stream)
            gated = norm_linear(stream, self.gate_up[layer], norm=self.norm, eps=EPS, gated=True)
            stream = norm_linear(gated, self.down[layer], residual=stream)
        return stream


@pytest.mark.parametrize("count", [8, 32, 64])
@pytest.mark.parametrize("context", [0, 250, 900])
def test_replays_agree_with_each_other_and_with_two_launches(count: int, context: int) -> None:
    share_l1()
    torch.manual_seed(count)
    layers = Layers(count, context)
    expected = layers.run(short=False).float()
    layers.run(short=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layers.run(short=True)
    graph.replay()
    first = result.clone()
    # Rounding of another order of sums, through all layers.
    assert (first.float() - expected).abs().max() < 0.05 * expected.abs().max()
    for _ in range(100):
        result.zero_()
        for _, v in layers.caches:
            v[layers.slots.long()] = 100.0
        graph.replay()
        assert torch.equal(result, first)
