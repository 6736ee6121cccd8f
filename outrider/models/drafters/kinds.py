"""Finds out which drafters options name, which kind a folder holds, and whether it fits its target. Torch-free.

A folder is judged by config.json and the names of its tensors. What does not fit is refused here before any model is
loaded, and by `outrider up` before it starts a process.

The heads that ship with Outrider lie in `models/<target>-EAGLE3`: at the top of a source checkout, or below
share/outrider of an installation. $OUTRIDER_HEADS names another folder instead of `models/`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from outrider.config.base import expand
from outrider.config.draft import ALGORITHMS, AUTO, BLOCK_ALGORITHMS, NAIVE_EAGLE, DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, OutriderError, under
from outrider.logs import get_logger
from outrider.models.config import ModelConfig, text_fields
from outrider.models.drafters.config import (
    EMBEDDING,
    MARKOV_INPUT,
    MIN_SINKS,
    OUTPUT,
    ContextWindow,
    HeadConfig,
    block_config,
    check_unquantized,
    check_vocabulary,
    eagle3_config,
    eagle_config,
    mtp_config,
)
from outrider.models.fields import get_int, read_json
from outrider.models.foreign import check_config
from outrider.models.store import DEFAULT_ALIASES, DEFAULT_MODEL, DEFAULT_WHEEL, is_hub_id, resolve_model
from outrider.models.store_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    check_model_folder,
    hash_token_ids,
    shard_paths,
    tensor_shapes,
)

HEADS_VARIABLE = "OUTRIDER_HEADS"
_HEAD_FILES = (CONFIG_FILE, WEIGHTS_FILE)
FREQUENT_TOKENS = "frequent_tokens.json"
"""In a head's folder: a token map (--speculative-token-map) for CPUs."""
_MAX_MAP_BYTES = 64 << 20
_IN_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.")
"""Matches a part of the names of a language model's tensors in its layers."""
MTP_PREFIX = "model.mtp_layers.0."
MTP_OUTSIDE = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")

_logger = get_logger(__name__)


def model_algorithm(names: Collection[str]) -> str:
    """Return the drafter with a model among `names`. Raises ConfigError unless there is exactly one."""
    found = [name for name in names if name != "NGRAM"]
    if len(found) != 1 or found[0] not in ALGORITHMS:
        raise ConfigError(
            f"--speculative-algorithm {','.join(names)}: needs one of {', '.join(ALGORITHMS)} for a draft model"
        )
    return found[0]


def head_name(name: str) -> str | None:
    """Return our name for a tensor of a head other than MTP; None for one that is not read.

    DSPARK's confidence head is not read, because nodes are scored like those of any drafter.
    """
    name = name.removeprefix("model.")
    if name == "t2d" or name.endswith(".rotary_emb.inv_freq") or name.startswith("confidence_head."):
        return None
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def mtp_name(name: str) -> str | None:
    """Return our name for a tensor of a MiMo checkpoint; None for one that only the target has."""
    if name.startswith(MTP_PREFIX):
        rest = name.removeprefix(MTP_PREFIX)
        return rest if rest.startswith(MTP_OUTSIDE) else f"layers.0.{rest}"
    return {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}.get(name)


def algorithm_of(folder: Path) -> str:
    """Return the algorithm for the draft model in a folder: one of ALGORITHMS, as in `--speculative-algorithm`.

    A checkpoint with an MTP head counts as NEXTN, though it may also be a language model.

    Raises ConfigError if the folder has no safetensors, or what they hold is none of these.
    """
    names = [name for path in shard_paths(folder) for name in tensor_shapes(path)]
    if any(name.startswith(MTP_PREFIX) for name in names):
        return "NEXTN"
    found = {head_name(name) for name in names}
    if "layers.0.hidden_norm.weight" in found:
        return "EAGLE3"
    if "hidden_norm.weight" in found:
        return "DSPARK" if MARKOV_INPUT in found else "DFLASH"
    if "fc.weight" in found:
        return "EAGLE"
    path = folder / "config.json"
    # Speculators write only heads, of whatever kind.
    if not any(map(_IN_LAYER.search, names)) or (path.is_file() and "speculators_model_type" in read_json(path)):
        raise ConfigError(
            f"{folder}: holds no known kind of draft; its tensors include {min(names, default='none')}; use one "
            f"of {', '.join(ALGORITHMS)}"
        )
    return "STANDALONE"


def check_drafter(options: DraftOptions, target: Path) -> None:
    """Refuse the draft model that the options name beside NGRAM, if it is of another kind or does not fit the target.

    Raises ConfigError, naming the option, the folder and both values.
    """
    options = named_head(options)
    algorithm = model_algorithm(options.speculative_algorithm)
    folder = draft_folder(options, algorithm)
    if algorithm == "STANDALONE":
        with _naming("draft model", folder):
            check_config(folder)
    else:
        name_of = mtp_name if algorithm == "NEXTN" else head_name
        found = {name_of(name) for path in shard_paths(folder) for name in tensor_shapes(path)}
        names = {name for name in found if name}
        check_own_vocabulary(head_config(algorithm, folder, names, target), names, folder)
    if options.speculative_token_map:
        check_token_map(Path(options.speculative_token_map))
    check_tokenizer(folder, target)


