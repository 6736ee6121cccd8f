"""Where a draft model runs: in the draft service, or inside the rounds of verify (colocated)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outrider.cli.cluster import is_default
from outrider.config.draft import AUTO, DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.shipped import choose_drafters, shipped_head

PLACEMENTS = ("auto", "remote", "colocated")
NGRAM = ("NGRAM",)
COLOCATED_MODELS = ("EAGLE3", "EAGLE", "NEXTN", "STANDALONE", "NAIVE_EAGLE")
"""What drafts inside rounds; the last one there alone."""
DRAFTING = tuple(field.name for field in fields(VerifyOptions) if field.name.startswith("speculative_"))
"""Options of a draft model that verify and draft have; without a service's name they say what drafts, wherever."""
_MAX_STEPS = 16
"""--speculative-num-steps of verify at most."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Placed:
    """Options of verify and draft, with drafters chosen and a draft model in its place."""

    verify: VerifyOptions
    draft: DraftOptions | None
    """None where no draft service is needed: the draft model is verify's, and n-grams were not named."""


def place_drafts(verify: VerifyOptions, draft: DraftOptions, placement: str, gpus: int, say: Say) -> Placed:
    """Choose drafters where that was left open, and who runs the draft model; `placement` is one of PLACEMENTS.

    `say` is told why where n-grams are alone. Raises ConfigError for what cannot be had.
    """
    if is_colocated(verify, draft, placement, gpus):
        return _colocate(verify, draft, say)
    if "NAIVE_EAGLE" in draft.speculative_algorithm:
        raise ConfigError(
            "--speculative-algorithm: NAIVE_EAGLE drafts inside rounds on a GPU alone; give --draft-placement "
            "colocated there, or use EAGLE3 or EAGLE"
        )
    return Placed(verify, draft_for(draft, verify, gpus, say))


def is_colocated(verify: VerifyOptions, draft: DraftOptions, placement: str, gpus: int) -> bool:
    """Whether a draft model is to run inside verify's rounds. Raises ConfigError where it was asked for and cannot."""
    on_gpu = gpus > 0 and verify.device != "cpu"
    if placement == "colocated":
        if not on_gpu:
            raise ConfigError(
                "--draft-placement: colocated drafts inside rounds on a GPU, and verify has none here; use remote or "
                "auto"
            )
        return True
    if placement == "remote" or not on_gpu:
        return False
    names = draft.speculative_algorithm
    if "NAIVE_EAGLE" in names:
        return True
    if gpus > 1 or verify.lockstep or verify.no_speculation or not is_default(draft, "device"):
        return False
    if names == AUTO:
        return not draft.speculative_draft_model_path and shipped_head(verify.model) is not None
    return names != NGRAM


def _colocate(verify: VerifyOptions, draft: DraftOptions, say: Say) -> Placed:
    """The options with the draft model at verify, and n-grams, if they are named, at the draft service."""
    if verify.lockstep:
        raise ConfigError("--lockstep: it is for draft services; leave it out, or give --draft-placement remote")
    draft = choose_drafters(draft, verify.model, say)
    names = [name for name in draft.speculative_algorithm if name != "NGRAM"]
    known = ", ".join(COLOCATED_MODELS)
    if not names:
        raise ConfigError(
            f"--draft-placement: colocated is for a draft model, and NGRAM has none; give --speculative-algorithm one "
            f"of {known}, or use remote"
        )
    if len(names) > 1:
        raise ConfigError(
            f"--speculative-algorithm: {','.join(names)} are models and do not run together; use one of them, with or "
            "without NGRAM"
        )
    if names[0] not in COLOCATED_MODELS:
        raise ConfigError(f"--speculative-algorithm: {names[0]!r} is not known; use one of {known}, or NGRAM")
    if draft.speculative_num_steps > _MAX_STEPS:
        raise ConfigError(
            f"--speculative-num-steps: {draft.speculative_num_steps} is above {_MAX_STEPS}, the most inside a round; "
            "lower it, or give --draft-placement remote"
        )
    moved: dict[str, Any] = {name: getattr(draft, name) for name in DRAFTING}
    verify = replace(verify, **moved | {"speculative_algorithm": (names[0],)})
    if "NGRAM" not in draft.speculative_algorithm:
        return Placed(verify, None)
    unset: dict[str, Any] = {field.name: field.default for field in fields(DraftOptions) if field.name in DRAFTING}
    return Placed(verify, replace(draft, **unset | {"speculative_algorithm": NGRAM}))


def draft_for(draft: DraftOptions, verify: VerifyOptions, gpus: int, say: Say) -> DraftOptions:
    """The options of a draft service with drafters chosen where that was left open."""
    on_gpu = gpus and verify.device != "cpu"
    is_open = draft.speculative_algorithm == AUTO and not draft.speculative_draft_model_path
    if is_open and gpus == 1 and on_gpu and is_default(draft, "device"):
        if shipped_head(verify.model) is not None:
            say("n-grams alone draft: a remote head wants a GPU of its own, or --draft-device")
        return replace(draft, speculative_algorithm=NGRAM)
    return choose_drafters(draft, verify.model, say)


def place_draft_model(draft: DraftOptions, verify: VerifyOptions, target: Path, gpus: int) -> DraftOptions:
    """Options of a draft service with a model, where they were left at their defaults.

    It is told of the target's folder, for heads that share its matrices, and takes a GPU of its own if there is one.
    """
    if is_default(draft, "target_model_path"):
        draft = replace(draft, target_model_path=str(target))
    if gpus > 1 and is_default(draft, "device") and verify.device in ("auto", "cuda", "cuda:0"):
        draft = replace(draft, device="cuda:1")
    return draft


def num_gpus() -> int:
    """GPUs that the services may use, without loading what could ask them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    devices = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in devices.iterdir()) if devices.is_dir() else 0
