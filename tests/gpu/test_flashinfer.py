"""FlashInfer against our own kernels, on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_harness import make_paged_engine
from paged_request import PAGE_SIZE, PagedRequest, ints
from torch import Tensor

from outrider.attention.base import HostLengths
from outrider.attention.flashinfer_backend import FlashInferAttention, FlashInferShape
from outrider.attention.paged import PagedBatch, RoundTokens, TreeBuffers
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import KVCache
from outrider.layers.rotary import Rotary
from outrider.models.decoder import CausalLM
from outrider.models.parts import RopeConfig

pytestmark = pytest.mark.gpu
pytest.importorskip("flashinfer")

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, MAX_LEN = 8, 2, 4096


def shape(head_dim: int) -> FlashInferShape:
    return FlashInferShape(HEADS, KV_HEADS, head_dim, PAGE_SIZE, torch.bfloat16)


class Rounds:
    """Random trees of the same shape in the same memory, for a graph to be replayed on."""

    def __init__(self, num_tokens: int, num_rows: int, head_dim: int) -> None:
        self.num_tokens, self.num_rows = num_tokens, num_rows
        max_pages = MAX_LEN // PAGE_SIZE
        self.kv = KVCache(1, num_rows * MAX_LEN, KV_HEADS, head_dim, torch.bfloat16, DEVICE)
        self.kv.k.normal_()
        self.kv.v.normal_()
        heads = (num_tokens, HEADS + 2 * KV_HEADS, head_dim)
        self.heads = torch.randn(heads, device=DEVICE, dtype=torch.bfloat16)
        self.tables = torch.randperm(num_rows * max_pages, device=DEVICE).view(num_rows, max_pages).to(torch.int32)
        self.rotary = Rotary(RopeConfig(), head_dim, DEVICE)
        self._buffers = TreeBuffers(num_tokens, 64, DEVICE)
        sizes = {"first": num_rows + 1, "cached_len": num_rows, "root": num_rows, "table_rows": num_rows}
        names = RoundTokens.__slots__
        self._tokens = RoundTokens(**{name: ints([0] * sizes.get(name, num_tokens)) for name in names})

    def fill(self, own: list[int], cached: list[int]) -> HostLengths:
        """Describe a round in device memory; its lengths for the host."""
        padding_rows, padding = self.num_rows - len(own), self.num_tokens - sum(own)
        generator = torch.Generator().manual_seed(sum(own))
        first, parents, positions = [0], [], []
        for row, count in enumerate(own):
            for i in range(count):
                parent = int(torch.randint(max(i - 4, 0), i, (), generator=generator)) + first[-1] if i else -1
                parents.append(parent)
                positions.append(positions[parent] + 1 if i else cached[row])
            first.append(first[-1] + count)
        first += first[-1:] * padding_rows
        rows = [row for row, count in enumerate(own) for _ in range(count)] + [-1] * padding
        lengths = {
            "first": first,
            "cached_len": cached + [0] * padding_rows,
            "table_rows": list(range(self.num_rows)),
            "parents": parents + [-1] * padding,
            "positions": positions + [0] * padding,
            "rows": rows,
        }
        for name, values in lengths.items():
            getattr(self._tokens, name).copy_(ints(values))
        return HostLengths(np.array(first, np.int32), np.array(lengths["cached_len"], np.int32))

    def batch(self) -> PagedBatch:
        return self._buffers.batch(self._tokens, self.tables, PAGE_SIZE, self.num_tokens, 4, by_path=False)


def check_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
@torch.inference_mode()
def test_one_captured_round_serves_all_lengths_of_its_shape(head_dim: int) -> None:
    rounds = Rounds(32, 4, head_dim)
    flashinfer, triton = FlashInferAttention(shape(head_dim), DEVICE), TritonAttention()

    def body() -> Tensor:
        return flashinfer.plan(rounds.batch(), rounds.kv, HEADS, rounds.rotary).attend(0, rounds.heads, None)

    flashinfer.prepare(32, rounds.fill([], []), rounds.tables)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = body()
    lengths = ([20, 1, 7], [1000, 0, 3]), ([32], [4000]), ([1, 1, 1, 1], [5, 64, 900, 2048]), ([3, 29], [0, 17])
    for own, cached in lengths:
        flashinfer.prepare(32, rounds.fill(own, cached), rounds.tables)
        graph.replay()
        expected = triton.plan(rounds.batch(), rounds.kv, HEADS, rounds.rotary).attend(0, rounds.heads, None)
        check_close(captured[: sum(own)], expected[: sum(own)])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("padding", [0, 11])
@torch.inference_mode()
def test_prompts(head_dim: int, padding: int) -> None:
    rounds = Rounds(1, 4, head_dim)
    own, cached = [300, 1, 77], [40, 1000, 0]
    first = np.cumsum([0, *own]).astype(np.int32)
    positions = [cached[row] + i for row, count in enumerate(own) for i in range(count)]
    owner = torch.tensor([row for row, count in enumerate(own) for _ in range(count)], device=DEVICE)
    place = torch.tensor(positions, device=DEVICE)
    slots = rounds.tables[owner, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
    unused = torch.full((padding,), -1, dtype=torch.int32, device=DEVICE)
    size = sum(own) + padding
    batch = PagedBatch(
        token_ids=ints([0] * size),
        positions=ints(positions + [0] * padding),
        first=torch.from_numpy(first).cuda(),
        cached_len=ints(cached),
        table_rows=ints([0, 1, 2]),
        page_tables=rounds.tables,
        slots=torch.cat([slots.to(torch.int32), unused]),
        page_size=PAGE_SIZE,
        max_row_tokens=max(own),
        lengths=HostLengths(first, np.array(cached, np.int32)),
    )
    heads = torch.randn(size, HEADS + 2 * KV_HEADS, head_dim, device=DEVICE, dtype=torch.bfloat16)
    flashinfer = FlashInferAttention(shape(head_dim), DEVICE, trees=False)
    # Twice: the second plan must wait for the first.
    for _ in range(2):
        actual = flashinfer.plan(batch, rounds.kv, HEADS, rounds.rotary).attend(0, heads, None)
    expected = TritonAttention().plan(batch, rounds.kv, HEADS, rounds.rotary).attend(0, heads, None)
    check_close(actual, expected)


def test_a_models_logits_hardly_depend_on_the_backend(small_models: Callable[..., CausalLM]) -> None:
    model = small_models("Qwen3")
    config = model.config
    head_shape = FlashInferShape(config.num_heads, config.num_kv_heads, config.head_dim, PAGE_SIZE, model.dtype)
    ids = torch.randint(0, config.vocab_size, (130,), generator=torch.Generator().manual_seed(4)).tolist()
    parents = [-1, 0, 1, 0, 3, 3, 2]
    logits = []
    for attention in (FlashInferAttention(head_shape, DEVICE), TritonAttention()):
        request = PagedRequest(model, attention)
        logits.append(
            torch.cat([request.prefill(ids[:60]), request.prefill(ids[60:123]), request.tree(ids[123:], parents)])
        )
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.02


@pytest.mark.parametrize("trees", [True, False])
def test_an_engine_answers_with_it(small_models: Callable[..., CausalLM], trees: bool) -> None:
    from cuda_harness import jobs
    from harness import run_all

    model = small_models()
    config = model.config
    head_shape = FlashInferShape(config.num_heads, config.num_kv_heads, config.head_dim, PAGE_SIZE, model.dtype)
    engine, executor = make_paged_engine(
        model,
        page_size=PAGE_SIZE,
        attention=FlashInferAttention(head_shape, DEVICE, trees),
        max_running=2,
        max_round_tokens=8,
    )
    engine.start()
    answers = run_all(engine, jobs()[:4], 2, max_tokens=24)
    engine.stop()
    assert all(len(answer.token_ids) == 24 for answer in answers)
    assert len(executor.rows) == 0
