"""A model's config.json without its weights."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.store import DEFAULT_ALIASES, DEFAULT_MODEL, default_cache_dir
from outrider.models.store_folder import CONFIG_FILE
from outrider.models.store_hub import is_hub_id


def config_folder(name: str) -> Path:
    """A folder with the config.json of the model called `name`; of a model on the hub that file alone is fetched.

    Raises ConfigError when there is none.
    """
    folder = Path(name).expanduser()
    if name.lower() in DEFAULT_ALIASES:
        folder = default_cache_dir() / "models" / DEFAULT_MODEL
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"{DEFAULT_MODEL} is not here yet; fetch it: outrider models pull")
    elif folder.is_file() and folder.name == CONFIG_FILE:
        folder = folder.parent
    elif not folder.is_dir() and is_hub_id(name):
        return _from_hub(name)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{name}: no {CONFIG_FILE} there; give {DEFAULT_MODEL}, a folder, or a hub id as owner/name")
    return folder


def _from_hub(name: str) -> Path:
    # Imported here: it takes a second.
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(repository, CONFIG_FILE, revision=revision or None)).parent
    except Exception as error:  # The HTTP library underneath, and with it the errors, differs between versions.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"{name}: its {CONFIG_FILE} cannot be fetched: {reason}; give a local folder") from error
