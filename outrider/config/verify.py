"""Options of the verify service."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.config.base import option
from outrider.config.draft import AUTO, DRAFTING, NAIVE_EAGLE, DraftOptions, SpeculativeOptions, check_drafters
from outrider.config.service import GRPC_DOOR, check_device, check_named_once
from outrider.errors import ConfigError

MAX_RANKS = 16
LEAST_TOKENS = 512
"""Smallest KV cache, in tokens: warming up rounds needs this many."""
LEAST_SIZED_TOKENS = 1024
"""Smallest KV cache, in tokens, when its size follows from a GPU's memory."""
_DETERMINISTIC_ROUND_TOKENS = 64


@dataclass(frozen=True)
class VerifyOptions(SpeculativeOptions):
    """Holds the target model and its KV cache, and decides which tokens are committed."""

    address: str = option("127.0.0.1:50052", GRPC_DOOR)
    metrics_address: str = option("127.0.0.1:9102", "Address of the Prometheus page, host:port; empty: no page.")
    model: str = option("SmolLM2-135M-Instruct", "Target model: the default's name, a local folder or a hub id.")
    served_model_name: str = option("", "Name of the model for clients; empty: taken from --model.")
    device: str = option("auto", 'Where the model runs: "cpu", "cuda", "cuda:1", ...; "auto": a GPU if there is one.')
    dtype: str = option(
        "auto",
        "Number format of weights and KV; auto: on a CPU, bfloat16 where it is faster; on a GPU, the checkpoint's "
        "half format.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    model_impl: str = option(
        "auto",
        "What runs the model: outrider (its own decoder) or transformers, which needs the extra of that name; auto: "
        "outrider for the model families that it supports.",
        choices=("auto", "outrider", "transformers"),
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that share each layer of the target, one process each: on GPUs, --device and those after it; on a CPU, "
        "its cores.",
        minimum=1,
        maximum=MAX_RANKS,
    )
    rank_seconds: float = option(
        10.0, "Seconds without an answer from a rank after which the service ends.", minimum=0.5, maximum=600
    )
    rank_exchange: str = option(
        "auto",
        "How ranks on GPUs add up their results: peer (Outrider's kernels, on memory that the ranks map from each "
        "other) or nccl; auto: peer where all GPUs can reach each other.",
        choices=("auto", "peer", "nccl"),
    )
    threads: int = option(
        0,
        "Threads for the forward of each rank; 0: one for each core, divided among the ranks.",
        minimum=0,
        maximum=1024,
    )
    context_length: int = option(
        0, "Most tokens of prompt and output; 0: the model's limit, or what the KV cache has room for.", minimum=0
    )
    page_size: int = option(16, "Tokens in a KV page.", minimum=1, maximum=1024)
    max_total_tokens: int = option(0, "Tokens that the KV cache holds; 0: as free memory allows.", minimum=0)
    mem_fraction_static: float = option(
        0.88,
        "Share of the GPU's memory for weights and KV cache; the rest is for CUDA graphs and activations.",
        minimum=0.1,
        maximum=0.98,
    )
    max_running_requests: int = option(32, "Most requests in one round.", minimum=1, maximum=1024)
    max_queued_requests: int = option(256, "Most requests that wait for a place; further ones are refused.", minimum=0)
    max_queued_tokens: int = option(
        262144,
        "Most prompt tokens of requests that wait for their first token; further requests are refused unless no other "
        "waits.",
        minimum=1,
    )
    unread_seconds: float = option(
        120.0, "Seconds that a gateway may leave an answer unread before it is ended.", minimum=0.1, maximum=3600
    )
    chunked_prefill_size: int = option(
        0,
        "Most prompt tokens computed in one round; 0: 256 on a CPU, 2048 on a GPU (512 if deterministic).",
        minimum=0,
        maximum=65536,
    )
    disable_radix_cache: bool = option(
        False, "Do not keep the KV of finished requests, so that no prefix is ever shared."
    )
    draft: tuple[str, ...] = option(
        ("127.0.0.1:50053",),
        "Addresses of draft services, comma separated; empty: none, so plain decoding unless --speculative-algorithm "
        "gives verify drafters. dns:///name:port stands for all addresses that the name currently has.",
    )
    dns_seconds: float = option(5.0, "Seconds between DNS lookups of the names in --draft.", minimum=0.1, maximum=3600)
    draft_auth_token: str = option("", "Bearer token for the draft services.", secret=True)
    draft_auth_token_file: str = option("", "File with this token, instead of --draft-auth-token.")
    draft_tls_ca: str = option(
        "",
        "PEM file with the CA certificates that must have signed the draft services' certificates; empty: no TLS "
        "to them.",
    )
    draft_tls_cert: str = option("", "PEM file with the certificate to present to draft services that ask for one.")
    draft_tls_key: str = option("", "PEM file with the private key of this certificate.")
    draft_tls_name: str = option("", "Name in the draft services' certificates, if it is not their address.")
    speculative_algorithm: tuple[str, ...] = option(
        (),
        "Drafters that run with verify. On a GPU, a draft model inside its rounds: EAGLE, EAGLE3, DFLASH, DSPARK, "
        "NEXTN, STANDALONE, or NAIVE_EAGLE, a head with one step and one candidate; NGRAM is left to draft services. "
        "On a CPU, in verify's own process: EAGLE, EAGLE3, DFLASH, DSPARK, NEXTN, STANDALONE or NGRAM, or one of them "
        "with NGRAM. AUTO: the head that ships for the target, if there is one, and NGRAM on a CPU; empty: only draft "
        "services draft.",
    )
    speculative_num_steps: int = option(
        0, "Most draft tokens from the root to a leaf of its trees; 0: chosen automatically.", minimum=0, maximum=16
    )
    no_speculation: bool = option(False, "Always decode plainly, whatever requests ask for.")
    max_draft_tokens: int = option(
        63,
        "Most tree nodes in one round, over all requests; fewer are taken when more would not pay.",
        minimum=0,
        maximum=1024,
    )
    max_hold_ms: float = option(
        50.0, "Longest that a round waits for a draft, in ms; it waits only when that pays.", minimum=0, maximum=1000
    )
    lockstep: bool = option(
        False,
        "Wait for the draft before every round and verify its best --max-draft-tokens nodes, as co-located engines "
        "do; trees inside rounds always grow to --speculative-num-steps and that many nodes. The baseline of "
        "benchmarks.",
    )
    attention_backend: str = option(
        "auto",
        "Attention on a GPU: triton (Outrider's kernels), flashinfer, or mixed (flashinfer for prefill); auto: triton.",
        choices=("auto", "triton", "flashinfer", "mixed"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Number format of keys and values: auto is the model's; fp8_e4m3 (on a GPU, with triton attention) needs half "
        "the memory and has no scales.",
        choices=("auto", "fp8_e4m3"),
    )
    disable_cuda_graph: bool = option(False, "Run rounds on a GPU without CUDA graphs; the same tokens, slower.")
    cuda_graph_max_bs: int = option(
        64, "Rounds with more requests than this are not captured as CUDA graphs.", minimum=1, maximum=1024
    )
    deterministic: bool = option(
        False,
        "On a GPU, make every answer bitwise independent of speculation, batch and cache, at some cost in speed. Not "
        "for a CPU, where answers seldom differ with --dtype float32.",
    )
    accept_threshold_single: float = option(
        1.0,
        "Lossy: also accept a draft token that the target gives at least this probability; 1 is exact.",
        minimum=0.01,
        maximum=1,
    )
    accept_threshold_acc: float = option(
        1.0,
        "Lossy: accept draft tokens as if the target's probability were this much larger; 1 is exact.",
        minimum=0.01,
        maximum=1,
    )

    def check(self) -> None:
        """Raise ConfigError if options contradict each other, independent of machine and model."""
        check_device(self.device)
        check_named_once(self.draft, "--draft")
        names, path = self.speculative_algorithm, self.speculative_draft_model_path
        if (names or path) and not self.no_speculation:
            check_drafters(names, self.lockstep and self.device == "cpu", NAIVE_EAGLE, model_path=path)
        if NAIVE_EAGLE in names and self.device == "cpu":
            raise ConfigError("--speculative-algorithm: NAIVE_EAGLE drafts inside rounds on a GPU; use EAGLE3 or EAGLE")
        self.check_window()
        if self.deterministic and min(self.accept_threshold_single, self.accept_threshold_acc) < 1.0:
            raise ConfigError(
                "--deterministic: lossy acceptance depends on what is drafted; leave --accept-threshold-single and "
                "--accept-threshold-acc at 1"
            )
        if self.kv_cache_dtype == "fp8_e4m3" and (self.device == "cpu" or self.wants_flashinfer):
            raise ConfigError(
                "--kv-cache-dtype: fp8_e4m3 needs a GPU and --attention-backend triton; this is --device "
                f"{self.device} with {self.attention_backend}"
            )
        if self.wants_flashinfer:
            self._check_flashinfer()
        models = [] if self.no_speculation else [name for name in names if name not in ("NGRAM", *AUTO)]
        if models:
            self.check_inside(models[0])

    def check_inside(self, name: str) -> None:
        """Raise ConfigError if rounds on a GPU cannot take trees that the drafter `name` grows inside them."""
        if self.plans_on_host:
            raise ConfigError(
                "--attention-backend: flashinfer plans rounds on the host, which does not know the trees that "
                f"{name} grows inside them; choose mixed or triton, or a draft service, --draft-placement remote"
            )

    @property
    def wants_flashinfer(self) -> bool:
        """Whether FlashInfer, which needs a GPU, computes at least some of the attention."""
        return self.attention_backend in ("flashinfer", "mixed") and self.device != "cpu"

    @property
    def plans_on_host(self) -> bool:
        """Whether the attention plans rounds on the host: see AttentionBackend."""
        return self.wants_flashinfer and self.attention_backend == "flashinfer"

    def _check_flashinfer(self) -> None:
        if self.deterministic:
            raise ConfigError("--attention-backend: flashinfer has no deterministic mode; choose triton")
        if self.tensor_parallel_size > 1:
            raise ConfigError(f"--attention-backend: ranks need triton, this is {self.attention_backend}")
        if self.dtype == "float32":
            raise ConfigError("--attention-backend: flashinfer runs bfloat16 and float16, not float32; choose triton")

    @property
    def max_round_tokens(self) -> int:
        """Most tokens of a round on a GPU, not counting chunks of prompts."""
        if self.deterministic:
            return _DETERMINISTIC_ROUND_TOKENS
        return max(self.max_running_requests + self.max_draft_tokens, 1)

    def longest_request(self, num_tokens: int) -> int:
        """Return the tokens of the longest request that a KV cache of `num_tokens` can hold beside draft tokens."""
        return num_tokens // self.page_size * self.page_size - self.max_draft_tokens - self.page_size

    def check_lengths(self, positions: int, num_tokens: int | None = None) -> None:
        """Raise ConfigError if the KV cache is too small, or the context longer than it or than the model allows.

        `positions`: the model's; 0 if unknown. `num_tokens`: the KV cache's size; None before it is known, when
        `max_total_tokens` is checked instead, if given.
        """
        if self.context_length == 1:
            raise ConfigError(
                "--context-length: 1 leaves no room for a prompt and an answer; use 2 or more, or leave it out"
            )
        if 0 < positions < self.context_length:
            raise ConfigError(
                f"--context-length: {self.context_length} is over the {positions} positions of the model "
                "(max_position_embeddings in its config.json); lower it, or leave it out to have them all"
            )
        if num_tokens is not None or self.max_total_tokens:
            self._check_cache(self.max_total_tokens if num_tokens is None else num_tokens)

    def _check_cache(self, num_tokens: int) -> None:
        least = -(-LEAST_TOKENS // self.page_size) * self.page_size  # in whole pages
        if num_tokens < least:
            raise ConfigError(f"--max-total-tokens: {num_tokens} tokens are too few to warm up; allow at least {least}")
        longest = self.longest_request(num_tokens)
        if longest < 2:
            raise ConfigError(
                f"--max-total-tokens: {num_tokens} leave no room beside {self.max_draft_tokens} draft tokens; "
                "raise it or lower --max-draft-tokens"
            )
        if longest < self.context_length:
            raise ConfigError(
                f"--context-length: {self.context_length} is over the {longest} tokens that the KV cache has room for; "
                "lower it, or raise --max-total-tokens"
            )

    def draft_model(self, target: str) -> DraftOptions:
        """Return options as for a draft service with verify's own drafters; just NGRAM if none is named."""
        named = {name: getattr(self, name) for name in DRAFTING} | {"target_model_path": target}
        return replace(DraftOptions(**named), speculative_algorithm=self.speculative_algorithm or ("NGRAM",))
