"""Loads the draft model that the draft service's options name, cut to the target's tokens that it may guess."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.products import fits, round_to_eight_bits
from kernels.launch import has_wgmma
from outrider.config.draft import BLOCK_ALGORITHMS, DraftOptions
from outrider.device import choose_device, choose_dtype
from outrider.errors import ConfigError, under
from outrider.layers.exchange import Exchange
from outrider.layers.linear import Linear, has_small_products
from outrider.models.config import ModelConfig
from outrider.models.cuts import spans
from outrider.models.drafters.base import DraftHead, DraftModel
from outrider.models.drafters.config import EMBEDDING, MARKOV_OUTPUT, OUTPUT, HeadConfig, cut_head
from outrider.models.drafters.heads import BlockHead, Eagle3Head, EagleHead, MtpHead, StandaloneDraft
from outrider.models.drafters.kinds import (
    FREQUENT_TOKENS,
    asked_window,
    check_own_vocabulary,
    check_token_map,
    draft_folder,
    head_config,
    head_name,
    model_algorithm,
    mtp_name,
)
from outrider.models.fields import read_json
from outrider.models.loader import load_decoder, load_model, text_name
from outrider.models.quantization import HEAD_IN_EIGHT_BITS, read_quantization
from outrider.models.store import resolve_model
from outrider.models.store_folder import hash_token_ids, tensor_shapes
from outrider.models.weights import Progress, StoredTensor, check_tensors, fill, stored_tensors

_HEADS: dict[str, type[DraftHead]] = {
    "EAGLE": EagleHead,
    "EAGLE3": Eagle3Head,
    "NEXTN": MtpHead,
    **dict.fromkeys(BLOCK_ALGORITHMS, BlockHead),
}
CONFIG = "the draft's config.json"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_TOKEN_MAP = "--speculative-token-map"


def load_draft_model(
    options: DraftOptions,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    exchange: Exchange | None = None,
) -> DraftModel:
    """Load the one draft model that `options.speculative_algorithm` names beside NGRAM.

    `device` and `dtype` default to those that the options name or choose. `exchange`: between the ranks of a head that
    `is_cut`. Names and shapes are checked before memory is taken for weights. A head without an embedding or output
    matrix takes it from `options.target_model_path`. `progress(done_bytes, total_bytes)` is called from this thread.

    Raises ConfigError, naming the option, field, file or tensor at fault.
    """
    algorithm = model_algorithm(options.speculative_algorithm)
    folder = draft_folder(options, algorithm)
    device = device or choose_device(options.device)
    dtype = dtype or choose_dtype(options.dtype, device, _stated_dtype(folder))
    if algorithm == "STANDALONE":
        draft = _load_standalone(options, folder, device, dtype, progress)
        draft.window = asked_window(options, draft.window)
        shape = draft.model.config
        if draft.window.size and not (isinstance(shape, ModelConfig) and not any(shape.windows)):
            raise ConfigError(f"--speculative-draft-window-size: {folder} may have windows of its own; leave it out")
        return draft
    target = _target_folder(options)
    head = _load_head(options, algorithm, folder, target, device, dtype, progress, exchange)
    # A head without a tokenizer uses its target's.
    head.token_ids_hash = hash_token_ids(folder) or (hash_token_ids(target) if target is not None else "")
    return head


def _target_folder(options: DraftOptions) -> Path | None:
    with under("--target-model-path"):
        return resolve_model(options.target_model_path, needs_tokenizer=False) if options.target_model_path else None


def is_cut(options: DraftOptions, world: int, dtype: torch.dtype) -> bool:
    """Whether `world` ranks each have a part of the one draft model that the options name. Raises ConfigError."""
    algorithm = model_algorithm(options.speculative_algorithm)
    if algorithm == "STANDALONE":
        return False
    target = _target_folder(options)
    _, config = _describe_head(options, algorithm, draft_folder(options, algorithm), target)
    return cut_head(config, world, dtype.itemsize) is not None


def _load_standalone(
    options: DraftOptions, folder: Path, device: torch.device, dtype: torch.dtype, progress: Progress | None
) -> StandaloneDraft:
    if not options.speculative_token_map:
        whole = load_model(folder, dtype, device, progress)
        return StandaloneDraft(whole, hash_token_ids(folder))
    # Its output matrix is cut, which only our own decoder supports.
    config = ModelConfig.from_folder(folder)
    allowed = read_token_map(Path(options.speculative_token_map), config.vocab_size)
    model = load_decoder(folder, dtype, device, progress)
    source = shared_tensors(folder)[EMBEDDING if config.tie_embeddings else OUTPUT]
    with torch.inference_mode():
        model.head = Linear(config.hidden_size, allowed.numel(), False, dtype, device)
        model.head.weight.copy_(source.read()[allowed])
        model.head.pack()
    return StandaloneDraft(model, hash_token_ids(folder), _on(allowed, device))


def _describe_head(
    options: DraftOptions, algorithm: str, folder: Path, target: Path | None
) -> tuple[dict[str, StoredTensor], HeadConfig]:
    stored = stored_tensors(folder, mtp_name if algorithm == "NEXTN" else head_name)
    config = head_config(algorithm, folder, stored, target)
    check_own_vocabulary(config, stored, folder)
    return stored, replace(config, window=asked_window(options, config.window))


def _load_head(
    options: DraftOptions,
    algorithm: str,
    folder: Path,
    target: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    exchange: Exchange | None,
) -> DraftHead:
    stored, config = _describe_head(options, algorithm, folder, target)
    if device.type == "cuda":
        config = replace(config, decoder=config.decoder.with_padded_heads())
    if algorithm not in BLOCK_ALGORITHMS and _reads_less_in_eight_bits(config, device, dtype):
        config = replace(config, decoder=replace(config.decoder, quantization=HEAD_IN_EIGHT_BITS))
    stored = _with_shared(stored, config, target, folder)
    allowed = _allowed(options, folder, config.decoder.vocab_size, device)
    offsets = stored.pop("d2t", None)
    sizes = config.draft_vocab_size, config.decoder.vocab_size
    ids = None if offsets is None else ids_of_offsets(offsets.read(), *sizes, str(offsets.path))
    build = _HEADS[algorithm]
    # The meta device gives names and shapes without memory.
    check_tensors(stored, build(config, dtype, torch.device("meta")).checkpoint_tensors(), folder, CONFIG)
    rows, ids = cut_output(ids, config.decoder.vocab_size, allowed)
    rank, world = (0, 1) if exchange is None else (exchange.rank, exchange.world)
    # With an exchange, the head `is_cut`.
    part = (cut_head(config, world, dtype.itemsize) if exchange is not None else None) or config
    with torch.inference_mode():
        head = build(part, dtype, device, _on(ids, device))
        if exchange is not None:
            head.join(exchange)
        targets = head.checkpoint_tensors()

        def read(name: str) -> Tensor:
            tensor, wanted = stored[name], targets[name].shape
            if rows is not None and name in (OUTPUT, MARKOV_OUTPUT):
                parts: Sequence[Tensor] = tensor.read()[rows].split(wanted[0])
                return parts[rank % len(parts)]
            if tensor.shape == tuple(wanted):
                return _numbers(tensor)
            return tensor.read(spans(name, tensor.shape, wanted, config.decoder, rank, world))

        fill(targets, read, progress)
        for name, matrix in targets.items():
            if not matrix.is_meta and not matrix.isfinite().all():
                raise ConfigError(f"{stored[name].path}: tensor {stored[name].name} holds NaN or infinity in {dtype}")
            # This halves the bytes to read. What a head guesses changes no answer.
            if name != EMBEDDING and matrix.ndim == 2 and fits(matrix):
                round_to_eight_bits(matrix)
        head.finish_loading()
    return head


def _reads_less_in_eight_bits(config: HeadConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step of the head on a GPU takes as long as reading its weights, so that it is faster with eight bits.

    What a head guesses changes no answer. Matrices of small heads stay as they are: latency bounds them. Elsewhere than
    on Hopper in bfloat16, products of more than 64 rows would read the weights several times (`fits_fp8_linear`).
    """
    return has_wgmma(device) and dtype == torch.bfloat16 and not has_small_products(config.decoder.hidden_size)


