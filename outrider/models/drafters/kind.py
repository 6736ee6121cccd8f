"""Which kind of drafter a folder holds, told by the names of its tensors."""

from __future__ import annotations

from pathlib import Path

from outrider.models.drafters.stored import MTP_PREFIX, head_name
from outrider.models.weights import shard_paths, tensor_shapes


def algorithm_of(folder: Path) -> str:
    """EAGLE3, EAGLE, NEXTN or STANDALONE, as `--speculative-algorithm` has it.

    A checkpoint with an MTP head counts as NEXTN, though it may be a language model besides.

    Raises:
        ConfigError: the folder has no safetensors.
    """
    names = [name for path in shard_paths(folder) for name in tensor_shapes(path)]
    if any(name.startswith(MTP_PREFIX) for name in names):
        return "NEXTN"
    found = {head_name(name) for name in names}
    if "layers.0.hidden_norm.weight" in found:
        return "EAGLE3"
    return "EAGLE" if "fc.weight" in found else "STANDALONE"
