"""The shapes that a small checkpoint can be inflated into. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, as counts of elements. The vocabulary is not among them: it stays the source's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())


# Those of Llama 3.1 and 3.2, Qwen2.5 and Llama 3.1 70B.
SHAPES = {
    "llama-1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192),
    "llama-3b": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, intermediate=8192),
    "llama-8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336),
    "qwen-32b": Shape(hidden=5120, layers=64, heads=40, kv_heads=8, head_dim=128, intermediate=27648),
    "llama-70b": Shape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, intermediate=28672),
}


def parse_shape(text: str) -> Shape:
    """A shape from its name, from sizes, or from both: `llama-8b`, `llama-1b,layers=30`, `hidden=640,layers=4,...`.

    Raises:
        ConfigError: an unknown name or size, a size that is no positive integer, or sizes missing.
    """
    base, *rest = text.split(",")
    if base in SHAPES:
        return _checked(replace(SHAPES[base], **_sizes(text, rest)))
    if "=" not in base:
        raise ConfigError(f"--shape {base}: no such shape; choose one of {', '.join(SHAPES)}, or give {_form()}")
    sizes = _sizes(text, [base, *rest])
    missing = [name for name in _names() if name not in sizes]
    if missing:
        raise ConfigError(f"--shape {text}: {', '.join(missing)} missing; give {_form()}")
    return _checked(Shape(**sizes))


def _sizes(text: str, words: Iterable[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in _names():
            raise ConfigError(f"--shape {text}: {name!r} is no size; the sizes are {', '.join(_names())}")
        if not (number.isascii() and number.isdecimal() and 0 < int(number) < 1 << 20):
            raise ConfigError(f"--shape {text}: {name} must be a positive integer below {1 << 20}, got {number!r}")
        sizes[name] = int(number)
    return sizes


def _checked(shape: Shape) -> Shape:
    if shape.heads % shape.kv_heads:
        raise ConfigError(f"--shape: heads {shape.heads} must be a multiple of kv_heads {shape.kv_heads}")
    if shape.head_dim % 2:
        raise ConfigError(f"--shape: head_dim must be even for rotary positions, got {shape.head_dim}")
    return shape


def _names() -> list[str]:
    return [field.name for field in fields(Shape)]


def _form() -> str:
    return ",".join(f"{name}=N" for name in _names())
