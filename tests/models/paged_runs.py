"""Forwards of one request over pages: Triton's backend, whose kernels are torch references on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kernels.sampling_state import RoundTokens
from outrider.attention.paged import MAX_PATH, PagedBatch, TreeBuffers
from outrider.attention.triton_backend import TritonAttention
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.loader import decoder_tensors
from outrider.models.weights import fill

_PAGE = 4


def load_for_kernels(folder: Path, device: str = "cpu") -> CausalLM:
    """As on a GPU, where heads are of sizes that kernels take."""
    config = ModelConfig.from_folder(folder).with_padded_heads()
    stored = decoder_tensors(folder, config)
    model = CausalLM(config, torch.float32, torch.device(device))
    with torch.inference_mode():
        fill(model.checkpoint_tensors(), lambda name: stored[name].read(), None)
        model.finish_loading()
    return model


class PagedRun:
    """A request whose pages are out of order."""

    def __init__(self, model: CausalLM, num_pages: int = 24) -> None:
        self.model = model
        self._kv = model.new_kv(num_pages * _PAGE)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
        self._tables = order.view(1, -1).to(model.device, torch.int32)

    def prompt(self, ids: Tensor, start: int) -> Tensor:
        """Logits of a chunk that begins at `start`."""
        positions = torch.arange(start, start + len(ids))
        pages = self._tables[0].cpu().long()
        batch = PagedBatch(
            token_ids=self._ints(ids), positions=self._ints(positions), first=self._ints([0, len(ids)]),
            cached_len=self._ints([start]), table_rows=self._ints([0]), page_tables=self._tables,
            slots=self._ints(pages[positions // _PAGE] * _PAGE + positions % _PAGE), page_size=_PAGE,
            max_row_tokens=len(ids),
        )  # fmt: skip
        return self._run(batch)

    def tree(self, ids: Tensor, parents: list[int], context: int, by_path: bool) -> Tensor:
        """Logits of a tree behind a context; `parents` are places in it, -1 first."""
        return self._run(self._tree_batch(ids, parents, context, by_path))

    @torch.inference_mode()
    def captured_tree(self, ids: Tensor, parents: list[int], context: int, by_path: bool) -> Tensor:
        """The same, replayed from a CUDA graph."""
        batch = self._tree_batch(ids, parents, context, by_path)
        self._run(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._run(batch)
        logits.zero_()
        graph.replay()
        return logits

    def _tree_batch(self, ids: Tensor, parents: list[int], context: int, by_path: bool) -> PagedBatch:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        count, zero = len(ids), self._ints([0])
        tokens = RoundTokens(
            self._ints(ids), self._ints([context + depth for depth in depths]), self._ints(parents),
            self._ints([0] * count), self._ints([0, count]), zero, zero, self._ints([context]),
        )  # fmt: skip
        buffers = TreeBuffers(count, MAX_PATH, self.model.device)
        return buffers.batch(tokens, self._tables, _PAGE, count, 2, by_path)

    @torch.inference_mode()
    def _run(self, batch: PagedBatch) -> Tensor:
        return self.model.logits(self.model.forward(batch, self._kv, TritonAttention()))

    def _ints(self, values: Tensor | list[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.model.device)
