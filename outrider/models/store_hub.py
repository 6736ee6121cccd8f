"""Models by their Hugging Face hub id. Data files alone are fetched, and no code that comes with a model ever runs."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.progress import Progress
from outrider.models.store_folder import check_model_folder

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)

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


def fetch_from_hub(name: str, cache_dir: Path | None, progress: Progress, needs_tokenizer: bool = True) -> Path:
    """The folder of a hub model's snapshot, downloaded as far as it is not there yet.

    `name` is owner/name, with @revision at will. Files go to `cache_dir`, or to the hub library's own cache, which
    other programs share. Raises ConfigError when the hub cannot be reached, refuses, or the model is unusable.
    """
    match = HUB_ID.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is not a hub id; it has the form owner/name or owner/name@revision")
    # Imported here: it takes a while, and most starts need no hub.
    from huggingface_hub import snapshot_download

    progress(f"fetching {name} from the Hugging Face hub", 0, 0)
    try:
        folder = snapshot_download(
            match["repo"], revision=match["revision"], cache_dir=cache_dir, allow_patterns=list(FILES)
        )
    except Exception as error:  # The HTTP library underneath, and with it the errors, differs between versions.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"{name} could not be fetched from the Hugging Face hub: {reason}. Check the id, the network and, for a "
            "gated model, HF_TOKEN; or give the path of a local folder"
        ) from error
    check_model_folder(Path(folder), needs_tokenizer)
    return Path(folder)
