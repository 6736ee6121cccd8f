"""Device tensors that sampling and proposing read and write: a round's tokens, requests' parameters, results."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, ACCEPT_SINGLE, ACCEPT_ACC = range(8)
"""Columns of `SamplingTables.float_params`."""
SEED_LOW, SEED_HIGH, CHOICE_INDEX, TOP_K, NUM_LOGPROBS, FLAGS, MIN_LENGTH, LAST_TOKEN = range(8)
"""Columns of `SamplingTables.int_params`."""
PENALIZED, BIASED, MASKED, GOES_ON = 1, 2, 4, 8
"""Bits of the column FLAGS."""
IN_PROMPT = 1 << 30
"""Bit of `SamplingTables.counts`: the token occurs in the prompt."""
ENDS_ANSWER = 1 << 29
"""Bit of `SamplingTables.counts`: the token ends an answer. The bits below count the output."""
MIN_TEMPERATURE = 1e-6
"""Temperatures above 0 are raised to at least this."""
MAX_TOP_LOGPROBS = 20
"""Most top tokens that `logprobs` can list."""
UNUSABLE_LOGITS, ILLEGAL_TOKEN = 1, 2
"""Values of `WalkOutputs.error`: NaN, +inf or nothing left to sample; a sampled token outside the vocabulary."""
CANDIDATES = 2048
"""Length of the list of a row's best tokens that filters use; where it is too short, they use the whole row."""
TILE = 1024
"""Vocabulary tokens of one program of the first pass."""
MAX_BRANCHING = 16
"""Most candidates of a node."""
GROUP = 64
"""Vocabulary tokens of a group; the best token of each group is found first."""
TAU = 1
"""Column of `ProposeTables.floats` after TEMPERATURE."""
PROPOSE_FLAGS = 3
"""Column of `ProposeTables.ints` after SEED_LOW, SEED_HIGH and CHOICE_INDEX."""
RANK_BY_NOISE = 1
"""Bit of the column PROPOSE_FLAGS: rank by the shared noise where there is a temperature."""


@dataclass(frozen=True, slots=True)
class RoundTokens:
    """The tokens of a decode round, int32. The tokens of row b are first[b] .. first[b + 1] - 1."""

    token_ids: Tensor
    """[M]; -1 for the token that the request's last round sampled, which `expand_tree` fills in."""
    positions: Tensor
    """[M], absolute. The token sampled at token i is the one at positions[i] + 1."""
    parents: Tensor
    """[M], the parent's index in this round; less than the token's own index; -1 for the first token of a row."""
    rows: Tensor
    """[M], the token's row; -1 for padding."""
    first: Tensor
    """[B + 1]"""
    root: Tensor
    """[B], index of the last committed token, which the row's nodes follow; -1 where the row does not sample."""
    table_rows: Tensor
    """[B], the request's row in the tables."""
    cached_len: Tensor
    """[B], tokens of the request with valid KV; its tokens of the round follow them."""
    _OF_ROWS: ClassVar = frozenset({"root", "table_rows", "cached_len"})

    @classmethod
    def sizes(cls, num_tokens: int, num_rows: int) -> dict[str, int]:
        """Return the length of each field."""
        of_rows = dict.fromkeys(cls._OF_ROWS, num_rows) | {"first": num_rows + 1}
        return {field.name: of_rows.get(field.name, num_tokens) for field in fields(cls)}

    def head(self, num_tokens: int, num_rows: int) -> Self:
        """Return the first `num_tokens` slots and `num_rows` rows."""
        return replace(self, **{name: getattr(self, name)[:n] for name, n in self.sizes(num_tokens, num_rows).items()})


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Parameters and histories of running requests, one row each; V is the vocabulary without padding."""

    float_params: Tensor
    """float32 [R, 8]: temperature, top_p, min_p, presence, frequency and repetition penalty, accept thresholds."""
    int_params: Tensor
    """int32 [R, 8]: seed (low word, high word), choice index, top_k (0: all), logprobs wanted (-1: none), flags, the
    first position at which a token may end the answer (read where the flag GOES_ON is set), and the last committed
    token, written by `walk`."""
    counts: Tensor
    """int32 [R, V]: how often the token is in the output, plus IN_PROMPT and ENDS_ANSWER. Read where the flag
    PENALIZED or GOES_ON is set."""
    bias: Tensor
    """float32 [R, V], added to the logits where the flag BIASED is set."""


@dataclass(frozen=True, slots=True)
class SampleBuffers:
    """Results of `sample_rows` for M tokens, and its scratch memory."""

    sampled: Tensor
    """int32 [M], the token sampled at each token; -1 where nothing is sampled or the logits are unusable."""
    bad: Tensor
    """int32 [M], 1 where the logits hold NaN or +inf or leave no token, otherwise 0."""
    processed: Tensor
    """float32 [M, V + C]: processed logits of rows that are filtered, then the list of their C best. In rows with lossy
    acceptance, tokens dropped by a filter are -inf."""
    totals: Tensor
    """float64 [M]: log-sum-exp of the logits that filters left; only for rows with lossy acceptance."""
    candidate_ids: Tensor
    """int32 [M, C], token ids of the list of the C best in `processed`."""
    parts: Tensor
    """float32 [3, M, T]: best score, largest processed logit and 1 for unusable logits, of each of T tiles."""
    part_ids: Tensor
    """int32 [M, T]: token with the best score."""
    part_masses: Tensor
    """float64 [M, T]: the tile's sum of exponentials, relative to its largest logit."""

    @classmethod
    def new(
        cls, num_tokens: int, vocab_size: int, device: torch.device | str, candidates: int = CANDIDATES
    ) -> SampleBuffers:
        """Return buffers for up to `num_tokens` tokens a round; about 4 bytes a token and vocabulary entry."""
        tiles = -(-vocab_size // TILE)

        # Zeros, as in all long-lived buffers: a pass whose launches are left out must find valid ids and places there.
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            sampled=zeros(num_tokens),
            bad=zeros(num_tokens),
            processed=zeros(num_tokens, vocab_size + candidates, dtype=torch.float32),
            totals=zeros(num_tokens, dtype=torch.float64),
            candidate_ids=zeros(num_tokens, candidates),
            parts=zeros(3, num_tokens, tiles, dtype=torch.float32),
            part_ids=zeros(num_tokens, tiles),
            part_masses=zeros(num_tokens, tiles, dtype=torch.float64),
        )


