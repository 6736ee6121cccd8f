"""Embed a small checkpoint in a large shape: the same function at the large model's full cost.

The source's channels, heads and layers lie where `ShapeMap` says. All other weights are random, but their results are
multiplied by zero: unused columns of o_proj and down_proj are zero, and so are all rows that would write outside of the
source's part of the residual stream. So the stream is the source's, followed by zeros, and:

    RMS norms     the mean is over more channels: weights times sqrt(h / H), epsilon times h / H
    rotary pairs  pair i of a head of d channels becomes pair i * D / d of a head of D, which rotates at the same speed
    queries       times sqrt(D / d), for the softmax scale of the longer heads
    layers        the target's other layers add zero

If the target has experts, they hold the source's MLP in parts, with down_proj times the number of parts. The experts of
one set of parts, which follow each other, share one router row, so that they are chosen together with equal weights:
whatever the router chooses, each part counts one over that number. Router rows are random, and read only channels that
hold a random sign for each token of the vocabulary, so that different tokens wake different experts, all equally often.
The squares of these channels replace part of epsilon in the norms, and nothing else reads them.

Tokens added to the vocabulary are never chosen: an extra channel holds a constant, whose square replaces part of
epsilon in the norms, and the added rows of the output matrix hold a large negative number for it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.weights import StoredTensor
from outrider_tools.inflate.shapes import ROUTE_CHANNELS, ShapeMap

# The standard deviation of Llama's own initial weights: everywhere above denormal numbers, and far from any overflow.
RANDOM_STD = 0.02

# For the constant channel, which is about 0.05: logits below -1000 for any residual stream of a norm below 1000.
PADDING_NORM_WEIGHT = 256.0
PADDING_HEAD_WEIGHT = -32768.0

ROUTE_NORM_WEIGHT = 256.0
"""Weight of the channels that routers read; they hold about 0.01."""

EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Axis:
    """Where the source's channels lie along an axis of the target: channel `sources[i]` at place `places[i]`.

    At most one axis of a tensor has other places than the first ones.
    """

    size: int
    places: Sequence[int]
    sources: Sequence[int]

    @classmethod
    def front(cls, size: int, used: int) -> Axis:
        """Return an axis with the source's channels first, in their order."""
        return cls(size, range(used), range(used))


