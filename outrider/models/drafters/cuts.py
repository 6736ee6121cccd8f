"""Whether the head that drafts inside rounds is cut over the ranks of its target, and how. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from outrider.errors import ConfigError
from outrider.models.cuts import cut
from outrider.models.drafters.config import HeadConfig

LEAST_SAVED_BYTES = 64 << 20
"""Weights that a rank must have to read less in a step: they take an H100 21 us, and what a cut adds to a step of 32
nodes, two sums and the joining of 32,000 logits, 4 us each and about 12."""


def cut_head(head: HeadConfig, world: int, item_bytes: int) -> HeadConfig | None:
    """What one of `world` ranks has of a head with numbers of `item_bytes`; None for a head that rank 0 has alone.

    Alone it has what does not divide, what is faster on one, blocks, of which a round has one forward, and a head whose
    residual stream is not as wide as the target's, which is what ranks exchange.
    """
    if head.block is not None or head.decoder.hidden_size != head.target_hidden_size:
        return None
    try:
        part = replace(head, decoder=cut(head.decoder, world), num_ranks=world)
    except ConfigError:
        return None
    return part if (_elements(head) - _elements(part)) * item_bytes >= LEAST_SAVED_BYTES else None


def _elements(head: HeadConfig) -> int:
    """Elements of the matrices that a cut divides."""
    decoder = head.decoder
    heads = 2 * decoder.num_heads + 2 * decoder.num_kv_heads
    layer = heads * decoder.head_dim + 3 * decoder.intermediate_size
    return decoder.hidden_size * (decoder.num_layers * layer + head.output_rows(head.draft_vocab_size))
