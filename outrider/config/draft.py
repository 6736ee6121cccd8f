"""Options of the draft service."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.base import option
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError


@dataclass(frozen=True)
class DraftOptions(ServiceOptions):
    """Guesses ahead of a verify service."""

    address: str = option(
        "127.0.0.1:50053", "Address of the gRPC door: host:port (port 0 takes a free one) or unix:/path."
    )
    metrics_address: str = option("127.0.0.1:9103", "Address of the Prometheus page, host:port; empty turns it off.")
    drafter: str = option("NGRAM", "Which drafter guesses.")
    threads: int = option(1, "Threads of numerical libraries.", minimum=1, maximum=1024)

    num_draft_tokens: int = option(64, "Most live nodes of a request's tree; verify's credit may be lower.", minimum=1)
    max_depth: int = option(48, "Most draft tokens from the root to a leaf.", minimum=1)
    min_path_probability: float = option(
        0.02, "Nodes less likely than this to be committed are not grown.", minimum=0, maximum=1
    )

    match_type: str = option(
        "PROB", "How followers of a match are weighted: BFS by how recent, PROB by how often.", choices=("BFS", "PROB")
    )
    min_match_window_size: int = option(1, "Shortest context that is matched, in tokens.", minimum=1)
    max_match_window_size: int = option(12, "Longest context that is matched, in tokens.", minimum=1)
    min_bfs_breadth: int = option(1, "Children of a node after the longest match.", minimum=1)
    max_bfs_breadth: int = option(10, "Children of a node after the shortest match.", minimum=1)
    branch_length: int = option(
        18, "Longest n-gram in a trie, match and continuation together.", minimum=2, maximum=256
    )
    capacity: int = option(262144, "Nodes of the trie that requests share.", minimum=4096)
    request_capacity: int = option(65536, "Most nodes of a request's own trie.", minimum=1024)
    total_capacity: int = option(
        1048576, "Nodes of all requests' own tries; each gets an even share, at least 1024.", minimum=4096
    )

    max_requests: int = option(1024, "Requests open at once, over all sessions.", minimum=1)
    max_sessions: int = option(64, "Verify replicas served at once.", minimum=1)
    max_nodes: int = option(
        65536, "Live nodes in all trees; over it growth stops and requests are declined.", minimum=64
    )
    max_positions: int = option(131072, "Longest sequence served, in tokens.", minimum=1)
    max_message_bytes: int = option(16777216, "Longest message accepted.", minimum=65536, maximum=1073741824)
    max_queued: int = option(
        1024, "Messages that may wait for a session to read; over it the session ends.", minimum=16
    )

    def check(self) -> None:
        """Raise ConfigError where options do not fit each other."""
        _ordered(
            "min_match_window_size", self.min_match_window_size, "max_match_window_size", self.max_match_window_size
        )
        _ordered("min_bfs_breadth", self.min_bfs_breadth, "max_bfs_breadth", self.max_bfs_breadth)
        if self.branch_length <= self.max_match_window_size:
            raise ConfigError(
                f"--branch-length: {self.branch_length} leaves no room behind a match of --max-match-window-size "
                f"{self.max_match_window_size} tokens; use {self.max_match_window_size + 1} or more"
            )


def _ordered(low_name: str, low: int, high_name: str, high: int) -> None:
    if low > high:
        flags = [name.replace("_", "-") for name in (low_name, high_name)]
        raise ConfigError(f"--{flags[0]}: {low} is above --{flags[1]} {high}; use {high} or less")
