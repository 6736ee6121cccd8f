"""Quantization of weights as config.json describes it, validated before any weight is read. Torch-free.

A *scheme* is how one matrix is stored. Most checkpoints have one scheme for all linear layers but those on a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.models.fields import get_object, get_strings

_LINEAR = r".*_proj|.*\.experts\.\d+\.w[123]"
"""Matrices of attention and MLPs; Mixtral has its own names for those of experts."""
SUPPORTED = "fp8 (per tensor, channel or block), int8 (per channel), int4 (awq, gptq, compressed-tensors) and mxfp4"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix [num_out, size] is stored. `layout` names its tensors (outrider.layers.formats.FORMATS).

    `kind`: "fp8", "int8", "int4" or "mxfp4", as in kernels.quant_weight. `group`: columns that share a scale, 0 for
    all. `block`: rows that share a scale, 1 unless there are blocks, 0 for all. `symmetric`: int4 has no stored zeros.
    `input_scale`: there is a scale of activations, which is not used, because ours stay in 16 bits.
    `zero_offset`: what is added to stored zeros. `library`: a library may multiply, whose result for a row depends on
    how many rows are beside it. `rounds_rows`: where products of many rows are faster with rows in fp8, these may be
    rounded to it.
    """

    layout: str
    kind: str
    group: int = 0
    block: int = 1
    symmetric: bool = True
    input_scale: bool = False
    zero_offset: int = 0
    library: bool = True
    rounds_rows: bool = False

    def without_library(self) -> Scheme:
        """Return the scheme with products only by our own kernels, which can leave them in float32."""
        return replace(self, library=False)

    @property
    def bits(self) -> int:
        """Bits of a weight, without scales."""
        return 8 if self.kind in ("fp8", "int8") else 4

    def num_bytes(self, num_out: int, size: int) -> int:
        """Return the memory of a matrix as kernels read it: its codes, and roughly its scales."""
        columns, rows = size // (self.group or size), num_out // max(self.block, 1)
        return num_out * size * self.bits // 8 + columns * rows * (1 if self.kind == "mxfp4" else 4)

    @property
    def name(self) -> str:
        """The name for people: `fp8`, `fp8 128x128`, `int4 g128`."""
        if self.kind == "fp8":
            return f"fp8 {self.block}x{self.group}" if self.group else "fp8"
        return f"{self.kind} g{self.group}" if self.group else self.kind


@dataclass(frozen=True, slots=True)
class Quantization:
    """Schemes of a checkpoint's linear layers: a layer has the first one whose target matches, unless `ignored` does.

    Targets and `ignored` are regular expressions for whole names.
    """

    method: str
    schemes: tuple[tuple[str, Scheme], ...]
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The names of the schemes, for people."""
        return ", ".join(dict.fromkeys(scheme.name for _, scheme in self.schemes))

    def without_library(self) -> Quantization:
        """Return the schemes with products only by our own kernels."""
        return replace(self, schemes=tuple((pattern, scheme.without_library()) for pattern, scheme in self.schemes))

    def scheme_of(self, *modules: str) -> Scheme | None:
        """Return the scheme of matrices that are fused into one, by their modules' names in checkpoints; None: 16 bits.

        Raises ConfigError if their schemes differ.
        """
        found = [self._scheme_of(module) for module in modules]
        if any(scheme != found[0] for scheme in found):
            shown = ", ".join(
                f"{module}: {scheme.name if scheme else 'none'}" for module, scheme in zip(modules, found, strict=True)
            )
            raise ConfigError(f"config.json: quantization_config differs where layers are computed as one ({shown})")
        return found[0]

    def _scheme_of(self, module: str) -> Scheme | None:
        # Multimodal checkpoints put a prefix before the decoder's names, and heads leave `model.` out.
        inner = module.removeprefix("model.")
        names = (module, inner, f"language_model.{module}", f"model.language_model.{inner}")
        if any(re.fullmatch(pattern, name) for pattern in self.ignored for name in names):
            return None
        for pattern, scheme in self.schemes:
            if any(re.fullmatch(pattern, name) for name in names):
                return scheme
        return None


EIGHT_BITS = Scheme("wide", "fp8", rounds_rows=True)
"""A matrix in 16 bits that is rounded to fp8 as it is loaded, for guesses: these change no answer."""
HEAD_IN_EIGHT_BITS = Quantization("fp8", ((rf"{_LINEAR}|lm_head", EIGHT_BITS),))
"""Of a draft head: its layers' and its output matrices."""


