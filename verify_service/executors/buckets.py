"""The shapes that rounds are padded to."""

from __future__ import annotations

from bisect import bisect_left

from outrider.buckets import TOKEN_BUCKETS, row_buckets, width_buckets
from verify_service.executors.round_buffers import Bucket


class Buckets:
    """The smallest shape that holds a round is taken."""

    def __init__(self, max_tokens: int, max_rows: int, fixed: Bucket | None = None) -> None:
        """`fixed` is the only shape there is, for rounds whose results must not depend on it."""
        self.tokens = width_buckets(TOKEN_BUCKETS, max_tokens)
        self.rows = row_buckets(max_rows)
        self._only = fixed is not None
        if fixed is not None:
            self.tokens, self.rows = [fixed.tokens], [fixed.rows]

    def fit(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket. Raises ValueError for a round that is too large for all."""
        if num_tokens > self.tokens[-1] or num_rows > self.rows[-1]:
            raise ValueError(
                f"a round of {num_tokens} tokens in {num_rows} rows is over {self.tokens[-1]} in {self.rows[-1]}"
            )
        rows = self.rows[bisect_left(self.rows, num_rows)]
        tokens = self.tokens[bisect_left(self.tokens, max(num_tokens, min(rows, self.tokens[-1])))]
        return Bucket(tokens, rows, self._only)

    def width(self, num_tokens: int) -> int:
        """Tokens that a round of `num_tokens` is padded to."""
        return self.tokens[min(bisect_left(self.tokens, num_tokens), len(self.tokens) - 1)]

    @property
    def widths(self) -> tuple[int, ...]:
        """Token counts whose times make a curve; at least two."""
        return tuple(self.tokens) if len(self.tokens) > 1 else (1, max(self.tokens[0], 2))

    def all(self) -> list[Bucket]:
        """Largest first, so that a shared memory pool is sized by the first capture."""
        found = {self.fit(tokens, rows) for rows in self.rows for tokens in self.tokens}
        return sorted(found, reverse=True)