def _numbers(tensor: StoredTensor) -> Tensor:
    """Return the tensor. Raises ConfigError for integer codes, which mean nothing without their scales."""
    values = tensor.read()
    if not values.is_floating_point():
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} is {values.dtype}; a head's weights are floats")
    return values


def _with_shared(
    stored: dict[str, StoredTensor], config: HeadConfig, target: Path | None, folder: Path
) -> dict[str, StoredTensor]:
    """Return `stored` with the target's embedding and output matrix if the head lacks them. Raises ConfigError."""
    # Some files have this norm in layers after the first, too, where no engine uses it.
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


def _stated_dtype(folder: Path) -> str:
    fields = read_json(folder / "config.json")
    return str(fields.get("dtype") or fields.get("torch_dtype") or "")


def _on(ids: Tensor | None, device: torch.device) -> Tensor | None:
    return None if ids is None else ids.to(device, torch.int32)


def shared_tensors(target: Path) -> dict[str, StoredTensor]:
    """Return embedding and output matrix of a target's folder, the same tensor if they are tied. Raises ConfigError."""
    quantization = read_quantization(read_json(target / "config.json"))
    scheme = quantization.scheme_of("lm_head") if quantization is not None else None
    if scheme is not None:
        raise ConfigError(
            f"{target}: lm_head is quantized ({scheme.name}), and a head that has none of its own needs it in 16 bits"
        )
    names = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}
    found = stored_tensors(target, lambda name: names.get(text_name(name) or name))
    if EMBEDDING not in found:
        raise ConfigError(
            f"{target}: has no model.embed_tokens.weight, and a head that has no embedding of its own needs it; use a "
            "head that has one"
        )
    return {OUTPUT: found[EMBEDDING], **found}