def check_tokenizer(folder: Path, target: Path) -> None:
    """Raise ConfigError if the draft model's tokenizer differs from the target's."""
    own, wanted = hash_token_ids(folder), hash_token_ids(target)
    if own and own != wanted:
        raise ConfigError(
            f"--speculative-draft-model-path: the tokenizer of {folder} is {own[:12]}, the target's {wanted[:12]}; "
            "use a draft that was made for this target"
        )


@contextmanager
def _naming(what: str, folder: Path) -> Iterator[None]:
    """Let ConfigErrors raised within the block say whose files they are about."""
    try:
        yield
    except ConfigError as error:
        if error.message.startswith("--") or str(folder) in error.message:
            raise
        raise ConfigError(f"{what} {folder}: {error.message}") from None


def check_own_vocabulary(config: HeadConfig, names: Collection[str], folder: Path) -> None:
    """Raise ConfigError for a head of a smaller vocabulary without the map of its tokens or its own output matrix."""
    own, whole = config.draft_vocab_size, config.decoder.vocab_size
    if own == whole:
        return
    for name in ("d2t", OUTPUT):
        if name not in names:
            raise ConfigError(
                f"draft model {folder}: tensor {name} missing from the checkpoint; the draft vocabulary of {own} is "
                f"not the target's of {whole}"
            )


def check_token_map(path: Path) -> None:
    """Raise ConfigError for a file that does not exist, is too large, or is of a kind that is not read."""
    if not path.is_file():
        raise ConfigError(f"--speculative-token-map {path}: no such file")
    if path.stat().st_size > _MAX_MAP_BYTES:
        raise ConfigError(
            f"--speculative-token-map {path}: is larger than {_MAX_MAP_BYTES >> 20} MiB; that is no list of token ids"
        )
    if path.suffix not in (".json", ".safetensors"):
        raise ConfigError(
            f"--speculative-token-map {path}: must be .json or .safetensors; for a .pt file: outrider convert {path} "
            "OUT.json"
        )


def named_head(options: DraftOptions) -> DraftOptions:
    """Return the options with the head's kind instead of NAIVE_EAGLE, which only says how the head drafts."""
    if NAIVE_EAGLE not in options.speculative_algorithm:
        return options
    with under("--speculative-draft-model-path"):
        folder = resolve_model(options.speculative_draft_model_path, needs_tokenizer=False)
    return replace(options, speculative_algorithm=(algorithm_of(folder),))


def check_kind(algorithm: str, folder: Path) -> None:
    """Raise ConfigError, naming what is there and how it is used, unless the folder holds what `algorithm` takes."""
    found = algorithm_of(folder)
    # A target with an MTP head is also a language model. `mtp_config` refuses one that has no head in MiMo's layout.
    if found == algorithm or {found, algorithm} == {"STANDALONE", "NEXTN"}:
        return
    what = "a language model, not a head" if found == "STANDALONE" else f"a head of {found}"
    raise ConfigError(
        f"--speculative-algorithm {algorithm}: {folder} holds {what}; give --speculative-algorithm {found}, or another "
        "--speculative-draft-model-path"
    )


def head_config(algorithm: str, folder: Path, names: Collection[str], target: Path | None) -> HeadConfig:
    """Return a head's configuration, checked against the target's if there is one. Raises ConfigError."""
    layers = hidden = vocab_size = None
    if target is not None:
        with _naming("target", target):
            of_target = text_fields(read_json(target / "config.json"))
            layers, hidden = get_int(of_target, "num_hidden_layers"), get_int(of_target, "hidden_size")
            vocab_size = get_int(of_target, "vocab_size", 0) or None
    with _naming("draft model", folder):
        check_unquantized(names)
        fields = read_json(folder / "config.json")
        if algorithm == "NEXTN":
            config = mtp_config(ModelConfig.from_folder(folder), names, layers, hidden)
        elif algorithm == "EAGLE3":
            config = eagle3_config(fields, names, layers, hidden)
        elif algorithm in BLOCK_ALGORITHMS:
            config = block_config(fields, names, layers, hidden)
        elif layers is None or hidden is None:
            raise ConfigError("--target-model-path: an EAGLE head shares its target's output matrix; give its folder")
        else:
            config = eagle_config(fields, names, layers, hidden)
        size = get_int(fields, "draft_window_size", config.window.size, minimum=0)
        sinks = get_int(fields, "draft_sink_size", MIN_SINKS, minimum=MIN_SINKS)
        check_vocabulary(config, vocab_size)
    return replace(config, window=ContextWindow(size, sinks))


