"""Start a benchmark's services from its command line, and measure what their processes cost."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from outrider.cli.cluster import Cluster
from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.models.drafters.kinds import choose_drafters
from outrider_tools.bench.report import cpu_name


@dataclass(frozen=True)
class Cost:
    """Resources that all processes of a service have used so far."""

    cpu_seconds: float
    resident_mib: float
    gpu_mib: float
    """GPU memory of the processes; 0 without a GPU, or if the driver does not tell."""


def cost_of(pid: int) -> Cost:
    """Return the cost of a process and all its descendants."""
    family = psutil.Process(pid)
    members = [family, *family.children(recursive=True)]
    cpu = resident = 0.0
    for member in members:
        # A process may end after it was listed.
        try:
            cpu += sum(member.cpu_times()[:2])
            resident += member.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    on_gpu = gpu_memory()
    return Cost(cpu, resident, sum(on_gpu.get(member.pid, 0.0) for member in members))


def gpu_memory() -> dict[int, float]:
    """Return the MiB on all GPUs by process id; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found: dict[int, float] = {}
    for line in done.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            found[int(pid)] = found.get(int(pid), 0.0) + float(used)
    return found


PROMPTS = Path(__file__).resolve().parent / "prompts" / "cpu.jsonl"


def add_service_arguments(parser: argparse.ArgumentParser, label: str) -> None:
    """Add options for the services' model, devices and other options, and for the results."""
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--label", default=label, help=f"the model's name in results; default {label}")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSONL, with "turns" or "prompt"')
    parser.add_argument("--verify-device", default="auto")
    parser.add_argument("--draft-device", default="auto")
    parser.add_argument("--verify-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--draft-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--verbose", action="store_true", help="print the services' log lines")
    parser.add_argument("--out", type=Path)


def verify_options(arguments: argparse.Namespace, argv: Sequence[str] = ()) -> VerifyOptions:
    """Return verify's options, with `argv`; options of the command line override them. Raises ConfigError."""
    options = [f"--model={arguments.model}", f"--device={arguments.verify_device}", *argv, *arguments.verify_option]
    return parse_options(VerifyOptions, options)


def draft_options(arguments: argparse.Namespace, argv: Sequence[str] = ()) -> DraftOptions:
    """Return the draft service's options in the same way, with drafters as it would choose. Raises ConfigError."""
    options = parse_options(DraftOptions, [f"--device={arguments.draft_device}", *argv, *arguments.draft_option])
    return choose_drafters(options, arguments.model)


def printer(verbose: bool) -> Callable[[str, str], None]:
    """Return a function that prints lines of services' logs: all of them, or only errors."""

    def on_line(name: str, line: str) -> None:
        if verbose or " ERROR " in line or "Traceback" in line:
            print(f"{name}: {line}", flush=True)

    return on_line


def make_cluster(arguments: argparse.Namespace, verify: Sequence[str] = (), draft: Sequence[str] = ()) -> Cluster:
    """Make all three services, not started yet. Raises ConfigError."""
    return Cluster(
        verify=verify_options(arguments, verify),
        draft=draft_options(arguments, draft),
        on_line=printer(arguments.verbose),
    )


def device_name() -> str:
    """Return the names of the GPUs, or the processor's without a GPU."""
    if not torch.cuda.is_available():
        return cpu_name()
    return " + ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
