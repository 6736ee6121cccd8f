"""How a drafter ranks its candidates: by their chances, or with the noise that the target will sample by."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.gumbel import gumbel as device_gumbel
from outrider.models.drafters.base import DraftModel
from outrider.sampling.noise import gumbel


class Ranking:
    """Edge scores of one answer's candidates, as `HostProposer` and `Proposer` compute them for a node at a time.

    The noise of a token depends on its position alone, so it is computed once for all nodes of all trees.
    """

    def __init__(self, model: DraftModel, temperature: float, seed: int, num_positions: int) -> None:
        """`num_positions` bounds the positions of candidates; `seed` and choice 0 key the noise."""
        self._divisor, self._tau, noisy = model.edge_scale.columns(temperature, True)
        ids = torch.arange(model.vocab_size, device=model.device) if model.target_ids is None else model.target_ids
        self._target_ids = ids.long()
        self._whole = model.target_ids is None
        self._noise = self._draw(seed, num_positions) if noisy else None

    def edges(self, logits: Tensor, positions: Tensor) -> Tensor:
        """float32 [N, V], at most 0; `logits` [N, V] may be overwritten. `positions` [N] are the candidates' own."""
        logits = logits.div_(self._divisor)
        if self._noise is not None:
            logits = logits.add_(self._noise[positions]).div_(self._tau)
        return logits.log_softmax(-1)

    def best(self, logits: Tensor, positions: Tensor) -> Tensor:
        """int64 [N], the target's id of the best candidate."""
        if self._noise is not None:
            logits = logits.div_(self._divisor).add_(self._noise[positions])
        return self._target_ids[logits.argmax(-1)]

    def target_id(self, draft_ids: Tensor) -> Tensor:
        """int64, the same shape."""
        return self._target_ids[draft_ids]

    def _draw(self, seed: int, num_positions: int) -> Tensor:
        """float32 [num_positions, V]."""
        ids = self._target_ids
        if ids.device.type == "cuda":
            positions = torch.arange(num_positions, dtype=torch.int32, device=ids.device)
            keys = noise_keys([seed] * num_positions).to(ids.device)
            if self._whole:
                return device_gumbel(keys, positions, ids.shape[0])
            return device_gumbel(keys, positions, 0, ids.int().expand(num_positions, -1).contiguous())
        wanted = ids.numpy()
        rows = [gumbel(seed, 0, position, wanted) for position in range(num_positions)]
        return torch.from_numpy(np.stack(rows))


def noise_keys(seeds: list[int]) -> Tensor:
    """int32 [N, 3], what the device's noise is keyed by: seed, low and high word, and choice 0."""
    words = [[seed & 0xFFFFFFFF, seed >> 32, 0] for seed in seeds]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))
