"""From the options of the draft service to a draft model that runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.config.draft import DraftOptions
from outrider.device import choose_device, choose_dtype
from outrider.errors import ConfigError
from outrider.layers.linear import Linear
from outrider.models.config import ModelConfig, get_int, read_json
from outrider.models.drafters.base import EMBEDDING, OUTPUT, DraftHead, DraftModel
from outrider.models.drafters.config import HeadConfig, eagle3_config, eagle_config, mtp_config
from outrider.models.drafters.heads import Eagle3Head, EagleHead, MtpHead, StandaloneDraft
from outrider.models.drafters.token_ids import cut_output, ids_of_offsets, read_token_map
from outrider.models.loader import SUPPORTED_DTYPES, Progress, load_model
from outrider.models.store import is_hub_id, resolve_model
from outrider.models.store_folder import hash_tokenizer
from outrider.models.weights import open_shard, shard_paths, tensor_shapes

_HEADS: dict[str, type[DraftHead]] = {"EAGLE": EagleHead, "EAGLE3": Eagle3Head, "NEXTN": MtpHead}
ALGORITHMS = (*_HEADS, "STANDALONE")


def load_draft_model(
    options: DraftOptions,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> DraftModel:
    """Load the one draft model that `options.speculative_algorithm` names beside NGRAM.

    Without `device` and `dtype` the options say or choose them.
    Names and shapes are checked before memory is taken for weights. A head that lacks embedding or output matrix takes
    them from `options.target_model_path`. `progress(done_bytes, total_bytes)` is called from this thread.

    Raises:
        ConfigError: names the option, field, file or tensor that is at fault.
    """
    algorithm = model_algorithm(options.speculative_algorithm)
    folder = _draft_folder(options, algorithm)
    target = resolve_model(options.target_model_path, needs_tokenizer=False) if options.target_model_path else None
    device = device or choose_device(options.device)
    dtype = dtype or choose_dtype(options.dtype, device, _stated_dtype(folder))
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(f"dtype {dtype} is not supported; choose one of {', '.join(map(str, SUPPORTED_DTYPES))}")
    place = WeightPlacement(device, dtype, progress)
    if algorithm == "STANDALONE":
        return _load_standalone(options, folder, place)
    head = _load_head(options, algorithm, folder, target, place)
    # A head without a tokenizer has its target's.
    head.tokenizer_hash = hash_tokenizer(folder) or (hash_tokenizer(target) if target is not None else "")
    return head


def model_algorithm(names: Collection[str]) -> str:
    """The drafter with a model among `names`. Raises ConfigError unless it is one."""
    found = [name for name in names if name != "NGRAM"]
    if len(found) != 1 or found[0] not in ALGORITHMS:
        raise ConfigError(
            f"--speculative-algorithm {','.join(names)}: needs one of {', '.join(ALGORITHMS)} for a draft model"
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Where weights go, and who is told of it."""

    device: torch.device
    dtype: torch.dtype
    progress: Progress | None


def _load_standalone(options: DraftOptions, folder: Path, place: WeightPlacement) -> DraftModel:
    config = ModelConfig.from_folder(folder)
    allowed = _token_map(options, config.vocab_size)
    model = load_model(folder, place.dtype, place.device, place.progress)
    if allowed is not None:
        source = shared_tensors(folder)[EMBEDDING if config.tie_embeddings else OUTPUT]
        with torch.inference_mode():
            model.head = Linear(config.hidden_size, allowed.numel(), False, place.dtype, place.device)
            model.head.weight.copy_(source.read()[allowed])
            model.head.pack()
    return StandaloneDraft(model, hash_tokenizer(folder), _on(allowed, place.device))


def _load_head(
    options: DraftOptions, algorithm: str, folder: Path, target: Path | None, place: WeightPlacement
) -> DraftHead:
    stored = stored_tensors(folder, mtp_name if algorithm == "NEXTN" else head_name)
    config = _head_config(algorithm, folder, stored, target)
    stored = _with_shared(stored, config, target, folder)
    allowed = _token_map(options, config.decoder.vocab_size)
    ids = _own_ids(stored.pop("d2t", None), config, folder)
    build = _HEADS[algorithm]
    # The meta device gives names and shapes without memory.
    check_tensors(stored, build(config, place.dtype, torch.device("meta")).checkpoint_tensors(), folder)
    rows, ids = cut_output(ids, config.decoder.vocab_size, allowed)
    with torch.inference_mode():
        head = build(config, place.dtype, place.device, _on(ids, place.device))
        _fill(head.checkpoint_tensors(), stored, rows, place.progress)
        head.finish_loading()
    return head


def _own_ids(offsets: StoredTensor | None, config: HeadConfig, folder: Path) -> Tensor | None:
    vocab_size = config.decoder.vocab_size
    if offsets is not None:
        return ids_of_offsets(offsets.read(), config.draft_vocab_size, vocab_size, str(offsets.path))
    if config.draft_vocab_size != vocab_size:
        raise ConfigError(
            f"{folder}: tensor d2t missing from the checkpoint; the draft vocabulary of {config.draft_vocab_size} is "
            f"not the target's of {vocab_size}"
        )
    return None


