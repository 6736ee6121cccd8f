"""Modules of transformers' models in the form that is fast here: our products and norms behind torch's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that multiply the same rows: their matrices become one."""


def replace_modules(model: Any) -> None:
    """Replace what we have a faster form of in a loaded PreTrainedModel.

    Norms and gated MLPs are known by what they compute: one of each class is tried on random rows.
    """
    head = model.get_output_embeddings()
    agree: dict[type[nn.Module], bool] = {}
    # Parents come before their children, whose own children are left alone where they were replaced.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            better = _norm(child) or _gated_mlp(child)
            if better is not None and type(child) not in agree:
                agree[type(child)] = _agree(child, better)
            if better is not None and agree[type(child)]:
                setattr(parent, name, better)
        _fuse(parent)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _Product(_linear([child]), to_float32=child is head))


def _linear(parts: list[nn.Linear]) -> Linear:
    """One product for matrices of the same rows, one upon another."""
    weights, biases = [part.weight.data for part in parts], [part.bias.data for part in parts if part.bias is not None]
    num_out = sum(part.out_features for part in parts)
    # Made without memory: the weights are there already.
    joined = Linear(parts[0].in_features, num_out, False, weights[0].dtype, torch.device("meta"))
    joined.weight = weights[0] if len(parts) == 1 else torch.cat(weights)
    if biases:
        joined.bias = torch.cat(biases)
    joined.pack()
    return joined


class _Product(nn.Module):
    """Our product where an nn.Linear was."""

    def __init__(self, linear: Linear, to_float32: bool = False) -> None:
        super().__init__()
        self._product: Callable[[Tensor], Tensor] = linear.to_float32 if to_float32 else linear

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._product(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)


class _FusedProduct:
    """The last input of fused products, and what came of it."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.rows: Tensor | None = None
        self.product: Tensor | None = None


class _FusedPart(nn.Module):
    """Columns [first, end) of a fused product. The first part that sees new rows computes them for all."""

    def __init__(self, shared: _FusedProduct, first: int, end: int, is_last: bool) -> None:
        super().__init__()
        self._shared = shared
        self._columns = slice(first, end)
        self._is_last = is_last

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        shared = self._shared
        product = shared.product
        if product is None or shared.rows is not rows:
            shared.rows = rows
            shared.product = product = shared.linear(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])
        if self._is_last:
            # Nothing may keep memory of a captured forward.
            shared.rows = shared.product = None
        return product[..., self._columns]


def _fuse(parent: nn.Module) -> None:
    for names in _FUSED:
        parts = [getattr(parent, name, None) for name in names]
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) != len(names) or len({(part.in_features, part.bias is None) for part in linears}) != 1:
            continue
        shared, first = _FusedProduct(_linear(linears)), 0
        for name, part in zip(names, linears, strict=True):
            end = first + part.out_features
            setattr(parent, name, _FusedPart(shared, first, end, is_last=name == names[-1]))
            first = end


class _Norm(nn.Module):
    """Our norm where one of transformers was."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, rows: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        return self._norm(rows.flatten(0, -2)).view_as(rows)


def _norm(module: nn.Module) -> _Norm | None:
    """A root mean square norm in the place of what looks like one."""
    weights = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(weights) != ["weight"] or weights["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = weights["weight"].data
    norm = RMSNorm((0,), eps, weight.dtype, weight.device)
    norm.weight = weight
    return _Norm(norm)


class _GatedMlp(nn.Module):
    """silu(gate) * up, then down, where a gated MLP of transformers was."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._down = down

    def forward(self, rows: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        return self._down(self._gate_up.gated(rows.flatten(0, -2))).view_as(rows)


def _gated_mlp(module: nn.Module) -> _GatedMlp | None:
    """A gated MLP in the place of what looks like one."""
    children = dict(module.named_children())
    names = ("gate_proj", "up_proj", "down_proj")
    if not children.keys() >= set(names) or list(module.named_parameters(recurse=False)):
        return None
    linears = [part for part in (children[name] for name in names) if type(part) is nn.Linear]
    if len(linears) < len(names) or len(children) > len(names) + 1 or len({part.bias is None for part in linears}) > 1:
        return None
    return _GatedMlp(_linear(linears[:2]), _linear(linears[2:]))


def _agree(module: nn.Module, other: nn.Module) -> bool:
    """Whether two modules make the same of three random rows, up to rounding."""
    weight = next(module.parameters())
    rows = torch.randn(1, 3, weight.shape[-1], dtype=weight.dtype, device=weight.device)
    expected, found = module(rows), other(rows)
    limit = 1e-4 if weight.dtype == torch.float32 else 3e-2
    return bool((expected - found).abs().max() <= limit * expected.abs().max())
