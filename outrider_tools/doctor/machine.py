"""Checks of the machine: packages, shared memory, namespaces, disk; with torch's help, GPUs and models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from outrider.cli.options import first_gpu
from outrider.cli.placement import num_gpus
from outrider.config.base import expand, options_to_argv
from outrider.config.draft import AUTO, DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import OutriderError
from outrider.host.line import host_id
from outrider.models.store import DEFAULT_ALIASES, converted_default, default_cache_dir, is_hub_id, local_folder
from outrider.models.store_folder import CONFIG_FILE
from outrider_tools.doctor import Finding, Level, ok, problem, warning

_GIB = 2**30
_LEAST_CACHE = _GIB
"""The default model needs 0.8 GB for a moment; others need their own size."""
_LEAST_SHM = 64 << 20
_OPTIONAL = ("triton", "flashinfer-python", "humming-kernels")
_PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "humming-kernels",
    "grpcio",
    "protobuf",
    "tokenizers",
    "llguidance",
)
PROBE_SECONDS = 180.0
_FAST_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")
_FIXES = {
    "target": "choose another --model, or fetch it: outrider models pull NAME",
    "draft model": "choose another --speculative-draft-model-path or --speculative-algorithm (docs/drafters.md)",
    "handshake": "use a drafter that was made for this target",
}


def check_packages() -> Iterator[Finding]:
    """List package versions, and find those out of the range that Outrider requires."""
    found = {name: _version(name) for name in _PACKAGES}
    text = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    missing = [name for name in _OPTIONAL if not found[name]]
    yield ok("packages", text + (f"; not installed: {', '.join(missing)} (only GPUs use them)" if missing else ""))
    wrong = list(_out_of_range())
    if wrong:
        yield problem("packages", "; ".join(wrong), "pip install -r requirements.txt, or make setup")


def _out_of_range() -> Iterator[str]:
    try:
        wanted = [Requirement(text) for text in requires("outrider") or ()]
    except PackageNotFoundError:
        return
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        number = _version(requirement.name)
        if not number:
            yield f"{requirement.name} is not installed, {requirement.specifier} is wanted"
        elif not requirement.specifier.contains(number.partition("+")[0], prereleases=True):
            yield f"{requirement.name} is {number}, {requirement.specifier} is wanted"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_shared_memory() -> Iterator[Finding]:
    """Check the room in /dev/shm, and note the namespaces that services on one GPU host must share (docs/gpu.md)."""
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        text = f"/dev/shm: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
        fix = "give the container more: --shm-size=1g, or shm_size in Compose"
        yield ok("shared memory", text) if usage.free >= _LEAST_SHM else warning("shared memory", text, fix)
    own = namespaces("self")
    if own and num_gpus():
        text = f"IPC {own['ipc']}, PID {own['pid']}, host {host_id()[:8] or 'unknown'}"
        yield ok("namespaces", f"{text}; where verify and draft see the same three, they share the GPU's memory")


def namespaces(pid: int | str) -> dict[str, str]:
    """Return the numbers of a process's IPC and PID namespaces; empty if the system or this user's rights hide them."""
    try:
        links = {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in ("ipc", "pid")}
    except OSError:
        return {}
    return {name: link.partition("[")[2].rstrip("]") for name, link in links.items()}


def check_neighbours() -> Iterator[Finding]:
    """Check whether the verify and draft services that run here could share GPU memory."""
    found: dict[str, dict[str, dict[str, str]]] = {"verify_service": {}, "draft_service": {}}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        for module in found:
            spaces = namespaces(process.pid) if module in words else {}
            if spaces:
                found[module][f"{module} {process.pid}"] = spaces
    apart = [
        f"{one} and {other}"
        for one, spaces in found["verify_service"].items()
        for other, others in found["draft_service"].items()
        if spaces != others
    ]
    if apart:
        fix = "where both are on GPUs of this host, let them share both namespaces (docs/gpu.md)"
        text = f"{', '.join(apart)} are in different IPC or PID namespaces: features travel by gRPC"
        yield warning("namespaces", text, fix)
    elif all(found.values()):
        yield ok("namespaces", "verify and draft services that run here share IPC and PID namespaces")


def check_disk() -> Iterator[Finding]:
    """Check the room where models are kept."""
    folder = default_cache_dir()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield problem("disk", f"{folder} cannot be written", "set OUTRIDER_HOME to a folder of your own")
        return
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / _GIB:.1f} GiB free"
    if free < _LEAST_CACHE:
        yield warning("disk", text, "free some, or set OUTRIDER_HOME to another disk: a model needs its size")
    else:
        yield ok("disk", text)


def check_models(verify: VerifyOptions, draft: DraftOptions) -> list[Finding]:
    """Find what a start with these options would find before it reads weights.

    If `draft` still is AUTO, its drafters could not be placed, and none is checked. With an empty model name of
    `verify`, only GPUs and CPU are checked.
    """
    findings: list[Finding] = []
    asked: DraftOptions | None = None
    if any(name not in ("NGRAM", *AUTO) for name in draft.speculative_algorithm):
        asked = replace(draft, target_model_path=draft.target_model_path or verify.model)
    elif draft.speculative_algorithm != AUTO:
        findings.append(ok("draft model", f"{', '.join(draft.speculative_algorithm)} needs none"))
    is_here = _is_here(verify.model)
    if not is_here:
        findings.append(warning("target", f"{verify.model} is not here yet", f"outrider models pull {verify.model}"))
    try:
        answer = run_probe(verify.model, asked, verify.model_impl) if is_here else run_probe("", None)
    except OutriderError as error:
        fix = "python -c 'import torch; print(torch.cuda.is_available())' may say more"
        return [*findings, problem("torch", error.message, fix)]
    for found in answer["models"]:
        level = Level(found["level"])
        findings.append(
            Finding(found["check"], level, found["text"], "" if level is Level.OK else _FIXES[found["check"]])
        )
    return [*findings, *check_devices(answer, verify, draft)]


def run_probe(target: str, draft: DraftOptions | None, impl: str = "auto") -> dict[str, Any]:
    """Return the answer of `outrider_tools.doctor.probe`, which fetches nothing. Raises OutriderError."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outrider_tools.doctor.probe", target, impl]
    # Secrets are not passed on.
    command += options_to_argv(draft) if draft is not None else []
    what = "the process that looks at torch, GPUs and models"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise OutriderError(f"{what} did not finish within {PROBE_SECONDS:g} s") from None
    except OSError as error:
        raise OutriderError(f"{what} cannot be started: {error.strerror}") from None
    if done.returncode != 0 or not done.stdout.strip():
        last = next(iter(done.stderr.strip().splitlines()[-1:]), "nothing said")
        raise OutriderError(f"{what} ended with {done.returncode}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _is_here(name: str) -> bool:
    """Whether looking at a model fetches nothing. Also true for impossible names: the probe has the better error."""
    if name.lower() in DEFAULT_ALIASES:
        return converted_default() is not None
    return not is_hub_id(name) or expand(name).is_dir() or os.path.isfile(local_folder(name) / CONFIG_FILE)


def check_devices(answer: Mapping[str, Any], verify: VerifyOptions, draft: DraftOptions) -> Iterator[Finding]:
    """Yield findings on the probe's answer: GPUs and how they reach each other, or what a CPU offers."""
    gpus = answer["gpus"]
    if not gpus:
        yield from _check_cpu(answer, verify, draft)
        return
    driver = driver_version()
    yield ok("gpu", f"{len(gpus)}, driver {driver or 'unknown'}, torch for CUDA {answer['torch']['cuda'] or 'none'}")
    for index, gpu in enumerate(gpus):
        major, minor = gpu["capability"]
        text = (
            f"{index}: {gpu['name']}, {gpu['free'] / _GIB:.1f} of {gpu['total'] / _GIB:.1f} GiB free, sm_{major}{minor}"
        )
        if major < 8:
            yield warning("gpu", text, "kernels and bfloat16 want compute capability 8.0 or more; try --device cpu")
        elif major != 9:
            yield warning(
                "gpu", text, "the kernels were written for Hopper (sm_90) and have not been tried on this one"
            )
        elif gpu["free"] < 0.5 * gpu["total"]:
            yield warning("gpu", text, "end what else runs on it, or lower --mem-fraction-static")
        else:
            yield ok("gpu", text)
    last = first_gpu(verify.device) + verify.tensor_parallel_size
    if last > len(gpus) and verify.device != "cpu":
        text = f"--device {verify.device} with --tensor-parallel-size {verify.tensor_parallel_size} needs {last} GPUs"
        yield problem("gpu", text, "lower it, or --device")
    apart = [(a, b) for a, row in enumerate(answer["peers"]) for b, reached in enumerate(row) if a < b and not reached]
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart)
        yield warning(
            "peer access",
            f"no direct access between GPUs {pairs}",
            "features then travel by gRPC, and ranks use NCCL; see docs/gpu.md",
        )
    elif len(gpus) > 1:
        yield ok("peer access", "every GPU reaches every other one's memory")


