"""A head run ahead at every base at once, as it is trained: each step takes what the step before it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from outrider.layers.rotary import Rotary
from outrider_tools.training.attention import own_attention

Angles = tuple[Tensor, Tensor]


def unroll(
    feature: Tensor,
    embedded: Tensor,
    rotary: Rotary,
    num_steps: int,
    *,
    enter: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]],
    project: Callable[[Tensor, Angles], tuple[Tensor, Tensor, Tensor]],
    finish: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[Tensor]:
    """Run a head of one layer `num_steps` times.

    Step j is what drafting j + 1 tokens past the root computes: queries see the keys of step 0 up to their base, and
    those that their own chain has made since.

    Args:
        feature: [B, T, hidden], the target's as the first step takes them.
        embedded: [B, T, hidden], embeddings of the tokens.
        rotary: the target's.
        num_steps: at least 1.
        enter: from the step's tokens and features [B, T, hidden], and whether it is the first one, to the residual
            stream [B, T, hidden] and the rows [B, T, width] that attention projects.
        project: from those rows and their angles to q, k, v [B, H, T, D].
        finish: from the stream and what attention found [B, H, T, D] to the features of the step [B, T, hidden].

    Yields:
        features of the step [B, T, hidden]. Bases whose tokens lie behind the sequence hold nothing of meaning.
    """
    width = feature.shape[1]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for step in range(num_steps):
        # At the end of the sequence tokens are missing; zeros take their place.
        tokens = functional.pad(embedded[:, 1 + step :], (0, 0, 0, min(1 + step, width)))
        stream, rows = enter(tokens, feature, step == 0)
        positions = torch.arange(step, step + width, device=rows.device)
        q, k, v = project(rows, rotary.angles(positions, feature.dtype))
        if step == 0:
            true_k, true_v = k, v
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            own_keys.append(k)
            own_values.append(v)
            attended = own_attention(q, true_k, true_v, torch.stack(own_keys, 2), torch.stack(own_values, 2))
        feature = finish(stream, attended)
        yield feature
