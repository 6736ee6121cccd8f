"""Where a small decoder lies inside a large one. Torch-free, and of use for whatever shares the target's axes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider_tools.inflate.shapes import Shape


def shape_of(config: ModelConfig) -> Shape:
    """The shape of a checkpoint."""
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
    )


@dataclass(frozen=True)
class Embedding:
    """Places of a source decoder's channels, heads and layers in a target shape.

    Residual and MLP channels keep their numbers: the first `source.hidden` and `source.intermediate` of the target's.
    """

    source: Shape
    target: Shape

    @classmethod
    def of(cls, config: ModelConfig, target: Shape) -> Embedding:
        """The embedding of the decoder that `config` describes.

        Raises:
            ConfigError: the target cannot hold the source exactly; says what stands against it.
        """
        embedding = cls(shape_of(config), target)
        problem = embedding._problem()
        if config.qk_norm:
            problem = "the source norms its heads (Qwen3), which does not survive a change of their number of channels"
        if config.rope.kind == "yarn" and embedding.rotary_stride > 1:
            problem = "the source has yarn rotary positions, which depend on head_dim"
        if problem:
            raise ConfigError(f"cannot inflate {embedding.source} into {target}: {problem}")
        return embedding

    @cached_property
    def rotary_stride(self) -> int:
        """Pair i of a source head is pair i * rotary_stride of a target head, where it turns at the same speed."""
        return self.target.head_dim // self.source.head_dim

    @cached_property
    def layers(self) -> list[int]:
        """Target layer of each source layer: spread evenly, so that a fraction of the depth stays that fraction."""
        return [layer * self.target.layers // self.source.layers for layer in range(self.source.layers)]

    @cached_property
    def dims(self) -> list[int]:
        """Target channel of each channel of a source head."""
        pairs = [pair * self.rotary_stride for pair in range(self.source.head_dim // 2)]
        return pairs + [self.target.head_dim // 2 + pair for pair in pairs]

    @cached_property
    def kv_heads(self) -> list[int]:
        """Source KV head that each target KV head holds, -1 where it holds none.

        A group of query heads that is larger than the target's groups takes several KV heads, which are then equal.
        """
        held = [head for head in range(self.source.kv_heads) for _ in range(self._copies)]
        return held + [-1] * (self.target.kv_heads - len(held))

    @cached_property
    def heads(self) -> list[int]:
        """Target query head of each source query head; each stays with its KV head."""
        own, group = self._groups
        places = []
        for head in range(self.source.heads):
            kv_head, member = divmod(head, own)
            copy, place = divmod(member, group)
            places.append((kv_head * self._copies + copy) * group + place)
        return places

    def head_channels(self, heads: list[int]) -> list[int]:
        """Target channels, in a matrix of whole heads, of source heads that lie at the target's `heads`."""
        return [head * self.target.head_dim + dim for head in heads for dim in self.dims]

    @property
    def _groups(self) -> tuple[int, int]:
        """Query heads to a KV head: in the source, in the target."""
        return self.source.heads // self.source.kv_heads, self.target.heads // self.target.kv_heads

    @property
    def _copies(self) -> int:
        own, group = self._groups
        return -(-own // group)

    def _problem(self) -> str:
        source, target = self.source, self.target
        if target.head_dim % source.head_dim:
            return "head_dim must be a multiple of the source's, for rotary pairs to find one of their speed"
        for name in ("hidden", "layers", "intermediate"):
            if getattr(target, name) < getattr(source, name):
                return f"{name} is below the source's {getattr(source, name)}; raise it (--shape NAME,{name}=N)"
        needed = source.kv_heads * self._copies
        if target.kv_heads < needed:
            return f"kv_heads must be at least {needed} to hold the source's groups of query heads"
        return ""
