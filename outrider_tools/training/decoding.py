"""One token for every running row, again and again: on a GPU a single CUDA graph does all of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PagedBatch
from outrider.device import put
from outrider.models.decoder import CausalLM

PAGE_SIZE = 16
# The finest step of the uniform numbers that exponential ones are made of.
MIN_EXPONENTIAL = 2.0**-24


class Decoder:
    """Rows of tokens on the device, each with pages of its own. A row runs until it ends by itself.

    Every row holds `length` tokens with valid KV and behind them the token that its next step runs.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        num_rows: int,
        max_length: int,
        stop_ids: Sequence[int],
    ) -> None:
        self.num_rows = num_rows
        self.max_length = max_length
        self.page_size = PAGE_SIZE
        self._model = model
        self._attention = attention
        device = model.device
        num_pages = -(-max_length // PAGE_SIZE)
        self._row_slots = num_pages * PAGE_SIZE
        self.kv = model.new_kv(num_rows * self._row_slots)
        self.page_tables = torch.arange(num_rows * num_pages, dtype=torch.int32, device=device).view(num_rows, -1)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self._tokens = zeros(torch.int32, max_length)
        self._length, self._limit = zeros(torch.int32), zeros(torch.int32)
        self._inverse_temperature, self._noise = zeros(torch.float32), zeros(torch.float32)
        self._active = zeros(torch.bool)
        self._stop_ids = torch.tensor(list(stop_ids), dtype=torch.int32, device=device)
        self._rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._first = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._mask = torch.ones(num_rows, 1, dtype=torch.int32, device=device)
        self._graph = self._capture() if device.type == "cuda" else None

    def slot(self, row: int, position: int) -> int:
        """KV slot of a position of a row."""
        return row * self._row_slots + position

    def begin(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        temperatures: Sequence[float],
    ) -> None:
        """Rows start anew: with their prompts, which have KV but for the last token, to at most `limits` tokens."""
        device = self._tokens.device
        where = put(rows, device).long()
        width = max(len(prompt) for prompt in prompts)
        padded = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self._tokens[where, :width] = padded.to(device)
        self._length[where] = put([len(prompt) - 1 for prompt in prompts], device)
        self._limit[where] = put(limits, device)
        inverse = torch.tensor([1.0 / t if t > 0 else 1.0 for t in temperatures])
        self._inverse_temperature[where] = inverse.to(device)
        self._noise[where] = torch.tensor([float(t > 0) for t in temperatures]).to(device)
        self._active[where] = True

    def step(self) -> None:
        """Every active row gets a token."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def ended(self, rows: Sequence[int]) -> dict[int, NDArray[np.int32]]:
        """Those of `rows` that are not active any more, with all their tokens."""
        active = self._active.tolist()
        over = [row for row in rows if not active[row]]
        if not over:
            return {}
        where = put(over, self._tokens.device).long()
        tokens, lengths = self._tokens[where].cpu().numpy(), self._length[where].tolist()
        return {row: row_tokens[: length + 1] for row, row_tokens, length in zip(over, tokens, lengths, strict=True)}

    @torch.inference_mode()
    def _step(self) -> None:
        place = self._length.long().unsqueeze(1)
        slots = torch.where(self._active, self._rows * self._row_slots + self._length, -1)
        batch = PagedBatch(
            token_ids=self._tokens.gather(1, place).squeeze(1),
            positions=self._length,
            first=self._first,
            # Rows that have ended read one key.
            cached_len=torch.where(self._active, self._length, 0),
            table_rows=self._rows,
            page_tables=self.page_tables,
            slots=slots,
            page_size=self.page_size,
            max_row_tokens=1,
            mask=self._mask,
        )
        chosen = self._sample(self._model.logits(self._model.forward(batch, self.kv, self._attention)))
        # A row that has ended may be full: what it would write goes back to where it came from.
        place = (place + 1).clamp_(max=self.max_length - 1)
        kept = self._tokens.gather(1, place).squeeze(1)
        self._tokens.scatter_(1, place, torch.where(self._active, chosen, kept).unsqueeze(1))
        self._length.add_(self._active.to(torch.int32))
        stopped = (chosen.unsqueeze(1) == self._stop_ids).any(1) | (self._length + 1 >= self._limit)
        self._active.logical_and_(~stopped)

    def _sample(self, logits: Tensor) -> Tensor:
        """int32 [R]: the likeliest token, or one drawn by adding Gumbel noise."""
        scores = logits * self._inverse_temperature.unsqueeze(1)
        # Never 0, whose logarithm would make any token win, and would spoil greedy rows.
        gumbel = torch.empty_like(scores).exponential_().clamp_(min=MIN_EXPONENTIAL).log_()
        return scores.addcmul_(gumbel, self._noise.unsqueeze(1), value=-1.0).argmax(1).to(torch.int32)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record a step while no row is active: it writes nothing that counts."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._step()
        return graph
