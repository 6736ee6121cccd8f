"""Which cores an engine's process runs on."""

from __future__ import annotations

import os
import re

from outrider.errors import ConfigError
from outrider.logs import get_logger

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")

log = get_logger(__name__)


def keep_to(text: str) -> None:
    """From now on the calling thread, and threads that it starts, run on these cores alone; on any if `text` is empty.

    `text` is a list as `taskset -c` takes it: "4", "0,8-11". Raises ConfigError, naming --engine-cpus.
    """
    if not text.strip():
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--engine-cpus: this system does not let a process choose its cores; leave it empty")
    wanted, allowed = _parse(text), os.sched_getaffinity(0)
    if missing := sorted(wanted - allowed):
        raise ConfigError(
            f"--engine-cpus: {text!r} names core {missing[0]}; this process may run on {_ranges(allowed)}, choose of "
            "those"
        )
    os.sched_setaffinity(0, wanted)
    log.info("the engine runs on cores %s alone", _ranges(wanted))


def _parse(text: str) -> set[int]:
    cores: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ConfigError(f"--engine-cpus: {text!r} is no list of cores; write it like 4 or 0,8-11")
        cores.update(range(first, last + 1))
    return cores


def _ranges(cores: set[int]) -> str:
    """As short as they can be written: "0,8-11"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