def _allowed(options: DraftOptions, folder: Path, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the target ids that a head may guess, ascending; None for all of its own."""
    if options.speculative_token_map:
        return read_token_map(Path(options.speculative_token_map), vocab_size)
    # On a CPU a step takes as long as reading the weights, of which the output matrix has the most.
    frequent = folder / FREQUENT_TOKENS
    return read_token_map(frequent, vocab_size) if device.type == "cpu" and frequent.is_file() else None


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """Read int64 target ids, sorted and without duplicates, from a JSON list or a safetensors file of one tensor.

    Raises ConfigError, naming the file and what is wrong with it.
    """
    check_token_map(path)
    ids = _from_json(path) if path.suffix == ".json" else _from_safetensors(path)
    rising: Tensor = torch.unique(ids)
    if not rising.numel():
        raise ConfigError(f"{_TOKEN_MAP} {path}: holds no token ids")
    first, last = int(rising[0]), int(rising[-1])
    if first < 0 or last >= vocab_size:
        outside = first if first < 0 else last
        raise ConfigError(f"{_TOKEN_MAP} {path}: token id {outside} is outside the vocabulary of {vocab_size}")
    return rising


def _from_json(path: Path) -> Tensor:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{_TOKEN_MAP} {path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, list) or not all(type(value) is int and abs(value) < 1 << 31 for value in values):
        raise ConfigError(f"{_TOKEN_MAP} {path}: must be a list of token ids")
    return torch.tensor(values, dtype=torch.int64)


def _from_safetensors(path: Path) -> Tensor:
    shapes = tensor_shapes(path)
    if len(shapes) != 1:
        raise ConfigError(f"{_TOKEN_MAP} {path}: must hold one tensor, and holds {len(shapes)}")
    name, shape = shapes.popitem()
    tensor = StoredTensor(path, name, shape).read()
    if tensor.dim() != 1 or tensor.dtype not in _INTEGERS:
        raise ConfigError(
            f"{_TOKEN_MAP} {path}: tensor {name} must be a list of integers, and is {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.long()


def ids_of_offsets(offsets: Tensor, draft_vocab_size: int, vocab_size: int, where: str) -> Tensor:
    """Return int64 target ids [draft_vocab_size] from a head's `d2t`, which holds target id minus draft id.

    Raises ConfigError, which names `where`, for a wrong shape or dtype, or ids that are duplicate or unknown.
    """
    if tuple(offsets.shape) != (draft_vocab_size,) or offsets.dtype not in _INTEGERS:
        raise ConfigError(
            f"{where}: tensor d2t is {offsets.dtype} {list(offsets.shape)}, config.json calls for integers "
            f"[{draft_vocab_size}]"
        )
    ids = torch.arange(draft_vocab_size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(f"{where}: tensor d2t leads outside the vocabulary of {vocab_size}")
    if ids.unique().numel() != draft_vocab_size:
        raise ConfigError(f"{where}: tensor d2t leads to one token from two draft ids")
    return ids


def cut_output(ids: Tensor | None, vocab_size: int, allowed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return which rows of an output matrix to keep, None for all, and their target ids, None for the same; both int64.

    `ids` are the target ids of the whole matrix's rows, `allowed` is a token map.

    Raises ConfigError if nothing is left.
    """
    if ids is not None and ids.numel() == vocab_size and torch.equal(ids, torch.arange(vocab_size)):
        ids = None
    if allowed is None:
        return None, ids
    if ids is None:
        return allowed, allowed
    rows = torch.isin(ids, allowed).nonzero().flatten()
    if not rows.numel():
        raise ConfigError(f"{_TOKEN_MAP}: none of its tokens is in the draft's own vocabulary")
    return rows, ids[rows]
