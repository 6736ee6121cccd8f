"""From the options on the command line to a cluster that may start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from rich.console import Console

from outrider.cli.child import LineSink
from outrider.cli.cluster import Cluster
from outrider.cli.wiring import is_default
from outrider.config.draft import AUTO, DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.config.verify import VerifyOptions
from outrider.models.shipped import choose_drafters, shipped_head
from outrider.models.store import resolve_model


def make_cluster(
    options: Mapping[str, ServiceOptions], console: Console, on_line: LineSink, *, fixed_ports: bool, supervise: bool
) -> Cluster:
    """A cluster with these options, not started yet; its model is fetched first, with progress on stderr.

    `on_line` takes the services' log lines; what befalls them is told on `console`.
    Raises ConfigError when there is no such model.
    """
    verify, draft = cast(VerifyOptions, options["verify"]), cast(DraftOptions, options["draft"])
    target = resolve_model(verify.model)
    gpus = num_gpus()
    draft = draft_for(draft, verify, gpus, lambda text: console.print(f"outrider: {text}", soft_wrap=True))
    if draft.speculative_algorithm != ("NGRAM",):
        draft = place_draft_model(draft, verify, target, gpus)
    if verify.lockstep and draft.speculative_num_draft_tokens and is_default(verify, "max_draft_tokens"):
        verify = replace(verify, max_draft_tokens=draft.speculative_num_draft_tokens)
    return Cluster(
        gateway=cast(GatewayOptions, options["gateway"]),
        verify=verify,
        draft=draft,
        fixed_ports=fixed_ports,
        supervise=supervise,
        on_line=on_line,
        on_event=lambda text: console.print(f"outrider: {text}", soft_wrap=True),
    )


def draft_for(draft: DraftOptions, verify: VerifyOptions, gpus: int, say: Callable[[str], object]) -> DraftOptions:
    """The options with drafters chosen where that was left open; `say` is told why where n-grams are alone."""
    on_gpu = gpus and verify.device != "cpu"
    is_open = draft.speculative_algorithm == AUTO and not draft.speculative_draft_model_path
    if is_open and gpus == 1 and on_gpu and is_default(draft, "device"):
        if shipped_head(verify.model) is not None:
            say("n-grams alone draft: a head wants a GPU of its own, or --draft-device")
        return replace(draft, speculative_algorithm=("NGRAM",))
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
