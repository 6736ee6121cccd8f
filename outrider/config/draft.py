"""Options of the draft service."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.config.base import option
from outrider.config.service import GRPC_DOOR, PeerServiceOptions, check_device
from outrider.errors import ConfigError

AUTO = ("AUTO",)
"""Stands for the drafters that `outrider.models.drafters.kinds.choose_drafters` finds for the target."""
BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")
"""Heads that guess a block of tokens in one forward."""
ALGORITHMS = ("EAGLE", "EAGLE3", *BLOCK_ALGORITHMS, "NEXTN", "STANDALONE")
"""Drafters with a model; at most one of them can be named."""
NAIVE_EAGLE = "NAIVE_EAGLE"
"""A head that guesses one token; it only runs inside verify's rounds on a GPU."""
_OF_MODELS = (
    "speculative_draft_model_revision",
    "speculative_eagle_topk",
    "speculative_token_map",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
    "disable_cuda_graph",
    "max_total_tokens",
    "mem_fraction_static",
    "rank_by_noise",
    "draft_ahead",
)
"""Options that n-grams do not read. Device and dtype are left out: deployments often set them whatever drafts."""
_OF_NGRAMS = (
    "match_type",
    "min_match_window_size",
    "max_match_window_size",
    "min_bfs_breadth",
    "max_bfs_breadth",
    "branch_length",
    "capacity",
    "request_capacity",
    "total_capacity",
)
"""Options that draft models do not read."""


@dataclass(frozen=True)
class SpeculativeOptions(PeerServiceOptions):
    """Options of the drafters, which run in a draft service or with verify."""

    speculative_algorithm: tuple[str, ...] = option((), "Drafters to run.")
    speculative_draft_model_path: str = option(
        "", "Draft model or head: a local folder or a hub id; for NEXTN, empty: the target's own."
    )
    speculative_draft_model_revision: str = option("", "Revision of the draft model on the hub.")
    speculative_num_steps: int = option(0, "Most draft tokens from the root to a leaf; 0: chosen automatically.")
    speculative_eagle_topk: int = option(0, "Most children of a node; 0: chosen automatically.", minimum=0, maximum=16)
    speculative_token_map: str = option(
        "", "File with the token ids that a draft model may guess (JSON or .safetensors); empty: all."
    )
    speculative_draft_window_size: int = option(
        0,
        "Draft models: number of last tokens that they see of a context over 1.5 times as long; 0: as a head's "
        "checkpoint says, or all.",
        minimum=0,
    )
    speculative_draft_sink_size: int = option(
        0,
        "Draft models: number of first tokens that they also see of such a context, right before the last ones; "
        "less than 16 counts as 16.",
        minimum=0,
    )

    def check_window(self) -> None:
        """Raise ConfigError for a sink without a window."""
        if self.speculative_draft_sink_size and not self.speculative_draft_window_size:
            raise ConfigError("--speculative-draft-sink-size: needs --speculative-draft-window-size; give both")


DRAFTING = tuple(field.name for field in fields(SpeculativeOptions) if field.name.startswith("speculative_"))
"""Names of the options of drafters, which both verify and draft services have."""


