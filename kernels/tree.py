"""A round's trees: expand them for attention from the tokens' parents, and walk them along the sampled tokens."""

from __future__ import annotations

from torch import Tensor

from kernels.launch import backend
from kernels.sampling_state import RoundTokens, SampleBuffers, SamplingTables, WalkOutputs

# Most tokens from the end of a row's context down to a node.
MAX_PATH = 64


def expand_tree(
    tokens: RoundTokens,
    page_tables: Tensor,
    page_size: int,
    max_row_tokens: int,
    slots: Tensor,
    mask: Tensor,
    path: Tensor,
    int_params: Tensor | None = None,
) -> None:
    """Fill slots, mask and path of a round, and its missing token ids. One launch. All tensors are int32.

    Args:
        tokens: the round, of M tokens; parents come before children. A token's position is one more than its parent's;
            the first token of a row is at the row's cached_len.
        page_tables: [R, P], rows contiguous.
        page_size: tokens in a page.
        max_row_tokens: most tokens of a row.
        slots: [M], filled with the KV slot of each token, -1 for padding.
        mask: [M, W], filled; bit j % 32 of word j // 32 is set where the token is, or descends from, token
            first[b] + j of its row. 0 for padding.
        path: [M, D], filled: entry k is the place within the row of the token's ancestor at position cached_len[b] + k,
            up to the token itself; -1 after it and for padding.
        int_params: [R, 8], see SamplingTables. If given, a row's LAST_TOKEN replaces its token ids of -1.
    """
    if mask.shape[1] * 32 < max_row_tokens:
        raise ValueError(f"{mask.shape[1]} mask words cannot tell {max_row_tokens} tokens of a row apart")
    if not (mask.is_contiguous() and path.is_contiguous()) or page_tables.stride(1) != 1:
        raise ValueError("mask, path and the rows of the page tables must be contiguous")
    backend(tokens.parents, "tree").expand_tree(tokens, page_tables, page_size, slots, mask, path, int_params)


def walk(
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    out: WalkOutputs,
    *,
    max_row_tokens: int,
    vocab_size: int,
    lossy: bool = False,
) -> None:
    """From each row's root, follow the children that hold the sampled tokens as far as there are any; write `out`.

    The token sampled where the walk stops is the bonus token, and becomes the row's LAST_TOKEN. A walk stops at D
    tokens, the width of `out`. Committed tokens of requests with the flag PENALIZED are added to `tables.counts`. A row
    whose walk meets unusable logits, or a token outside the vocabulary, commits what it has accepted before.

    Args:
        tokens: the round, B rows.
        buffers: as `sample_rows` left them.
        out: for at least B rows.
        max_row_tokens: most tokens of a row from its root on.
        lossy: apply acceptance thresholds, as outrider.sampling.sampler does, to requests that have a temperature and a
            threshold below 1; `sample_rows` must have had the same flag.
    """
    num_rows = tokens.root.shape[0]
    if out.num_tokens.shape[0] < num_rows:
        raise ValueError(f"outputs for {out.num_tokens.shape[0]} rows, not {num_rows}")
    backend(tokens.token_ids, "tree").walk(tokens, tables, buffers, out, max_row_tokens, vocab_size, lossy)
