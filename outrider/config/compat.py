"""Options of SGLang's speculative decoding, for those who know them: what each is called here, or why it is not here.

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
        """Whether this is about the flag."""
        return flag.startswith(self.flag[:-1]) if self.flag.endswith("*") else flag == self.flag


def _same(flag: str, *ours: str) -> Foreign:
    return Foreign(flag, renamed=ours)


FOREIGN = (
    _same("--speculative-draft-model", "--speculative-draft-model-path"),
    # On the draft service this is the draft's own backend; verify alone has nothing of the kind.
    _same("--speculative-draft-attention-backend", "--draft-attention-backend", "--attention-backend"),
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
        moot="drafts run unquantized, whatever the target is",
        refused="quantized drafts are not supported; leave it out, and choose --dtype of the draft instead",
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
        refused="a verify service is one GPU; start several behind one gateway",
        takes_value=False,
    ),
    Foreign("--speculative-skip-dp-mlp-sync", refused="there is no data-parallel attention here", takes_value=False),
    Foreign("--speculative-draft-window-size", refused="drafts see their whole context"),
    Foreign("--speculative-draft-sink-size", refused="drafts see their whole context"),
    Foreign("--speculative-dflash-*", refused="DFLASH is not supported; use EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM"),
    Foreign("--speculative-dspark-*", refused="DSPARK is not supported; use EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM"),
    Foreign("--speculative-ngram-external-*", refused="the trie is filled by prompts and answers alone"),
    Foreign("--decoupled-spec-role", refused="drafts are services of their own: `outrider up`, or --draft of verify"),
)


def translate(argv: Sequence[str], known: Collection[str], warn: Warn) -> list[str]:
    """The command line in our own words.

    `known` are the flags that the command has: an argument with one of these stays as it is. Whatever is moot is
    told to `warn` and left out. What belongs to another service stays, and is unknown there.
    Raises ConfigError for what is refused, with the reason.
    """
    translated: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        entry = None if flag in known else next((it for it in FOREIGN if it.matches(flag)), None)
        if entry is None:
            translated.append(word)
            continue
        if entry.renamed:
            ours = _ours(entry, known)
            translated.append(ours + equals + value if ours else word)
            continue
        # A switch may be given a value by an equals sign alone.
        if entry.takes_value and not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        _judge(entry, flag, value, warn)
    return translated


def _ours(entry: Foreign, known: Collection[str]) -> str:
    """Our flag in the place of a renamed one; empty if the command has none."""
    if entry.flag.startswith("--speculative-draft-") and "--target-model-path" not in known:
        return ""
    return next((flag for flag in entry.renamed if flag in known), "")


def _judge(entry: Foreign, flag: str, value: str, warn: Warn) -> None:
    """Warn of what is moot, raise for what is refused."""
    is_moot = value in entry.moot_values if entry.moot_values else bool(entry.moot)
    shown = f"{flag} {value}".rstrip() if entry.takes_value else flag
    if not is_moot:
        raise ConfigError(f"{shown}: {entry.refused}")
    warn(f"{shown} changes nothing: {entry.moot}")
