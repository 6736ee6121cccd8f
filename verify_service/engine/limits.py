"""What an engine is built for."""

from __future__ import annotations

from dataclasses import dataclass

_ANY = 1 << 30


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of requests and rounds. The last four say which rounds the executor can run."""

    vocab_size: int
    context_length: int
    max_running: int = 64
    max_waiting: int = 1024
    chunk_size: int = 256
    """Prompt tokens computed in one round at most, over all requests."""
    max_nodes: int = 64
    """Tree nodes in one round at most, over all requests."""
    max_hold_seconds: float = 0.02
    lockstep: bool = False
    """Every round waits for the drafts' answers to the last commits and takes their best nodes, whatever they cost."""
    spin: bool = False
    """A device waits for the host between rounds: while requests run the engine never sleeps, and does what can wait
    in small pieces, so as to see the end of a round at once. Costs a core."""
    turns: bool = False
    """Drafts share cores with rounds, and grow between them: the answer to every commit may be worth a wait."""
    max_round_tokens: int = _ANY
    """Tokens of a round at most, chunks of prefill aside; with more requests than that they take turns."""
    max_depth: int = _ANY
    """Nodes deeper than this below the root are not taken."""
    root_apart: bool = False
    """Chunks of prefill stop before the root, which is always run beside the others' roots and nodes."""
    generated_in_decode: bool = False
    """After a preemption generated tokens are computed again as they were at first, beside roots and not in chunks.

    So is the prompt's last token, which was the first root. Needs `root_apart`.
    """
    max_extend: int = 32
    """Tokens of one request that a round computes again in that way, at most."""