def asked_window(options: DraftOptions, own: ContextWindow) -> ContextWindow:
    """Return the window that the options ask for, or else the draft model's own."""
    size, sinks = options.speculative_draft_window_size, options.speculative_draft_sink_size
    return ContextWindow(size, max(sinks, MIN_SINKS)) if size else own


def draft_name(options: DraftOptions) -> str:
    """Return the draft model's folder, or its hub id with the revision that the options name; "" for none."""
    name, revision = options.speculative_draft_model_path, options.speculative_draft_model_revision
    return f"{name}@{revision}" if name and revision and is_hub_id(name) and not Path(name).is_dir() else name


def draft_folder(options: DraftOptions, algorithm: str) -> Path:
    """Return the folder that holds the draft model; the target's for NEXTN, unless another is given."""
    option, name = "--speculative-draft-model-path", draft_name(options)
    if not name and algorithm != "NEXTN":
        raise ConfigError(f"{option}: {algorithm} needs a draft model; name its folder or hub id")
    if not name:
        option, name = "--target-model-path", options.target_model_path
    if not name:
        raise ConfigError("--speculative-draft-model-path: NEXTN needs it, or --target-model-path for its modules")
    # The kind of a local folder is checked first, because a head need not have a tokenizer.
    is_local = os.path.isdir(expand(name))
    with under(option):
        folder = resolve_model(name, needs_tokenizer=algorithm == "STANDALONE" and not is_local)
    check_kind(algorithm, folder)
    if algorithm == "STANDALONE":
        check_model_folder(folder)
    return folder


def head_folders() -> list[Path]:
    """Return the folders that may hold heads, in the order in which they are searched."""
    if os.environ.get(HEADS_VARIABLE):
        return [expand(os.environ[HEADS_VARIABLE])]
    checkout = Path(__file__).resolve().parents[3] / "models"
    return [checkout, Path(sys.prefix) / "share" / "outrider" / "models"]


def shipped_head(target: str) -> Path | None:
    """Return the folder of the head that ships for the target of this name or folder; None unless it is complete."""
    if not is_default_target(target):
        return None
    folders = [folder / f"{DEFAULT_MODEL}-EAGLE3" for folder in head_folders()]
    return next((folder for folder in folders if all((folder / name).is_file() for name in _HEAD_FILES)), None)


def is_default_target(target: str) -> bool:
    """Whether a target is the default one: by its name, or because its folder was converted from the same file."""
    if target.lower() in DEFAULT_ALIASES:
        return True
    folder = expand(target)
    if not target or not folder.is_dir():
        return False
    try:
        return read_json(folder / MANIFEST_FILE).get("source") == DEFAULT_WHEEL.requirement
    except ConfigError:
        return False


def choose_drafters(
    options: DraftOptions, target: str = "", notify: Callable[[str], object] = _logger.info
) -> DraftOptions:
    """Return the options with drafters for a target instead of AUTO: its head and n-grams, or n-grams alone.

    `target` is verify's option; if empty, it is --target-model-path, or else the default. `notify` gets the reason if
    n-grams are alone.
    """
    if options.speculative_algorithm != AUTO:
        return options
    target = target or options.target_model_path or DEFAULT_MODEL
    if options.speculative_draft_model_path:
        raise ConfigError(
            "--speculative-draft-model-path: its kind of drafter is not given; give --speculative-algorithm EAGLE3, "
            "EAGLE, DFLASH, DSPARK, NEXTN or STANDALONE"
        )
    head = shipped_head(target)
    if head is None:
        where = ", ".join(map(str, head_folders()))
        why = f"its head is not in {where}" if is_default_target(target) else f"no head ships for {target}"
        notify(f"only n-grams draft: {why}")
        return replace(options, speculative_algorithm=("NGRAM",), speculative_draft_model_path="")
    return replace(
        options,
        speculative_algorithm=("EAGLE3", "NGRAM"),
        speculative_draft_model_path=str(head),
        target_model_path=options.target_model_path or target,
    )


def drafters_of_service(options: DraftOptions, target: str = "") -> DraftOptions:
    """Return what `choose_drafters` does, or n-grams alone if the options name a draft model but not its kind."""
    try:
        return choose_drafters(options, target)
    except ConfigError as error:
        return without_model(options, error)


def can_do_without_model(options: DraftOptions | VerifyOptions) -> bool:
    """Whether the options name n-grams beside a model, or let drafters be chosen."""
    names = options.speculative_algorithm
    return names == AUTO or ("NGRAM" in names and len(names) > 1)


def without_model(options: DraftOptions, error: OutriderError) -> DraftOptions:
    """Return the options with n-grams alone, for a draft model that cannot draft; the log says why.

    There are drafts even without the model, and a supervisor would start the service again and again with the same
    options. Raises ConfigError if the options name nothing but the model.
    """
    if not can_do_without_model(options):
        raise ConfigError(error.message) from error
    name = options.speculative_draft_model_path or "the draft model"
    _logger.error("only n-grams draft, %s is not used: %s", name, error.message)
    return replace(options, speculative_algorithm=("NGRAM",), speculative_draft_model_path="")
