"""Loads a model from a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.layers.exchange import Exchange
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig
from outrider.models.cuts import cut, spans
from outrider.models.decoder import CausalLM
from outrider.models.fields import read_configs
from outrider.models.foreign import choose_impl
from outrider.models.transformers_model import load_transformers
from outrider.models.transformers_survey import TransformersConfig, survey_model
from outrider.models.weights import EMBEDDING, HEAD, Progress, StoredTensor, check_tensors, fill, stored_tensors


def describe_model(path: str | Path, impl: str = "auto") -> ModelConfig | TransformersConfig:
    """Return a model's configuration, whose type tells what runs it; no weights are read. `impl`: see --model-impl.

    Raises ConfigError, naming the architecture or field at fault.
    """
    fields, generation = read_configs(Path(path))
    if choose_impl(fields, impl) == "transformers":
        return survey_model(Path(path)).config
    return ModelConfig.from_fields(fields, generation)


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    impl: str = "auto",
    context_length: int = 0,
    exchange: Exchange | None = None,
    own_products: bool = False,
) -> LanguageModel:
    """Load a Hugging Face folder as our decoder, or through transformers. `impl`: see --model-impl.

    For the other arguments see `load_decoder`.
    Raises ConfigError, naming the architecture, field, file or tensor at fault.
    """
    if choose_impl(read_configs(Path(path))[0], impl) == "transformers":
        if exchange is not None:
            cut(survey_model(Path(path)).config, exchange.world)
        return load_transformers(Path(path), dtype, torch.device(device), progress)
    return load_decoder(path, dtype, device, progress, context_length, exchange, own_products)


def load_decoder(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    context_length: int = 0,
    exchange: Exchange | None = None,
    own_products: bool = False,
) -> CausalLM:
    """Load a Hugging Face folder as our decoder: config.json and safetensors, in one file or sharded.

    Names and shapes of all tensors are checked before memory is taken for weights. Tensors are then converted to
    `dtype` and moved to `device` one by one, and `progress(done_bytes, total_bytes)` is called from this thread. No
    sequence will be longer than `context_length`; 0 stands for what the model allows. `exchange`: between ranks that
    each load their part. `own_products`: use none by a library, so that a row's result does not depend on the rows
    beside it.
    Raises ConfigError, naming the architecture, field, file or tensor at fault.
    """
    folder = Path(path)
    config = ModelConfig.from_folder(folder)
    config = config.limited_to(context_length) if context_length else config
    config = config.with_padded_heads() if torch.device(device).type == "cuda" else config
    if own_products and config.quantization is not None:
        config = replace(config, quantization=config.quantization.without_library())
    rank, world = (0, 1) if exchange is None else (exchange.rank, exchange.world)
    part = config if exchange is None else cut(config, world)
    stored = decoder_tensors(folder, config)
    with torch.inference_mode():
        model = CausalLM(part, dtype, torch.device(device))
        if exchange is not None:
            model.join(exchange)
        targets = model.checkpoint_tensors()

        def read(name: str) -> Tensor:
            tensor, wanted = stored[name], tuple(targets[name].shape)
            whole = tensor.shape == wanted or not tensor.shape
            if whole:
                return tensor.read()
            found = tensor.read(spans(name, tensor.shape, wanted, config, rank, world))
            # Groups are counted from a part's first column.
            return found - found[0] if name.endswith(".g_idx") else found

        fill(targets, read, progress)
        # Pages of mapped files that were read count as this process's memory.
        stored.clear()
        model.finish_loading()
    return model


def text_name(name: str) -> str | None:
    """Return the name that a tensor of a larger model's text part has in a decoder alone; None for other tensors.

    Files on the hub and those that transformers 5 writes differ in the prefix.
    """
    for prefix in ("language_model.model.", "model.language_model.", "language_model."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith("lm_head.") else f"model.{rest}"
    return name if name.startswith("lm_head.") else None


def decoder_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors that a decoder of this config has.

    Raises ConfigError for one that is missing, not called for, or of another shape.
    """
    family = config.family
    unread = family.unread_prefix
    # The meta device gives names and shapes without memory.
    expected = CausalLM(config, torch.float32, torch.device("meta")).checkpoint_tensors()
    is_gptq = config.quantization is not None and config.quantization.method == "gptq"

    def name_of(name: str) -> str | None:
        name = (text_name(name) or "") if family.is_part else name
        # Old Llama checkpoints carry their rotary frequencies.
        derived = name.endswith(".rotary_emb.inv_freq")
        # Scales of quantized attention and of a quantized KV cache; ours needs none.
        derived = derived or name.endswith((".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale"))
        # AutoGPTQ writes a bias of zeros for every matrix.
        derived = derived or (is_gptq and name.endswith(".bias") and name not in expected)
        derived = derived or not name
        return None if derived or (unread is not None and name.startswith(unread)) else name

    stored = stored_tensors(folder, name_of)
    if config.tie_embeddings and (head := stored.pop(HEAD, None)) is not None:
        # Some checkpoints have the one matrix under the other name.
        _check_tied(head, stored.setdefault(EMBEDDING, head), folder)
    check_tensors(stored, expected, folder)
    return stored


_COMPARED_ROWS = 8192
"""Rows that are compared at once, of matrices that may take a gigabyte each."""


def _check_tied(head: StoredTensor, embedding: StoredTensor, folder: Path) -> None:
    """Raise ConfigError for an output matrix that should be the embedding but differs from it."""
    if head is embedding:
        return

    def differ(start: int) -> bool:
        part = [[(start, min(head.shape[0], start + _COMPARED_ROWS))], [(0, head.shape[-1])]]
        one, other = head.read(part), embedding.read(part)
        # Compared bit by bit, because unused rows may hold anything.
        return one.dtype != other.dtype or not torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    if head.shape != embedding.shape or any(map(differ, range(0, head.shape[0], _COMPARED_ROWS))):
        raise ConfigError(
            f"{folder}: tie_word_embeddings is true in config.json, and {head.name} is another matrix than "
            f"{embedding.name}; set it to false, or leave {head.name} out"
        )
