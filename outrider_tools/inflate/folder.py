"""`outrider inflate`: make a larger model folder from a model folder, and check that both compute the same."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.fields import read_json
from outrider.models.loader import decoder_tensors
from outrider.models.progress import Progress
from outrider.models.weights import write_shards
from outrider_tools.files import copy_files, whole_output
from outrider_tools.inflate.shapes import Shape, ShapeMap, decoder_fields
from outrider_tools.inflate.tensors import Inflater, inflated_fields

RECORD_FILE = "inflated.json"
"""This file tells programs where the source lies in the inflated model; NOTICE tells people what the model is."""

NOTICE = """\
# {name}

Made by `outrider inflate` from {source}: that model's weights inside a larger shape, the rest random and without
effect. It answers as the source does, at the cost of a model of this shape, and serves to measure speed. The source's
license holds for it.

    shape       {shape}
    vocabulary  {vocab_size}
    seed        {seed}
"""


@dataclass(frozen=True)
class InflateOptions:
    """Options of `outrider inflate`; see its --help. A `vocab_size` of None keeps the source's."""

    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    max_shard_bytes: int = 2_000_000_000
    vocab_size: int | None = None


def vocab_size_of(source: ModelConfig, options: InflateOptions) -> int:
    """Return the number of tokens of the inflated model. Raises ConfigError if `source` has more."""
    size = options.vocab_size or source.vocab_size
    if size < source.vocab_size:
        raise ConfigError(f"--vocab-size {size}: below the source's {source.vocab_size}; give at least as many")
    return size


def tokenize(folder: Path, text: str) -> list[int]:
    """Return the token ids of `text` for the model in `folder`."""
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def inflate(source: Path, out: Path, options: InflateOptions, progress: Progress) -> int:
    """Write a checkpoint of `options.shape` that computes the same as `source`. Return its weights' size in bytes.

    `out` must not exist; it appears complete, by one rename. Only one file is in memory at a time.

    Raises ConfigError if the shape cannot hold the source, or `out` cannot be written.
    """
    fields = decoder_fields(read_json(source / "config.json"))
    config = ModelConfig.from_folder(source)
    if not config.is_plain:
        raise ConfigError(
            f"{source}: {config.architecture} cannot be inflated; layers must be as Llama, Mistral and Qwen have them"
        )
    if config.quantization is not None:
        raise ConfigError(f"{source}: has {config.quantization.name} weights; inflate its source, then quantize that")
    shape_map = ShapeMap.of(config, options.shape)
    vocab_size = vocab_size_of(config, options)
    stored = decoder_tensors(source, config)
    inflater = Inflater(stored, config, shape_map, vocab_size, options.dtype, options.device, options.seed)
    fields = inflated_fields(fields, shape_map, vocab_size, inflater.rms_norm_eps, options.dtype)
    # Shapes come from the class that will load the tensors.
    empty = CausalLM(ModelConfig.from_fields(fields, {}), torch.float32, torch.device("meta"))
    shapes = {name: tensor.shape for name, tensor in empty.checkpoint_tensors().items()}
    total = sum(map(math.prod, shapes.values())) * options.dtype.itemsize
    with whole_output(out, f"--out {out}", total) as work:
        work.mkdir()
        (work / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        copy_files(source, work)
        notice = {"name": out.name, "source": source.name, "shape": shape_map.target, "vocab_size": vocab_size}
        (work / "README.md").write_text(NOTICE.format(**notice, seed=options.seed), encoding="utf-8")
        record = {
            "source": source.name,
            "source_shape": asdict(shape_map.source),
            "shape": asdict(shape_map.target),
            "layers": shape_map.layers,
            "seed": options.seed,
        }
        (work / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        stage = f"writing {out.name}"
        tensors = ((name, inflater.tensor(name)) for name in shapes)
        write_shards(work, tensors, options.max_shard_bytes, lambda done: progress(stage, done, total))
    return total


# Bounds of ||inflated - source|| / ||source||, by the inflated checkpoint's dtype: what rounding its weights costs over
# thirty layers, with a margin.
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# exp(-100) is below the smallest float32.
MIN_GAP = 100.0

VOCAB_CHUNK = 8192


@dataclass(frozen=True)
class Comparison:
    """How far apart two checkpoints' logits are for the same tokens.

    `agreement` is the share of positions with the same likeliest token. `padding_gap` is the least distance by which an
    added token's logit lies below the likeliest token's; None if no token was added.
    """

    relative_error: float
    agreement: float
    padding_gap: float | None

    def passes(self, dtype: torch.dtype) -> bool:
        """Whether the two are the same function, up to the rounding of weights to `dtype`."""
        return self.relative_error <= LIMITS[dtype] and (self.padding_gap is None or self.padding_gap >= MIN_GAP)

    def __str__(self) -> str:
        text = f"relative error {self.relative_error:.2g}, same likeliest token at {self.agreement:.0%} of positions"
        return text if self.padding_gap is None else f"{text}, added tokens at least {self.padding_gap:.0f} below"


def compare(source: Path, inflated: Path, token_ids: list[int], device: torch.device) -> Comparison:
    """Compare the logits of both folders' models, computed in float32."""
    expected = streamed_logits(source, token_ids, device)
    logits = streamed_logits(inflated, token_ids, device)
    actual, padding = logits.split((expected.shape[1], logits.shape[1] - expected.shape[1]), 1)
    gap = None
    if padding.shape[1]:
        gap = float((actual.amax(1) - padding.amax(1)).min())
    return Comparison(
        relative_error=float((actual - expected).norm() / expected.norm()),
        agreement=float((actual.argmax(1) == expected.argmax(1)).float().mean()),
        padding_gap=gap,
    )


@torch.inference_mode()
def streamed_logits(folder: Path, token_ids: list[int], device: torch.device) -> Tensor:
    """Return a prompt's logits, float32 [num_tokens, vocab_size] on the CPU, for checkpoints of any size and dtype.

    The model runs as many models of one layer: the residual stream after one layer is the embedding for the next.
    """
    config = ModelConfig.from_folder(folder)
    count = len(token_ids)
    # These models' tokens are the prompt's positions, so that embedding and output matrix are as small as the prompt.
    one_layer = replace(config, num_layers=1, vocab_size=count, tie_embeddings=True)
    order = torch.arange(count, device=device)
    batch = ForwardBatch(order, order, [Segment(count, order)])
    stored = decoder_tensors(folder, config)
    rows = torch.tensor(token_ids)
    stream = stored["model.embed_tokens.weight"].read()[rows].to(device, torch.float32)
    hidden = stream
    for layer in range(config.num_layers):
        if (experts := config.experts) is not None:
            here = frozenset({0} if layer in experts.layers else ())
            one_layer = replace(one_layer, experts=replace(experts, layers=here))
        model = CausalLM(one_layer, torch.float32, device)
        for name, target in model.checkpoint_tensors().items():
            if name == "model.embed_tokens.weight":
                target.copy_(stream)
            else:
                target.copy_(stored[name.replace("layers.0.", f"layers.{layer}.")].read())
        model.finish_loading()
        hidden, (stream,) = model.forward_with_features(batch, model.new_kv(count), TorchAttention(), (1,))
    head = stored["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"].read()
    chunks = [hidden @ chunk.to(device, torch.float32).t() for chunk in head.split(VOCAB_CHUNK)]
    return torch.cat(chunks, 1).cpu()