@dataclass(frozen=True, slots=True)
class WalkOutputs:
    """Tokens that a round commits, at most D in each of B rows. Rows may be strided views, entries of a row not."""

    num_tokens: Tensor
    """int32 [B], accepted tokens and the bonus token; 0 for rows that do not sample and for failed ones."""
    tokens: Tensor
    """int32 [B, D], the committed tokens; -1 after them."""
    accepted: Tensor
    """int32 [B, D], indices in the round of the accepted nodes (one less than there are tokens); -1 after them."""
    error: Tensor
    """int32 [B], UNUSABLE_LOGITS or ILLEGAL_TOKEN where the walk met one, otherwise 0."""


@dataclass(frozen=True, slots=True)
class LogprobOutputs:
    """Log-probabilities of a round's committed tokens. Entries of requests that want none are not written.

    Rows may be strided views; the rest is contiguous.
    """

    logprobs: Tensor
    """float32 [B, D], of the committed token."""
    top_ids: Tensor
    """int32 [B, D, MAX_TOP_LOGPROBS], likeliest first, as many as the request wants; -1 after them."""
    top_logprobs: Tensor
    """float32 [B, D, MAX_TOP_LOGPROBS], of `top_ids`; -inf after them."""

    @classmethod
    def new(cls, num_rows: int, max_depth: int, device: torch.device | str) -> LogprobOutputs:
        """Return buffers for `num_rows` rows of at most `max_depth` tokens."""
        shape = (num_rows, max_depth, MAX_TOP_LOGPROBS)
        return cls(
            torch.zeros(shape[:2], dtype=torch.float32, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class ProposeTables:
    """Sampling parameters of R requests on the device, one row each."""

    floats: Tensor
    """float32 [R, 2]: temperature, tau (> 0)."""
    ints: Tensor
    """int32 [R, 4]: seed (low word, high word), choice index, flags."""

    @classmethod
    def new(cls, num_rows: int, device: torch.device | str) -> ProposeTables:
        """Return tables of zeros, which mean greedy decoding, for `num_rows` requests."""
        return cls(
            torch.zeros(num_rows, 2, dtype=torch.float32, device=device),
            torch.zeros(num_rows, 4, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class ProposeBuffers:
    """Scratch memory of `propose` for M tokens; one call at a time may use it."""

    tops: Tensor
    """float32 [M, ceil(V / GROUP)], the best score of each group of tokens."""
    masses: Tensor
    """float32 of the same shape: sum of exp(score - top) over the group."""

    @classmethod
    def new(cls, num_tokens: int, vocab_size: int, device: torch.device | str) -> ProposeBuffers:
        """Return buffers for up to `num_tokens` tokens over a draft vocabulary of `vocab_size`."""
        shape = (num_tokens, -(-vocab_size // GROUP))
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)))