class Inflater:
    """Makes the target's tensors one at a time, by name, in `dtype` on `device`.

    The random part of a tensor depends only on `seed`, the tensor's name and the kind of device.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        config: ModelConfig,
        shape_map: ShapeMap,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self._stored, self._shape_map = stored, shape_map
        self._dtype, self._device, self._seed = dtype, device, seed
        source, target = shape_map.source, shape_map.target
        self._shrink = source.hidden / target.hidden
        self._query_scale = math.sqrt(shape_map.rotary_stride)
        self._source_layers = {place: layer for layer, place in enumerate(shape_map.layers)}
        self._tied = config.tie_embeddings
        self._vocab = Axis.front(vocab_size, config.vocab_size)
        self._residual = Axis.front(target.hidden, source.hidden)
        self._mlp = Axis.front(target.intermediate, source.intermediate)
        self._heads, self._kv_heads = _head_axes(shape_map)
        self._constant: float | None = None
        self._read: dict[str, Tensor] = {}
        self._sign = 0.0
        """Size of tokens' signs; 0 without experts."""
        # Constant channels add to the sums of squares in norms; epsilon is reduced by as much.
        self._epsilon = config.rms_norm_eps * source.hidden
        whole = self._epsilon
        if vocab_size != config.vocab_size:
            if target.hidden == source.hidden:
                raise ConfigError(
                    "--vocab-size: needs a channel of its own; choose a shape with hidden above the source's"
                )
            self._constant = self._take(whole / 2, 1)
        if target.experts:
            self._sign = self._take(whole / 4, ROUTE_CHANNELS)
        self.rms_norm_eps = self._epsilon / target.hidden

    def tensor(self, name: str) -> Tensor:
        """Return the target's tensor of that Hugging Face name."""
        if name == EMBEDDING:
            return self._embedding_matrix()
        if name == HEAD:
            return self._head_matrix()
        if name == FINAL_NORM:
            norm = self._norm(name, PADDING_NORM_WEIGHT)
            if self._sign:
                norm[self._signs] = 0.0
            return norm
        _, _, number, part = name.split(".", 3)
        source_layer = self._source_layers.get(int(number))
        source = None if source_layer is None else f"model.layers.{source_layer}.{part}"
        if part.endswith("layernorm.weight"):
            norm = self._norm(source, 0.0)
            if self._sign:
                norm[self._signs] = ROUTE_NORM_WEIGHT if part.startswith("post_attention") else 0.0
            return norm
        if part.startswith("block_sparse_moe."):
            return self._of_experts(name, source_layer, part)
        return self._projection(name, source, part.split(".")[1], is_bias=part.endswith(".bias"))

    def _projection(self, name: str, source: str | None, kind: str, is_bias: bool) -> Tensor:
        """Return a matrix of a layer, or its bias, whose channels are the matrix's rows."""
        rows, columns = {
            "q_proj": (self._heads, self._residual),
            "k_proj": (self._kv_heads, self._residual),
            "v_proj": (self._kv_heads, self._residual),
            "o_proj": (self._residual, self._heads),
            "gate_proj": (self._mlp, self._residual),
            "up_proj": (self._mlp, self._residual),
            "down_proj": (self._residual, self._mlp),
        }[kind]
        axes = (rows,) if is_bias else (rows, columns)
        target = self._zeros(axes) if rows is self._residual else self._random(name, axes)
        if source is None:
            return target
        if kind == "q_proj":
            self._clear_queries(target)
        return self._place(target, source, axes, self._query_scale if kind == "q_proj" else 1.0)

    def _clear_queries(self, target: Tensor) -> None:
        """Zero the query channels outside of the source's rotary pairs, because key channels there are random."""
        target.unflatten(0, (-1, self._shape_map.target.head_dim))[self._shape_map.heads] = 0.0

    def _norm(self, source: str | None, constant_weight: float) -> Tensor:
        axes = (self._residual,)
        scale = math.sqrt(self._shrink)
        target = self._zeros(axes).fill_(scale)
        if self._constant is not None:
            target[self._shape_map.source.hidden] = constant_weight
        return target if source is None else self._place(target, source, axes, scale)

    def _embedding_matrix(self) -> Tensor:
        axes = (self._vocab, self._residual)
        target = self._place(self._zeros(axes), EMBEDDING, axes)
        if self._constant is not None:
            target[:, self._shape_map.source.hidden] = self._constant
        if self._sign:
            signs = self._random("signs", (self._vocab, Axis.front(ROUTE_CHANNELS, 0)), 1.0).sign()
            target[:, self._signs] = torch.where(signs < 0, -self._sign, self._sign).to(self._dtype)
        return target

    def _head_matrix(self) -> Tensor:
        axes = (self._vocab, self._residual)
        target = self._place(self._random(HEAD, axes), EMBEDDING if self._tied else HEAD, axes)
        if self._constant is not None:
            target[len(self._vocab.places) :] = 0.0
            target[:, self._shape_map.source.hidden] = 0.0
            target[len(self._vocab.places) :, self._shape_map.source.hidden] = PADDING_HEAD_WEIGHT
        return target

    def _take(self, share: float, count: int) -> float:
        """Return the value for `count` channels whose squares replace about `share` of epsilon, so that sums stay."""
        value = float(torch.tensor(math.sqrt(share / count)).to(self._dtype))
        self._epsilon -= count * value**2
        return value

    @property
    def _signs(self) -> slice:
        """Channels of tokens' signs, behind the source's and the constant one."""
        first = self._shape_map.source.hidden + 1
        return slice(first, first + ROUTE_CHANNELS)

    def _of_experts(self, name: str, source_layer: int | None, part: str) -> Tensor:
        """Return a router, or a matrix of an expert."""
        target, parts = self._shape_map.target, self._shape_map.mlp_parts
        if part.endswith("gate.weight"):
            rows = self._random(name, (Axis.front(target.experts // parts, 0), self._residual), 1.0)
            rows[:, : self._signs.start] = 0.0
            rows[:, self._signs.stop :] = 0.0
            return rows.repeat_interleave(parts, 0)
        _, _, expert, matrix, _ = part.split(".")
        kind = EXPERT_PARTS[matrix]
        channels = Axis.front(target.intermediate, 0)
        first = int(expert) % parts * target.intermediate
        held = slice(first, first + target.intermediate)
        if kind == "down_proj":
            made = self._zeros((self._residual, channels))
        else:
            made = self._random(name, (channels, self._residual))
            made[:, self._signs] = 0.0
        if source_layer is not None:
            values = self._values(f"model.layers.{source_layer}.mlp.{kind}.weight")
            values = values[:, held] * parts if kind == "down_proj" else values[held]
            made[: values.shape[0], : values.shape[1]] = values.to(self._dtype)
        return made

    def _values(self, name: str) -> Tensor:
        """Return the source's tensor in float32, kept for the next expert of its layer."""
        if name not in self._read:
            if len(self._read) >= len(EXPERT_PARTS):
                self._read.clear()
            self._read[name] = self._stored[name].read().to(self._device, torch.float32)
        return self._read[name]

    def _place(self, target: Tensor, source: str, axes: tuple[Axis, ...], scale: float = 1.0) -> Tensor:
        """Write a tensor of the source to its place in `target`. Return `target`."""
        return self._place_values(target, self._stored[source].read(), axes, scale)

    def _place_values(self, target: Tensor, values: Tensor, axes: tuple[Axis, ...], scale: float = 1.0) -> Tensor:
        values = values.to(self._device, torch.float32).mul(scale).to(self._dtype)
        view, scattered = target, None
        for dim, axis in enumerate(axes):
            if isinstance(axis.places, range):
                view = view.narrow(dim, 0, len(axis.places))
                continue
            values = values.index_select(dim, torch.tensor(axis.sources, device=self._device))
            scattered = dim, torch.tensor(axis.places, device=self._device)
        if scattered is None:
            view.copy_(values)
        else:
            view.index_copy_(*scattered, values)
        return target

    def _zeros(self, axes: tuple[Axis, ...]) -> Tensor:
        return torch.zeros([axis.size for axis in axes], dtype=self._dtype, device=self._device)

    def _random(self, name: str, axes: tuple[Axis, ...], std: float = RANDOM_STD) -> Tensor:
        # Seed and name are hashed together: the CPU's generator takes at most 32 bits.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return self._zeros(axes).normal_(0.0, std, generator=generator)


def _head_axes(shape_map: ShapeMap) -> tuple[Axis, Axis]:
    """Return the axes of rows of q_proj, and of k_proj and v_proj."""
    source, target = shape_map.source, shape_map.target
    heads = Axis(
        target.heads * target.head_dim, shape_map.head_channels(shape_map.heads), range(source.heads * source.head_dim)
    )
    held = [(place, head) for place, head in enumerate(shape_map.kv_heads) if head >= 0]
    kv_heads = Axis(
        target.kv_heads * target.head_dim,
        shape_map.head_channels([place for place, _ in held]),
        [head * source.head_dim + dim for _, head in held for dim in range(source.head_dim)],
    )
    return heads, kv_heads


def inflated_fields(
    fields: dict[str, Any], shape_map: ShapeMap, vocab_size: int, rms_norm_eps: float, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the target's config.json, made from the source's."""
    target = shape_map.target
    changes: dict[str, Any] = {
        **target.config_fields(),
        "rms_norm_eps": rms_norm_eps,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "dtype" if "dtype" in fields else "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if fields.get("layer_types"):
        changes["layer_types"] = ["full_attention"] * target.layers
    if "max_window_layers" in fields:
        changes["max_window_layers"] = target.layers
    return {**fields, **changes}
