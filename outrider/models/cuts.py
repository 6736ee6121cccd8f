"""The part of a checkpoint that each rank of a tensor-parallel model has.

Heads, channels of MLPs and of each expert, and rows of the output matrix are divided. All ranks have embeddings, norms,
routers and the residual stream. If there are more ranks than KV heads, several ranks have the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.config.verify import MAX_RANKS, VerifyOptions
from outrider.errors import ConfigError, under
from outrider.models.config import ModelConfig, ModelShape
from outrider.models.fields import read_configs
from outrider.models.foreign import check_config
from outrider.models.parts import EXPERT_MODULES

Span = tuple[int, int]
OPTION = "--tensor-parallel-size"


def cut(config: ModelShape, world: int) -> ModelConfig:
    """Return what one of `world` ranks has of a model, as the config of a smaller one.

    Raises ConfigError for a model that cannot be divided among so many ranks.
    """
    if not isinstance(config, ModelConfig):
        raise _not_ours(config.architecture, world)
    if config.family.wide_qk_norm:
        raise ConfigError(f"{OPTION}: {config.architecture} norms all heads together, so they cannot be divided")
    if fault := _fault(config, world):
        *others, last = ["1", *(str(number) for number in range(2, MAX_RANKS + 1) if not _fault(config, number))]
        counts = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{OPTION}: {fault}; use {counts}")
    heads, kv_heads, experts = config.num_heads, config.num_kv_heads, config.experts
    return replace(
        config,
        num_heads=heads // world,
        num_kv_heads=max(kv_heads // world, 1),
        intermediate_size=config.intermediate_size // world,
        experts=experts and replace(experts, size=experts.size // world, shared_size=experts.shared_size // world),
        vocab_cuts=world if config.vocab_size % world == 0 and world > 1 else 1,
    )


def _not_ours(architecture: str, world: int) -> ConfigError:
    return ConfigError(f"{OPTION}: {world} ranks need outrider's own decoder, which {architecture} has not")


def check_target(folder: Path, options: VerifyOptions) -> None:
    """Refuse options that the model in a folder cannot be served with, as far as its config.json shows without torch.

    Raises ConfigError, which begins with --model if the model itself is at fault.
    """
    ranks = options.tensor_parallel_size
    with under("--model"):
        config, positions = check_config(folder, options.model_impl)
    options.check_lengths(positions)
    if config is None:
        if ranks > 1:
            raise _not_ours(str(read_configs(folder)[0]["architectures"][0]), ranks)
        return
    if ranks > 1:
        cut(config, ranks)
    if options.wants_flashinfer:
        check_plain_attention(config.limited_to(options.context_length or positions))


def check_plain_attention(config: ModelShape) -> None:
    """Raise ConfigError for a model that FlashInfer cannot run."""
    if not config.has_plain_attention:
        raise ConfigError(
            f"--attention-backend: flashinfer has no windows, caps, sinks and scales, which {config.architecture} "
            "has; choose triton"
        )


def spans(
    name: str, shape: Sequence[int], part: Sequence[int], whole: ModelConfig, rank: int, world: int
) -> list[list[Span]]:
    """Return, for each dimension of a checkpoint's tensor, the pieces that a rank reads and joins.

    `shape` is the checkpoint's, `part` that of what is read. Raises ConfigError for a tensor that is not divisible.
    """
    found = []
    for dimension, (size, wanted) in enumerate(zip(shape, part, strict=True)):
        # AWQ's and GPTQ's tensors of these names have rows of the matrix as their columns.
        is_upright = not name.endswith((".qweight", ".qzeros", ".scales"))
        sections = _sections(name, size, whole) if whole.family.fused and dimension == 1 - is_upright else [size]
        if size == wanted:
            found.append([(0, size)])
            continue
        pieces: list[Span] = []
        first = 0
        for section in sections:
            count = section // world if len(sections) > 1 else wanted
            number = section // count if count else 0
            is_whole = count and number * count == section and sum(sections) == size
            if not is_whole or max(number, world) % min(number, world):
                raise ConfigError(f"{OPTION}: tensor {name} of {list(shape)} cannot be divided among {world} ranks")
            start = first + rank * number // world * count
            pieces.append((start, start + count))
            first += section
        found.append(pieces)
    return found


def _sections(name: str, size: int, whole: ModelConfig) -> list[int]:
    """Return how many rows of a checkpoint's tensor, or scales of them, each of the matrices fused in it has."""
    parts = [1]
    if ".qkv_proj." in name:
        parts = [whole.num_heads, whole.num_kv_heads, whole.num_kv_heads]
    elif ".gate_up_proj." in name:
        parts = [1, 1]
    return [size * part // sum(parts) for part in parts]


def _fault(config: ModelConfig, world: int) -> str:
    """Return why a model cannot be divided among so many ranks; empty if it can."""
    kv_heads, experts = config.num_kv_heads, config.experts
    sizes = {"num_attention_heads": config.num_heads}
    if experts is None or len(experts.layers) < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if experts is not None:
        sizes |= {"the size of experts": experts.size, "shared_expert_intermediate_size": experts.shared_size}
    for field, size in sizes.items():
        if size % world:
            return f"{field} {size} cannot be divided among {world} ranks"
    if max(kv_heads, world) % min(kv_heads, world):
        return f"num_key_value_heads {kv_heads} is neither a multiple nor a divisor of {world} ranks"
    if config.family.fused and kv_heads < world:
        return f"{config.architecture} has {kv_heads} KV heads in one matrix with q, fewer than {world} ranks"
    return _block_fault(config, world)


def _block_fault(config: ModelConfig, world: int) -> str:
    """Return which quantized matrix has blocks that two ranks would share; empty if none."""
    heads, kv_heads = config.num_heads * config.weight_head_dim, config.num_kv_heads * config.weight_head_dim
    divided = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.o_proj": heads}
    divided |= dict.fromkeys(("mlp.gate_proj", "mlp.down_proj"), config.intermediate_size)
    if (experts := config.experts) is not None:
        divided |= dict.fromkeys(EXPERT_MODULES[experts.form], experts.size)
    for name, size in divided.items():
        scheme = config.scheme_of(f"model.layers.{config.num_layers - 1}.{name}")
        if scheme is not None and scheme.block and size > scheme.block and size // world % scheme.block:
            return (
                f"{name} has scales of blocks of {scheme.block}, of which {size} channels are not divisible among "
                f"{world} ranks"
            )
    return ""
