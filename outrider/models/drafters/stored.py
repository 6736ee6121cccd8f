"""The tensors of a head's checkpoint under one set of names, whatever its origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.drafters.head import EMBEDDING, OUTPUT
from outrider.models.weights import open_shard, shard_paths, tensor_shapes

MTP_PREFIX = "model.mtp_layers.0."
MTP_OUTSIDE = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, under its name there."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor on the CPU, in its own dtype."""
        with open_shard(self.path) as shard:
            found: Tensor = shard.get_tensor(self.name)
        return found


def head_name(name: str) -> str | None:
    """Our name of an EAGLE or EAGLE-3 head's tensor; None for one that is not read."""
    name = name.removeprefix("model.")
    if name == "t2d" or name.endswith(".rotary_emb.inv_freq"):
        return None
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def mtp_name(name: str) -> str | None:
    """Our name of a tensor of a MiMo checkpoint; None for one of the target alone."""
    if name.startswith(MTP_PREFIX):
        rest = name.removeprefix(MTP_PREFIX)
        return rest if rest.startswith(MTP_OUTSIDE) else f"layers.0.{rest}"
    return {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}.get(name)


def stored_tensors(folder: Path, rename: Callable[[str], str | None]) -> dict[str, Stored]:
    """All tensors that `rename` names.

    Raises:
        ConfigError: the folder has no safetensors, or two tensors of one name.
    """
    found: dict[str, Stored] = {}
    for path in shard_paths(folder):
        for name, shape in tensor_shapes(path).items():
            ours = rename(name)
            if ours is None:
                continue
            if ours in found:
                raise ConfigError(f"{path}: tensor {name} is there twice, also as {found[ours].name}")
            found[ours] = Stored(path, name, shape)
    return found


def shared_tensors(target: Path) -> dict[str, Stored]:
    """Embedding and output matrix of a target's folder, the same tensor where they are tied."""
    found = stored_tensors(target, {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}.get)
    if EMBEDDING not in found:
        raise ConfigError(f"{target}: tensor model.embed_tokens.weight missing from the checkpoint")
    return {OUTPUT: found[EMBEDDING], **found}


def check_tensors(stored: Mapping[str, Stored], expected: Mapping[str, Tensor], folder: Path) -> None:
    """Compare names and shapes.

    Raises:
        ConfigError: names file, tensor and both shapes.
    """
    for name, tensor in stored.items():
        if name not in expected:
            raise ConfigError(f"{tensor.path}: unexpected tensor {tensor.name}; config.json does not call for it")
        if tensor.shape != tuple(expected[name].shape):
            raise ConfigError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, the draft's config.json calls "
                f"for {list(expected[name].shape)}"
            )
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{folder}: tensor {missing[0]}{more} missing from the checkpoint")
