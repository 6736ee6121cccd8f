"""Choose where drafters run: in a draft service, or colocated: in verify's rounds on a GPU, in its process on a CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from outrider.cli.cluster import SHARED, flag_names, is_default, num_cores
from outrider.config.draft import (
    ALGORITHMS,
    AUTO,
    BLOCK_ALGORITHMS,
    DRAFTING,
    NAIVE_EAGLE,
    DraftOptions,
    check_drafters,
)
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import choose_drafters, shipped_head

PLACEMENTS = ("auto", "remote", "colocated")
NGRAM = ("NGRAM",)
ROUND_MODELS = ("EAGLE3", "EAGLE", *BLOCK_ALGORITHMS, "NEXTN", "STANDALONE", NAIVE_EAGLE)
"""Algorithms that can draft inside rounds; the last one can only draft there."""
_OTHERS = tuple(
    field.name for field in fields(DraftOptions) if field.name not in (*DRAFTING, *SHARED, "target_model_path")
)
"""Options that only a draft service has, its address and secrets among them."""
_MAX_STEPS = 16
"""Highest --speculative-num-steps that verify takes."""
_CORES_FOR_TWO = 4
"""From this many cores on, a draft service is faster than drafters in verify's process. Measured with the default model
and drafters, one request, Xeons with AMX: 0.84 times as fast on 2 cores, 1.07 on 4, 1.12 on 8."""

Notify = Callable[[str], object]


@dataclass(frozen=True)
class Placed:
    """Options of verify and draft, with drafters chosen and the draft model assigned to one of the two."""

    verify: VerifyOptions
    draft: DraftOptions | None
    """None if no draft service is needed, since all drafters run in verify."""


def place_drafts(verify: VerifyOptions, draft: DraftOptions, placement: str, gpus: int, notify: Notify) -> Placed:
    """Choose drafters where that was left open, and the service that runs them; `placement` is one of PLACEMENTS.

    `notify` gets the reason if n-grams draft alone, and the names of options that change nothing.

    Raises ConfigError for combinations that are not supported.
    """
    if is_colocated(verify, draft, placement, gpus):
        return _colocate(verify, draft, notify, is_on_gpu(verify, gpus))
    if NAIVE_EAGLE in draft.speculative_algorithm:
        raise ConfigError(
            "--speculative-algorithm: NAIVE_EAGLE drafts inside rounds on a GPU alone; give --draft-placement "
            "colocated there, or use EAGLE3 or EAGLE"
        )
    return Placed(verify, draft_for(draft, verify, gpus, notify))


def is_on_gpu(verify: VerifyOptions, gpus: int) -> bool:
    """Whether verify uses a GPU."""
    return gpus > 0 and verify.device != "cpu"


def is_colocated(verify: VerifyOptions, draft: DraftOptions, placement: str, gpus: int) -> bool:
    """Whether drafters run with verify: the draft model if verify is on a GPU, all drafters on a CPU."""
    if placement != "auto":
        return placement == "colocated"
    on_gpu, names = is_on_gpu(verify, gpus), draft.speculative_algorithm
    if on_gpu and NAIVE_EAGLE in names:
        return True
    if (
        gpus > (verify.tensor_parallel_size if on_gpu else 0)
        or verify.lockstep
        or verify.no_speculation
        or (on_gpu and verify.plans_on_host)
        or not is_default(draft, "device")
    ):
        return False
    if not on_gpu and (num_cores() >= _CORES_FOR_TWO or _given_draft_service_flags(draft)):
        return False
    if names == AUTO:
        return not draft.speculative_draft_model_path and shipped_head(verify.model) is not None
    return any(name in (ROUND_MODELS if on_gpu else ALGORITHMS) for name in names)


def _given_draft_service_flags(draft: DraftOptions) -> list[str]:
    """Return the given options that only a draft service has, as `outrider up` spells them."""
    return [flag_names().get(("draft", name), name) for name in _OTHERS if not is_default(draft, name)]


def _colocate(verify: VerifyOptions, draft: DraftOptions, notify: Notify, on_gpu: bool) -> Placed:
    """Move the draft model to verify; on a CPU n-grams, too, while on a GPU a draft service keeps them, if named."""
    if verify.lockstep:
        raise ConfigError("--lockstep: it is for draft services; leave it out, or give --draft-placement remote")
    draft = choose_drafters(draft, verify.model, notify)
    names = [name for name in draft.speculative_algorithm if name != "NGRAM"]
    if not on_gpu and (foreign := _given_draft_service_flags(draft)):
        raise ConfigError(
            f"--draft-placement: colocated has no draft service on a CPU, but {', '.join(foreign)} of one is set; "
            "leave it out, or use remote"
        )
    if not names and on_gpu:
        raise ConfigError(
            f"--draft-placement: colocated is for a draft model, and NGRAM has none; give --speculative-algorithm one "
            f"of {', '.join(ROUND_MODELS)}, or use remote"
        )
    check_drafters(draft.speculative_algorithm, False, *((NAIVE_EAGLE,) if on_gpu else ()))
    if draft.speculative_num_steps > _MAX_STEPS:
        raise ConfigError(
            f"--speculative-num-steps: {draft.speculative_num_steps} is above {_MAX_STEPS}, the most inside a round; "
            "lower it, or give --draft-placement remote"
        )
    moved: dict[str, Any] = {name: getattr(draft, name) for name in DRAFTING}
    # Pass n-grams on, too: on a GPU verify leaves them to the draft service, and starts even if the model cannot draft.
    verify = replace(verify, **moved)
    if not on_gpu:
        return Placed(verify, None)
    if "NGRAM" not in draft.speculative_algorithm:
        if foreign := _given_draft_service_flags(draft):
            notify(f"a draft model inside rounds runs without a draft service: {', '.join(foreign)} has no effect")
        return Placed(verify, None)
    unset: dict[str, Any] = {field.name: field.default for field in fields(DraftOptions) if field.name in DRAFTING}
    return Placed(verify, replace(draft, **unset | {"speculative_algorithm": NGRAM}))


def draft_for(draft: DraftOptions, verify: VerifyOptions, gpus: int, notify: Notify) -> DraftOptions:
    """Return the draft service's options, with drafters chosen if that was left open."""
    is_open = draft.speculative_algorithm == AUTO and not draft.speculative_draft_model_path
    if is_open and is_on_gpu(verify, gpus) and gpus <= verify.tensor_parallel_size and is_default(draft, "device"):
        if shipped_head(verify.model) is not None:
            notify("only n-grams draft: a remote head needs a GPU of its own, or --draft-device")
        return replace(draft, speculative_algorithm=NGRAM)
    return choose_drafters(draft, verify.model, notify)


def place_draft_model(draft: DraftOptions, verify: VerifyOptions, target: Path, gpus: int) -> DraftOptions:
    """Fill in options that a draft service with a model needs, where they were left at their defaults.

    The service gets the target's folder, for heads that share the target's matrices, and a free GPU if there is one.
    """
    if is_default(draft, "target_model_path"):
        draft = replace(draft, target_model_path=str(target))
    ranks = verify.tensor_parallel_size
    if gpus > ranks and is_default(draft, "device") and verify.device in ("auto", "cuda", "cuda:0"):
        draft = replace(draft, device=f"cuda:{ranks}")
    return draft


def num_gpus() -> int:
    """Return the number of GPUs that the services may use, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ignores everything after the first invalid entry.
        return len(list(takewhile(lambda name: name.strip() not in ("", "-1"), visible.split(","))))
    devices = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in devices.iterdir()) if devices.is_dir() else 0