@dataclass(frozen=True)
class DraftOptions(SpeculativeOptions):
    """Guesses the next tokens for verify services."""

    address: str = option("127.0.0.1:50053", GRPC_DOOR)
    metrics_address: str = option("127.0.0.1:9103", "Address of the Prometheus page, host:port; empty: no page.")
    speculative_algorithm: tuple[str, ...] = option(
        AUTO,
        "Drafters to run, comma separated: one of EAGLE, EAGLE3, DFLASH, DSPARK, NEXTN and STANDALONE, or NGRAM, or "
        "both; AUTO: EAGLE3,NGRAM with the shipped head for the default target, else NGRAM.",
    )
    speculative_num_steps: int = option(
        0, "Most draft tokens from the root to a leaf; 0: chosen automatically.", minimum=0, maximum=1024
    )
    speculative_num_draft_tokens: int = option(
        0,
        "Most live nodes of a request's tree, within verify's credit; 0: that credit for a model, 64 for n-grams.",
        minimum=0,
    )
    target_model_path: str = option(
        "",
        "Folder of the target, for heads that share its embedding or output matrix, and for grammars, which need its "
        "tokenizer.",
    )
    device: str = option(
        "auto", 'Where a draft model runs: "cpu", "cuda", "cuda:1", ...; "auto": a GPU if there is one.'
    )
    dtype: str = option(
        "auto",
        "Number format of a draft model; auto: on a CPU, bfloat16 where it is faster; on a GPU, the checkpoint's half "
        "format.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    disable_cuda_graph: bool = option(False, "Run draft steps on a GPU without CUDA graphs; slower.")
    max_total_tokens: int = option(
        0, "Context tokens that the draft model's KV cache holds; 0: as free memory allows.", minimum=0
    )
    mem_fraction_static: float = option(
        0.5, "Share of the GPU's memory for a draft model and its KV.", minimum=0.01, maximum=0.98
    )
    rank_by_noise: bool = option(
        True,
        "At temperatures above 0, rank a draft model's candidates with the noise that verify samples with; false, for "
        "comparison: by probability alone.",
    )
    lockstep: bool = option(
        False, "Grow one tree after each commit and stop, as co-located engines do: the baseline of benchmarks."
    )
    draft_ahead: str = option(
        "auto",
        "Whether to grow while verify computes: always, never (a draft model grows one tree after each commit and "
        "then leaves the cores to verify), or auto: on a GPU, except for a single request with a block head.",
        choices=("auto", "always", "never"),
    )
    local_line: str = option(
        "auto",
        "Unix socket through which verify engines of the same host and user reach this engine without gRPC: auto (an "
        "abstract socket, which containers do not share), a folder for the socket, or off.",
    )
    threads: int = option(1, "Threads of numerical libraries.", minimum=1, maximum=1024)
    min_path_probability: float | None = option(
        None,
        "Do not grow nodes that are less likely than this to be committed; empty: 0.0002 for a model, 0.02 for "
        "n-grams, 0.1 for n-grams beside a model on a CPU.",
        minimum=0,
        maximum=1,
    )

    match_type: str = option(
        "PROB", "How the tokens after a match are weighted: BFS by recency, PROB by frequency.", choices=("BFS", "PROB")
    )
    min_match_window_size: int = option(1, "Shortest context that is matched, in tokens.", minimum=1)
    max_match_window_size: int = option(12, "Longest context that is matched, in tokens.", minimum=1)
    min_bfs_breadth: int = option(1, "Children of a node after the longest match.", minimum=1)
    max_bfs_breadth: int = option(10, "Children of a node after the shortest match.", minimum=1)
    branch_length: int = option(
        18, "Longest n-gram in a trie, match and continuation together.", minimum=2, maximum=256
    )
    capacity: int = option(
        262144,
        "Most nodes of the tries that a tenant's requests share, over all tenants; 0.5 KB each with their text.",
        minimum=4096,
    )
    request_capacity: int = option(65536, "Most nodes of a request's own trie.", minimum=1024)
    total_capacity: int = option(
        1048576, "Most nodes of all requests' own tries; each gets an equal share, at least 1024.", minimum=4096
    )

    max_requests: int = option(1024, "Most requests open at once, over all sessions.", minimum=1)
    max_sessions: int = option(64, "Most verify replicas served at once.", minimum=1)
    max_nodes: int = option(
        65536, "Most live nodes in all trees; above this, growth stops and requests are declined.", minimum=64
    )
    max_positions: int = option(131072, "Longest sequence served, in tokens.", minimum=1)
    max_message_bytes: int = option(16777216, "Longest message accepted.", minimum=65536, maximum=1073741824)
    max_queued: int = option(
        1024, "Most messages that may wait for a session to read them; with more, the session ends.", minimum=16
    )

    def check(self) -> None:
        """Raise ConfigError if options contradict each other, independent of machine and models."""
        check_device(self.device)
        check_drafters(self.speculative_algorithm, self.lockstep, model_path=self.speculative_draft_model_path)
        _ordered(
            "min_match_window_size", self.min_match_window_size, "max_match_window_size", self.max_match_window_size
        )
        _ordered("min_bfs_breadth", self.min_bfs_breadth, "max_bfs_breadth", self.max_bfs_breadth)
        self.check_window()
        if self.branch_length <= self.max_match_window_size:
            raise ConfigError(
                f"--branch-length: {self.branch_length} leaves no room behind a match of --max-match-window-size "
                f"{self.max_match_window_size} tokens; use {self.max_match_window_size + 1} or more"
            )

    def unused(self) -> str:
        """Return a warning that names the given options which none of the drafters reads; empty if there are none."""
        names = self.speculative_algorithm
        if names == AUTO:
            return ""
        unread = _OF_NGRAMS if "NGRAM" not in names else _OF_MODELS if len(names) == 1 else ()
        given = [name for name in unread if getattr(self, name) != getattr(type(self), name)]
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        return f"{flags}: without effect with drafters {','.join(names)}" if given else ""


def check_drafters(names: tuple[str, ...], lockstep: bool = False, *others: str, model_path: str = "") -> None:
    """Raise ConfigError unless these drafters can run together, and one has a model if `model_path` is given.

    `others`: names that are allowed beside those of a draft service.
    """
    if names == AUTO:
        return
    known = (*ALGORITHMS, *others)
    for name in names:
        if name not in (*known, "NGRAM"):
            raise ConfigError(
                f"--speculative-algorithm: {name!r} is not known; use one of {', '.join(sorted([*known, 'NGRAM']))}"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--speculative-algorithm: {','.join(names)!r} must name each drafter once, and one at least")
    models = [name for name in names if name in known]
    if len(models) > 1:
        raise ConfigError(
            f"--speculative-algorithm: {','.join(models)} are models and do not run together; use one of them, with or "
            "without NGRAM"
        )
    if lockstep and not models:
        raise ConfigError(f"--lockstep: {','.join(names)} has no model; use it with one of {', '.join(ALGORITHMS)}")
    if model_path and not models:
        raise ConfigError(
            f"--speculative-draft-model-path: {','.join(names)} has no model; leave the path out, or name in "
            f"--speculative-algorithm what it holds, one of {', '.join(known)}"
        )


def _ordered(low_name: str, low: int, high_name: str, high: int) -> None:
    if low > high:
        flags = [name.replace("_", "-") for name in (low_name, high_name)]
        raise ConfigError(f"--{flags[0]}: {low} is above --{flags[1]} {high}; use {high} or less")