def _with_shared(
    stored: dict[str, StoredTensor], config: HeadConfig, target: Path | None, folder: Path
) -> dict[str, StoredTensor]:
    """With the target's embedding and output matrix in the place of those that the head has not got."""
    # In layers after the first the norm is there in some files, and no engine uses it.
    unread = {f"layers.{number}.hidden_norm.weight" for number in range(1, config.decoder.num_layers)}
    stored = {name: tensor for name, tensor in stored.items() if name not in unread}
    if config.decoder.tie_embeddings and EMBEDDING in stored and OUTPUT not in stored:
        stored[OUTPUT] = stored[EMBEDDING]
    missing = [name for name in (EMBEDDING, OUTPUT) if name not in stored]
    if not missing:
        return stored
    if target is None:
        raise ConfigError(f"{folder}: has no {' and no '.join(missing)} of its own; give --target-model-path")
    shared = shared_tensors(target)
    return stored | {name: shared[name] for name in missing}


def _fill(
    targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], rows: Tensor | None, progress: Progress | None
) -> None:
    total = sum(tensor.nbytes for tensor in targets.values())
    done = 0
    for name, target in targets.items():
        values = stored[name].read()
        target.copy_(values if rows is None or name != OUTPUT else values[rows])
        done += target.nbytes
        if progress is not None:
            progress(done, total)


def _head_config(algorithm: str, folder: Path, names: Collection[str], target: Path | None) -> HeadConfig:
    if algorithm == "NEXTN":
        return mtp_config(ModelConfig.from_folder(folder), names)
    found = "EAGLE3" if "layers.0.hidden_norm.weight" in names else "EAGLE"
    if found != algorithm:
        raise ConfigError(f"--speculative-algorithm {algorithm}: {folder} holds a head of {found}")
    fields = read_json(folder / "config.json")
    layers = hidden = None
    if target is not None:
        of_target = read_json(target / "config.json")
        layers, hidden = get_int(of_target, "num_hidden_layers"), get_int(of_target, "hidden_size")
    if algorithm == "EAGLE3":
        return eagle3_config(fields, names, layers, hidden)
    if layers is None or hidden is None:
        raise ConfigError("--target-model-path: an EAGLE head shares its target's output matrix; give its folder")
    return eagle_config(fields, names, layers, hidden)


def _draft_folder(options: DraftOptions, algorithm: str) -> Path:
    """The folder that holds the draft model; the target's for NEXTN, unless another is given."""
    name = options.speculative_draft_model_path
    if name and options.speculative_draft_model_revision and is_hub_id(name) and not Path(name).is_dir():
        name = f"{name}@{options.speculative_draft_model_revision}"
    if not name and algorithm != "NEXTN":
        raise ConfigError(f"--speculative-draft-model-path: {algorithm} needs a draft model; name its folder or hub id")
    name = name or options.target_model_path
    if not name:
        raise ConfigError("--speculative-draft-model-path: NEXTN needs it, or --target-model-path for its modules")
    return resolve_model(name, needs_tokenizer=algorithm == "STANDALONE")


def _stated_dtype(folder: Path) -> str:
    fields = read_json(folder / "config.json")
    return str(fields.get("dtype") or fields.get("torch_dtype") or "")


def _token_map(options: DraftOptions, vocab_size: int) -> Tensor | None:
    path = options.speculative_token_map
    return read_token_map(Path(path), vocab_size) if path else None


def _on(ids: Tensor | None, device: torch.device) -> Tensor | None:
    return None if ids is None else ids.to(device, torch.int32)


MTP_PREFIX = "model.mtp_layers.0."
MTP_OUTSIDE = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
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


def stored_tensors(folder: Path, rename: Callable[[str], str | None]) -> dict[str, StoredTensor]:
    """All tensors that `rename` names.

    Raises:
        ConfigError: the folder has no safetensors, or two tensors of one name.
    """
    found: dict[str, StoredTensor] = {}
    for path in shard_paths(folder):
        for name, shape in tensor_shapes(path).items():
            ours = rename(name)
            if ours is None:
                continue
            if ours in found:
                raise ConfigError(f"{path}: tensor {name} is there twice, also as {found[ours].name}")
            found[ours] = StoredTensor(path, name, shape)
    return found


def shared_tensors(target: Path) -> dict[str, StoredTensor]:
    """Embedding and output matrix of a target's folder, the same tensor where they are tied."""
    found = stored_tensors(target, {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}.get)
    if EMBEDDING not in found:
        raise ConfigError(f"{target}: tensor model.embed_tokens.weight missing from the checkpoint")
    return {OUTPUT: found[EMBEDDING], **found}


def check_tensors(stored: Mapping[str, StoredTensor], expected: Mapping[str, Tensor], folder: Path) -> None:
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
