"""The heads that ship with Outrider, and which drafters guess where nothing is said about it. Torch-free.

A head lies in `models/<target>-EAGLE3`: at the top of a source checkout, or below share/outrider of an installation.
$OUTRIDER_HEADS names another folder in the place of `models/`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outrider.config.base import expand
from outrider.config.draft import AUTO, DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, OutriderError
from outrider.logs import get_logger
from outrider.models.fields import read_json
from outrider.models.store import DEFAULT_ALIASES, DEFAULT_MODEL, DEFAULT_WHEEL
from outrider.models.store_folder import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE

HEADS_VARIABLE = "OUTRIDER_HEADS"
_FILES = (CONFIG_FILE, WEIGHTS_FILE)

_logger = get_logger(__name__)


def head_folders() -> list[Path]:
    """Folders that may hold heads, the first one first."""
    if os.environ.get(HEADS_VARIABLE):
        return [expand(os.environ[HEADS_VARIABLE])]
    checkout = Path(__file__).resolve().parents[2] / "models"
    return [checkout, Path(sys.prefix) / "share" / "outrider" / "models"]


def shipped_head(target: str) -> Path | None:
    """The head that was trained for the target of this name or folder and is here in full; None if there is none."""
    if not is_default_target(target):
        return None
    folders = [folder / f"{DEFAULT_MODEL}-EAGLE3" for folder in head_folders()]
    return next((folder for folder in folders if all((folder / name).is_file() for name in _FILES)), None)


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
    options: DraftOptions, target: str = "", say: Callable[[str], object] = _logger.info
) -> DraftOptions:
    """The options with drafters for a target in the place of AUTO: its head and n-grams, or n-grams alone.

    `target` is what verify was told; empty takes --target-model-path, or else the default. `say` is told why where
    n-grams are alone.
    """
    if options.speculative_algorithm != AUTO:
        return options
    target = target or options.target_model_path or DEFAULT_MODEL
    if options.speculative_draft_model_path:
        raise ConfigError(
            "--speculative-draft-model-path: nothing says what it holds; give --speculative-algorithm EAGLE3, EAGLE, "
            "DFLASH, DSPARK, NEXTN or STANDALONE"
        )
    head = shipped_head(target)
    if head is None:
        where = ", ".join(map(str, head_folders()))
        why = f"its head is not in {where}" if is_default_target(target) else f"no head ships for {target}"
        say(f"n-grams alone draft: {why}")
        return replace(options, speculative_algorithm=("NGRAM",), speculative_draft_model_path="")
    return replace(
        options,
        speculative_algorithm=("EAGLE3", "NGRAM"),
        speculative_draft_model_path=str(head),
        target_model_path=options.target_model_path or target,
    )


def drafters_of_service(options: DraftOptions, target: str = "") -> DraftOptions:
    """What `choose_drafters` finds; n-grams alone for a draft model of which nobody has said what it is."""
    try:
        return choose_drafters(options, target)
    except ConfigError as error:
        return without_model(options, error)


def can_do_without_model(options: DraftOptions | VerifyOptions) -> bool:
    """Whether n-grams are among the drafters named, beside a model, or may be chosen."""
    names = options.speculative_algorithm
    return names == AUTO or ("NGRAM" in names and len(names) > 1)


def without_model(options: DraftOptions, error: OutriderError) -> DraftOptions:
    """The options with n-grams alone, for a draft model that cannot draft; the log says why.

    Without it there are drafts all the same, and a supervisor would start the service with the same options again, for
    ever. Raises ConfigError where there is nothing but the model.
    """
    if not can_do_without_model(options):
        raise ConfigError(error.message) from error
    name = options.speculative_draft_model_path or "the draft model"
    _logger.error("n-grams alone draft, and %s is not used: %s", name, error.message)
    return replace(options, speculative_algorithm=("NGRAM",), speculative_draft_model_path="")
