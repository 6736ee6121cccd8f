"""Options of SGLang and vLLM, for those who know them: what each is called here, or why it is not here.

docs/speculative-options.md is the same table for readers; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Foreign:
    """An option that other engines have.

    It is `renamed` to the first of ours that a service has, or `moot` (accepted with a warning that says why it changes
    nothing), or `refused` with a reason. With `moot_values` only these are moot, and all others are refused.
    """

    flag: str
    """Ends with * for a family."""
    renamed: tuple[str, ...] = ()
    moot: str = ""
    refused: str = ""
    moot_values: tuple[str, ...] = ()
    takes_value: bool = True

    def matches(self, flag: str) -> bool:
        """Whether this is about the flag, which has hyphens."""
        return flag.startswith(self.flag[:-1]) if self.flag.endswith("*") else flag == self.flag


def _same(flag: str, *ours: str) -> Foreign:
    return Foreign(flag, renamed=ours)


def _parallel(*flags: str) -> tuple[Foreign, ...]:
    return tuple(
        Foreign(
            flag,
            moot="one verify service is one replica",
            refused=(
                "start several behind one gateway, each with --device cuda:N; --tensor-parallel-size divides a model "
                "among GPUs"
            ),
            moot_values=("1",),
        )
        for flag in flags
    )


_DRAFT_ATTENTION = "a draft's attention is ours on a GPU and torch's on a CPU"
_ADDRESS = "an address is host and port in one; use "

SERVING = (
    Foreign("--host", refused=_ADDRESS),
    Foreign("--port", refused=_ADDRESS),
    _same("--model-path", "--model"),
    _same("--tokenizer-path", "--tokenizer"),
    _same("--max-model-len", "--context-length"),
    _same("--gpu-memory-utilization", "--mem-fraction-static"),
    _same("--max-num-seqs", "--max-running-requests"),
    _same("--max-num-batched-tokens", "--chunked-prefill-size"),
    _same("--block-size", "--page-size"),
    _same("--enforce-eager", "--disable-cuda-graph"),
    _same("--no-enable-prefix-caching", "--disable-radix-cache"),
    _same("--enable-deterministic-inference", "--deterministic"),
    _same("--allowed-origins", "--cors-origins"),
    _same("--ssl-certfile", "--gateway-tls-cert", "--tls-cert"),
    _same("--ssl-keyfile", "--gateway-tls-key", "--tls-key"),
    _same("--ssl-ca-certs", "--gateway-tls-ca", "--tls-ca"),
    _same("--speculative-model", "--speculative-draft-model-path"),
    _same("--num-speculative-tokens", "--speculative-num-steps"),
    *(_same(flag, "--tensor-parallel-size") for flag in ("--tp-size", "--tp", "-tp")),
    *_parallel("--pipeline-parallel-size", "--pp-size", "--data-parallel-size", "--dp-size"),
    Foreign(
        "--enable-prefix-caching", moot="prefixes are always shared; --disable-radix-cache stops it", takes_value=False
    ),
    Foreign("--enable-chunked-prefill", moot="prompts are always computed in chunks", takes_value=False),
    Foreign(
        "--enable-metrics", moot="/metrics is always there; --sglang-metrics adds SGLang's names", takes_value=False
    ),
    Foreign("--disable-log-requests", moot="requests are not logged", takes_value=False),
    Foreign(
        "--load-format",
        moot="weights are read as safetensors, whatever is asked",
        refused="only safetensors are read",
        moot_values=("auto", "safetensors"),
    ),
    Foreign(
        "--quantization",
        refused="a checkpoint is quantized as its config.json says; leave it out, or make one with `outrider quantize`",
    ),
    Foreign("--trust-remote-code", refused="code of a checkpoint is never run", takes_value=False),
    Foreign("--revision", refused="a revision stands behind the hub id: --model OWNER/NAME@REVISION"),
    Foreign("--download-dir", refused="set the environment variable OUTRIDER_HOME to the folder"),
    Foreign("--chat-template", refused="the model's own template is used; write it into tokenizer_config.json"),
    Foreign(
        "--speculative-config",
        refused="each part is an option: --speculative-algorithm, --speculative-draft-model-path, "
        "--speculative-num-steps",
    ),
)

FOREIGN = (
    *SERVING,
    _same("--speculative-draft-model", "--speculative-draft-model-path"),
    Foreign("--speculative-draft-attention-backend", moot=_DRAFT_ATTENTION),
    Foreign("--draft-attention-backend", moot=_DRAFT_ATTENTION),
    _same("--speculative-num-draft-tokens", "--max-draft-tokens"),
    _same("--speculative-accept-threshold-single", "--accept-threshold-single"),
    _same("--speculative-accept-threshold-acc", "--accept-threshold-acc"),
    _same("--speculative-ngram-min-match-window-size", "--min-match-window-size"),
    _same("--speculative-ngram-max-match-window-size", "--max-match-window-size"),
    _same("--speculative-ngram-min-bfs-breadth", "--min-bfs-breadth"),
    _same("--speculative-ngram-max-bfs-breadth", "--max-bfs-breadth"),
    _same("--speculative-ngram-match-type", "--match-type"),
    _same("--speculative-ngram-branch-length", "--branch-length"),
    _same("--speculative-ngram-max-trie-depth", "--branch-length"),
    _same("--speculative-ngram-capacity", "--capacity"),
    Foreign(
        "--speculative-draft-load-format",
        moot="weights are read as safetensors, whatever is asked",
        refused="only safetensors are read; run `outrider convert` on other formats once",
        moot_values=("auto", "safetensors"),
    ),
    Foreign(
        "--speculative-draft-model-quantization",
        moot="a draft is quantized as its own config.json says, whatever the target is",
        refused="a draft is quantized as its own config.json says; leave it out, or make one with `outrider quantize`",
        moot_values=("unquant", "none"),
    ),
    Foreign(
        "--speculative-draft-kv-cache-dtype",
        moot="the draft's KV has the draft's dtype",
        refused="the draft's KV has the draft's dtype; choose that with --dtype of the draft",
        moot_values=("auto",),
    ),
    Foreign("--speculative-attention-mode", moot="one kernel serves prompts and trees alike"),
    Foreign(
        "--speculative-moe-runner-backend",
        moot="no drafter here has experts",
        refused="mixture-of-experts drafters are not supported",
        moot_values=("auto",),
    ),
    Foreign(
        "--speculative-moe-a2a-backend",
        moot="no drafter here has experts",
        refused="mixture-of-experts drafters are not supported",
        moot_values=("none",),
    ),
    Foreign(
        "--speculative-adaptive",
        moot="how much is verified follows measured acceptance in every round, always",
        takes_value=False,
    ),
    Foreign("--speculative-adaptive-config", moot="how much is verified follows measured acceptance, without tuning"),
    Foreign(
        "--speculative-use-rejection-sampling",
        moot="acceptance is exact for every tree: the target's own sample is taken, and no draft probability is needed",
        takes_value=False,
    ),
    Foreign("--enable-torch-compile", moot="rounds and draft steps are CUDA graphs of our kernels", takes_value=False),
    Foreign("--torch-compile-max-bs", moot="nothing is compiled by torch"),
    Foreign(
        "--disable-overlap-schedule",
        moot="draft and verify always overlap; --lockstep runs them in turn",
        takes_value=False,
    ),
    Foreign("--enable-mixed-chunk", moot="chunks of prompts always run beside decoding", takes_value=False),
    Foreign("--enable-spec-v2", moot="draft and verify always overlap", takes_value=False),
    Foreign(
        "--enable-multi-layer-eagle",
        refused="one MTP layer drafts all positions; heads with a layer for each are not supported",
        takes_value=False,
    ),
    Foreign(
        "--enable-dp-attention",
        refused="a verify service is one replica; start several behind one gateway",
        takes_value=False,
    ),
    Foreign("--speculative-skip-dp-mlp-sync", refused="there is no data-parallel attention here", takes_value=False),
    Foreign("--speculative-dflash-block-size", refused="the head says its own block_size; leave it out"),
    Foreign("--speculative-dflash-*", refused="no such option of DFLASH is supported; leave it out"),
    Foreign("--speculative-dspark-*", refused="no such option of DSPARK is supported; leave it out"),
    Foreign("--speculative-ngram-external-*", refused="the trie is filled by prompts and answers alone"),
    Foreign("--decoupled-spec-role", refused="drafts are services of their own: `outrider up`, or --draft of verify"),
)


def translate(argv: Sequence[str], known: Collection[str], warn: Warn) -> list[str]:
    """The command line in our own words.

    `known` are the flags that the command has: an argument with one of these stays, with hyphens where it has
    underscores. Whatever is moot is told to `warn` and left out. What belongs to another service stays, and is unknown
    there.
    Raises ConfigError for what is refused, with the reason.
    """
    translated: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        # vLLM takes underscores as well.
        hyphened = flag.replace("_", "-") if flag.startswith("--") else flag
        entry = None if hyphened in known else next((it for it in FOREIGN if it.matches(hyphened)), None)
        if entry is None:
            translated.append(hyphened + equals + value if hyphened in known else word)
            continue
        if entry.renamed:
            ours = _ours(entry, known)
            translated.append(ours + equals + value if ours else word)
            continue
        # A switch may be given a value by an equals sign alone.
        if entry.takes_value and not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        _judge(entry, flag, value, warn, known)
    return translated


def _ours(entry: Foreign, known: Collection[str]) -> str:
    """Our flag in the place of a renamed one; empty if the command has none."""
    if entry.flag.startswith("--speculative-draft-") and "--target-model-path" not in known:
        return ""
    return next((flag for flag in entry.renamed if flag in known), "")


def _address_flags(known: Collection[str]) -> str:
    """What a command has in the place of --host and --port."""
    grpc = "--gateway-address" if "--gateway-address" in known else "--address"
    http = "--rest-address HOST:PORT for HTTP, " if "--rest-address" in known else ""
    return f"{http}{grpc} HOST:PORT for gRPC"


def _judge(entry: Foreign, flag: str, value: str, warn: Warn, known: Collection[str]) -> None:
    """Warn of what is moot, raise for what is refused."""
    is_moot = value in entry.moot_values if entry.moot_values else bool(entry.moot)
    shown = f"{flag} {value}".rstrip() if entry.takes_value else flag
    if not is_moot:
        ours = _address_flags(known) if entry.refused == _ADDRESS else ""
        raise ConfigError(f"{shown}: {entry.refused}{ours}")
    warn(f"{shown} changes nothing: {entry.moot}")