def read_quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization in `quantization_config` (or `compression_config`) of config.json; None without one.

    Raises ConfigError, naming, in one line, the method or field that is not supported.
    """
    config = get_object(fields, "quantization_config") or get_object(fields, "compression_config")
    if not config:
        return None
    method = config.get("quant_method")
    reader = _READERS.get(str(method))
    if reader is None:
        raise ConfigError(
            f"config.json: quantization_config.quant_method {method!r} is not supported; supported are {SUPPORTED}"
        )
    return reader(config)


def _fp8(config: Mapping[str, Any]) -> Quantization:
    _require(config, "fmt", ("e4m3", None))
    _require(config, "activation_scheme", ("dynamic", "static", None))
    block = config.get("weight_block_size")
    static = config.get("activation_scheme") == "static"
    if block is None:
        return Quantization("fp8", ((_LINEAR, Scheme("fp8", "fp8", 0, 0, input_scale=static)),), _not_converted(config))
    rows, columns = _block(block)
    scheme = Scheme("fp8-inverse", "fp8", columns, rows, input_scale=static)
    return Quantization("fp8", ((_LINEAR, scheme),), _not_converted(config))


def _awq(config: Mapping[str, Any]) -> Quantization:
    _require(config, "bits", (4,))
    _require(config, "version", ("gemm", "GEMM", None))
    scheme = Scheme("awq", "int4", _group(config.get("group_size")), symmetric=False)
    return Quantization("awq", ((_LINEAR, scheme),), _not_converted(config))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    _require(config, "bits", (4,))
    if config.get("desc_act"):
        raise ConfigError(
            "config.json: quantization_config.desc_act (act-order) is not supported; quantize with desc_act false"
        )
    _require(config, "lm_head", (False, None))
    # The field has two names. If both are there, transformers uses checkpoint_format.
    name = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
    form = _require(config, name, ("gptq", "gptq_v2", None))
    offset, group = 0 if form == "gptq_v2" else 1, config.get("group_size")

    def scheme(size: Any) -> Scheme:
        return Scheme("gptq", "int4", _group(size), symmetric=False, zero_offset=offset)

    schemes, ignored = [], list(_not_converted(config))
    rules = get_object(config, "dynamic")
    for rule in rules:
        pattern = _prefix_pattern(rule.removeprefix("-:").removeprefix("+:"), "dynamic")
        if rule.startswith("-:"):
            ignored.append(pattern)
            continue
        changes = get_object(rules, rule)
        if changes.get("bits", 4) != 4 or changes.get("desc_act"):
            raise ConfigError(
                f"config.json: quantization_config.dynamic {rule!r}: {json.dumps(changes)} is not supported; "
                "4 bits without desc_act are"
            )
        schemes.append((pattern, scheme(changes.get("group_size", group))))
    return Quantization("gptq", (*schemes, (_LINEAR, scheme(group))), tuple(ignored))


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", ((r".*\.experts.*", Scheme("mxfp4-blocks", "mxfp4", 32)),), _not_converted(config))


def _compressed(config: Mapping[str, Any]) -> Quantization | None:
    groups = get_object(config, "config_groups")
    if not groups and not get_object(config, "kv_cache_scheme"):
        raise ConfigError("config.json: quantization_config.config_groups is missing")
    if get_object(config, "sparsity_config").get("format", "dense") != "dense":
        raise ConfigError("config.json: quantization_config.sparsity_config is not supported; only dense weights are")
    # A group that names a layer takes precedence over one that names its class, whichever comes first.
    named: list[tuple[str, Scheme]] = []
    of_class: list[tuple[str, Scheme]] = []
    for name in groups:
        group = get_object(groups, name)
        if not get_object(group, "weights"):
            # Only for activations, as in attention: ours stay in 16 bits.
            continue
        scheme = _compressed_scheme(name, group, group.get("format") or config.get("format"))
        for target in get_strings(group, "targets") or ["Linear"]:
            if target == "Linear":
                of_class.append((f"{_LINEAR}|.*\\.gate|lm_head", scheme))
            else:
                named.append((_pattern(target), scheme))
    ignored = tuple(map(_pattern, get_strings(config, "ignore")))
    schemes = (*named, *of_class)
    return Quantization("compressed-tensors", schemes, ignored) if schemes else None


def _compressed_scheme(name: str, group: Mapping[str, Any], form: Any) -> Scheme:
    where = f"quantization_config.config_groups.{name}"
    weights = get_object(group, "weights")
    kind = (weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy"))
    inputs = get_object(group, "input_activations")
    static = bool(inputs) and not inputs.get("dynamic", False)
    if kind[:2] == ("float", 8) and form in ("float-quantized", "naive-quantized", None):
        if kind[2] == "tensor":
            return Scheme("fp8", "fp8", 0, 0, input_scale=static)
        if kind[2] == "channel":
            return Scheme("fp8", "fp8", 0, 1, input_scale=static)
        if kind[2] == "block":
            rows, columns = _block(weights.get("block_structure"))
            return Scheme("fp8", "fp8", columns, rows, input_scale=static)
    is_int8 = kind == ("int", 8, "channel") and form in ("int-quantized", "naive-quantized")
    if is_int8 and weights.get("symmetric", True):
        return Scheme("int8", "int8", input_scale=static)
    if kind[:2] == ("int", 4) and form == "pack-quantized" and kind[2] in ("group", "channel"):
        if weights.get("actorder") in ("group", "dynamic", True):
            raise ConfigError(
                f"config.json: {where}.weights.actorder is not supported; quantize without, or with 'weight'"
            )
        return Scheme(
            "packed", "int4", _group(weights.get("group_size")), symmetric=bool(weights.get("symmetric", True))
        )
    if kind[:2] == ("float", 4) and form == "mxfp4-pack-quantized":
        return Scheme("packed-mxfp4", "mxfp4", 32)
    raise ConfigError(
        f"config.json: {where} is {kind[0]}{kind[1]} by {kind[2]} in format {form!r}, which is not supported; "
        f"supported are {SUPPORTED}"
    )


def _require(config: Mapping[str, Any], name: str, allowed: Sequence[Any]) -> Any:
    value = config.get(name)
    if value not in allowed:
        shown = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise ConfigError(f"config.json: quantization_config.{name} {value!r} is not supported; supported: {shown}")
    return value


def _group(size: Any) -> int:
    if size in (None, -1):
        return 0
    if type(size) is not int or size < 16 or size % 16:
        raise ConfigError(f"config.json: quantization_config.group_size must be -1 or a multiple of 16, got {size!r}")
    return size


def _block(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, Sequence) or [type(size) for size in shape] != [int, int] or min(shape) < 16:
        raise ConfigError(f"config.json: the block of quantized weights must be two sizes from 16 on, got {shape!r}")
    rows, columns = shape
    if columns % 128:
        raise ConfigError(f"config.json: blocks of {columns} columns are not supported; multiples of 128 are")
    return rows, columns


def _pattern(text: str) -> str:
    """Return a regular expression for a name of compressed-tensors, which is one itself after `re:`."""
    return _prefix_pattern(text[3:], "config_groups") if text.startswith("re:") else re.escape(text)


def _prefix_pattern(text: str, where: str) -> str:
    """Return a regular expression for names that begin with what `text` matches. Raises ConfigError."""
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"config.json: quantization_config.{where}: {text!r} is no regular expression: {error}"
        ) from None
    return f"(?:{text}).*"


def _not_converted(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns for the listed modules: names, or parts of names between dots; `*` stands for anything."""
    names = get_strings(config, "modules_to_not_convert") or get_strings(config, "ignored_layers")
    return tuple(rf"(.*\.)?{re.escape(name.rstrip('.')).replace(re.escape('*'), '.*')}(\..*)?" for name in names)


_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization | None]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