def _check_cpu(answer: Mapping[str, Any], verify: VerifyOptions, draft: DraftOptions) -> Iterator[Finding]:
    torch_info = answer["torch"]
    wanted = [
        f"--{word}device {options.device}"
        for word, options in (("", verify), ("draft-", draft))
        if "cuda" in options.device
    ]
    if wanted:
        fix = "install a CUDA build of torch and the driver, or use --device cpu"
        yield problem("gpu", f"torch sees none, and {' and '.join(wanted)} asks for one", fix)
    if Path("/dev/nvidiactl").exists() or driver_version():
        fix = "install a CUDA build: TORCH_INDEX=https://download.pytorch.org/whl/cu130"
        yield warning("gpu", f"there is a driver, but torch {torch_info['version']} sees no GPU", fix)
    elif not wanted:
        yield ok("gpu", "none: models run on the CPU")
    found = [flag for flag in _FAST_FLAGS if flag in torch_info["cpu_flags"]]
    text = f"{torch_info['machine']}, torch uses {torch_info['cpu']}; has {', '.join(found) or 'no wide vectors'}"
    dtype, why = torch_info["cpu_dtype"]
    if dtype == "bfloat16":
        yield ok("cpu", f"{text}: models run in bfloat16 ({why})")
    else:
        yield warning("cpu", f"{text}: {why}", "float32 is used, at twice the memory")


def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.split()), "") if done.returncode == 0 else ""
