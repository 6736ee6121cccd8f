"""Options of SGLang and vLLM, for users who know them: the name of each here, or why Outrider does not have it.

docs/speculative-options.md is the same table for readers; a test keeps the two in step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from outrider.errors import ConfigError

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Foreign:
    """An option of another engine.

    It is `renamed` to the first of these options that a service has, or `moot` (accepted with a warning that says why
    it changes nothing), or `refused` with a reason. With `moot_values` only these values are moot, all others refused.
    """

    flag: str
    """Ends with * for a family of options."""
    renamed: tuple[str, ...] = ()
    moot: str = ""
    refused: str = ""
    moot_values: tuple[str, ...] = ()
    takes_value: bool = True


_DRAFT_ATTENTION = "a draft's attention is ours on a GPU and torch's on a CPU"
_ADDRESS = "an address is host and port in one; use "
_RENAMED = {
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--enforce-eager": "--disable-cuda-graph",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enable-deterministic-inference": "--deterministic",
    "--allowed-origins": "--cors-origins",
    "--ssl-certfile": "--gateway-tls-cert --tls-cert",
    "--ssl-keyfile": "--gateway-tls-key --tls-key",
    "--ssl-ca-certs": "--gateway-tls-ca --tls-ca",
    "--speculative-model": "--speculative-draft-model-path",
    "--num-speculative-tokens": "--speculative-num-steps",
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--speculative-num-draft-tokens": "--max-draft-tokens",
    "--speculative-accept-threshold-single": "--accept-threshold-single",
    "--speculative-accept-threshold-acc": "--accept-threshold-acc",
    "--speculative-ngram-min-match-window-size": "--min-match-window-size",
    "--speculative-ngram-max-match-window-size": "--max-match-window-size",
    "--speculative-ngram-min-bfs-breadth": "--min-bfs-breadth",
    "--speculative-ngram-max-bfs-breadth": "--max-bfs-breadth",
    "--speculative-ngram-match-type": "--match-type",
    "--speculative-ngram-branch-length": "--branch-length",
    "--speculative-ngram-max-trie-depth": "--branch-length",
    "--speculative-ngram-capacity": "--capacity",
}
"""Options with another name here: the first of the names listed that a command has."""
_MOOT_SWITCHES = {
    "--enable-prefix-caching": "prefixes are always shared; --disable-radix-cache stops it",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-metrics": "/metrics is always there; --sglang-metrics adds SGLang's names",
    "--disable-log-requests": "requests are not logged",
    "--speculative-adaptive": "how much is verified follows measured acceptance in every round, always",
    "--speculative-use-rejection-sampling": "acceptance is exact for every tree: the target's own sample is taken, "
    "and no draft probability is needed",
    "--enable-torch-compile": "rounds and draft steps are CUDA graphs of our kernels",
    "--disable-overlap-schedule": "draft and verify always overlap; --lockstep runs them in turn",
    "--enable-mixed-chunk": "chunks of prompts always run beside decoding",
    "--enable-spec-v2": "draft and verify always overlap",
}
"""Switches that change nothing here, and why."""
_MOOT = {
    "--speculative-draft-attention-backend": _DRAFT_ATTENTION,
    "--draft-attention-backend": _DRAFT_ATTENTION,
    "--speculative-attention-mode": "one kernel serves prompts and trees alike",
    "--speculative-adaptive-config": "how much is verified follows measured acceptance, without tuning",
    "--torch-compile-max-bs": "nothing is compiled by torch",
}
"""Options with a value that change nothing here, and why."""
_REFUSED_SWITCHES = {
    "--trust-remote-code": "code of a checkpoint is never run",
    "--enable-multi-layer-eagle": "one MTP layer drafts all positions; heads with a layer for each are not supported",
    "--enable-dp-attention": "a verify service is one replica; start several behind one gateway",
    "--speculative-skip-dp-mlp-sync": "there is no data-parallel attention here",
}
"""Switches that are refused, and why."""
_REFUSED = {
    "--host": _ADDRESS,
    "--port": _ADDRESS,
    "--quantization": "a checkpoint is quantized as its config.json says; leave it out, or make one with `outrider "
    "quantize`",
    "--revision": "a revision stands behind the hub id: --model OWNER/NAME@REVISION",
    "--download-dir": "set the environment variable OUTRIDER_HOME to the folder",
    "--chat-template": "the model's own template is used; write it into tokenizer_config.json",
    "--speculative-config": "each part is an option: --speculative-algorithm, --speculative-draft-model-path, "
    "--speculative-num-steps",
    "--speculative-dflash-block-size": "the head says its own block_size; leave it out",
    "--speculative-dflash-*": "no such option of DFLASH is supported; leave it out",
    "--speculative-dspark-*": "no such option of DSPARK is supported; leave it out",
    "--speculative-ngram-external-*": "the trie is filled by prompts and answers alone",
    "--decoupled-spec-role": "drafts are services of their own: `outrider up`, or --draft of verify",
}
"""Options with a value that are refused, and why. A flag that ends with * is a family."""
_ONE_REPLICA = (
    "one verify service is one replica",
    "start several behind one gateway, each with --device cuda:N; --tensor-parallel-size divides a model among GPUs",
    ("1",),
)
_FORMAT = "weights are read as safetensors, whatever is asked"
_NO_EXPERTS = ("no drafter here has experts", "mixture-of-experts drafters are not supported")
_BY_VALUE = {
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--data-parallel-size", "--dp-size"), _ONE_REPLICA),
    "--load-format": (_FORMAT, "only safetensors are read", ("auto", "safetensors")),
    "--speculative-draft-load-format": (
        _FORMAT,
        "only safetensors are read; run `outrider convert` on other formats once",
        ("auto", "safetensors"),
    ),
    "--speculative-draft-model-quantization": (
        "a draft is quantized as its own config.json says, whatever the target is",
        "a draft is quantized as its own config.json says; leave it out, or make one with `outrider quantize`",
        ("unquant", "none"),
    ),
    "--speculative-draft-kv-cache-dtype": (
        "the draft's KV has the draft's dtype",
        "the draft's KV has the draft's dtype; choose that with --dtype of the draft",
        ("auto",),
    ),
    "--speculative-moe-runner-backend": (*_NO_EXPERTS, ("auto",)),
    "--speculative-moe-a2a-backend": (*_NO_EXPERTS, ("none",)),
}
"""(why the values listed last change nothing, why all other values are refused, the values)"""

FOREIGN = (
    *(Foreign(flag, renamed=tuple(ours.split())) for flag, ours in _RENAMED.items()),
    *(Foreign(flag, moot=why, takes_value=False) for flag, why in _MOOT_SWITCHES.items()),
    *(Foreign(flag, moot=why) for flag, why in _MOOT.items()),
    *(Foreign(flag, refused=why, takes_value=False) for flag, why in _REFUSED_SWITCHES.items()),
    *(Foreign(flag, refused=why) for flag, why in _REFUSED.items()),
    *(Foreign(flag, (), moot, refused, values) for flag, (moot, refused, values) in _BY_VALUE.items()),
)


def translate(argv: Sequence[str], known: Collection[str], warn: Warn) -> list[str]:
    """Translate other engines' options in a command line to Outrider's.

    `known` are the flags that the command has: arguments with one of these stay, with underscores in the flag replaced
    by hyphens. `warn` is told of moot options, which are left out. Options of another service stay, for the parser to
    reject.
    Raises ConfigError with the reason for refused options.
    """
    translated: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        # vLLM accepts underscores as well.
        hyphened = flag.replace("_", "-") if flag.startswith("--") else flag
        entry = None if hyphened in known else next((it for it in FOREIGN if fnmatchcase(hyphened, it.flag)), None)
        if entry is None:
            translated.append(hyphened + equals + value if hyphened in known else word)
            continue
        if entry.renamed:
            # An option of the draft service, even if verify has an option of the same new name.
            is_anothers = entry.flag.startswith("--speculative-draft-") and "--target-model-path" not in known
            ours = "" if is_anothers else next((flag for flag in entry.renamed if flag in known), "")
            translated.append(ours + equals + value if ours else word)
            continue
        # A switch can take a value only after an equals sign.
        if entry.takes_value and not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        _judge(entry, flag, value, warn, known)
    return translated


def _judge(entry: Foreign, flag: str, value: str, warn: Warn, known: Collection[str]) -> None:
    """Warn of a moot option; raise ConfigError for a refused one."""
    is_moot = value in entry.moot_values if entry.moot_values else bool(entry.moot)
    shown = f"{flag} {value}".rstrip() if entry.takes_value else flag
    if not is_moot:
        fix = ""
        if entry.refused == _ADDRESS:
            grpc = "--gateway-address" if "--gateway-address" in known else "--address"
            http = "--rest-address HOST:PORT for HTTP, " if "--rest-address" in known else ""
            fix = f"{http}{grpc} HOST:PORT for gRPC"
        raise ConfigError(f"{shown}: {entry.refused}{fix}")
    warn(f"{shown} has no effect: {entry.moot}")
