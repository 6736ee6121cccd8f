"""The walk from a round's roots along the sampled tokens."""

from __future__ import annotations

from kernels.launch import use_triton
from kernels.reference import walk as reference
from kernels.sampling_state import RoundTokens, SampleBuffers, SamplingTables, WalkOutputs


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
    """Go from each row's root to the child that holds the sampled token, as long as there is one; writes `out`.

    The token sampled where the walk stops is the bonus token. A walk that would commit more than D tokens (`out`) stops
    at D. Committed tokens of requests with the flag PENALIZED are added to `tables.counts`. A row whose walk
    comes to unusable logits, or to a token outside the vocabulary, commits nothing and leaves the counts as they were.

    Args:
        tokens: the round, B rows.
        tables: parameters of the requests.
        buffers: as `sample_rows` left them.
        out: for at least B rows.
        max_row_tokens: no row has more tokens from its root on.
        vocab_size: V.
        lossy: apply acceptance thresholds to requests with one below 1 and a temperature, as
            outrider.sampling.lossy does; `sample_rows` must have been told so too.

    Raises:
        ValueError: `out` has too few rows.
    """
    num_rows = tokens.root.shape[0]
    if out.num_tokens.shape[0] < num_rows:
        raise ValueError(f"outputs for {out.num_tokens.shape[0]} rows, not {num_rows}")
    if use_triton(tokens.token_ids):
        from kernels.jit import walk as jit

        jit.walk(tokens, tables, buffers, out, max_row_tokens, vocab_size, lossy)
    else:
        reference.walk(tokens, tables, buffers, out, vocab_size, lossy)
