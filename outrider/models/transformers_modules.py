"""Modules of transformers' models in the form that is fast here: our products and norms behind torch's interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary, rotate

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


class _FusedProduct(threading.local):
    """The last input of fused products, and what came of it; forwards may run on several threads at a time."""

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


# Rotation is left to attention, which does it in the launch that writes k and v: the attention of a layer gets a
# forward that calls `_leave` where it would call the rotation of its family.

_ROTATION = "apply_rotary_pos_emb"
_PAIRS = 8


def _leave(q: Tensor, k: Tensor, cos: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    q.left_for = k.left_for = cos  # type: ignore[attr-defined]
    return q, k


def left_for(heads: Tensor) -> Tensor | None:
    """The cosines by which q or k was to be turned, where that was left to attention."""
    return getattr(heads, "left_for", None)


def leave_rotation(attentions: Sequence[nn.Module]) -> bool:
    """Make attention modules leave their rotation undone, where they all rotate halves of whole heads; else nothing."""
    forwards = [type(module).forward for module in attentions]
    if not all(isinstance(forward, FunctionType) and _rotates_halves(forward) for forward in forwards):
        return False
    for module, forward in zip(attentions, forwards, strict=True):
        names = {**forward.__globals__, _ROTATION: _leave}
        changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        changed.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(changed, module)
    return True


def _rotates_halves(forward: FunctionType) -> bool:
    """Whether what `forward` calls to rotate [1, H, M, D] does what `rotate` does."""
    if _ROTATION not in forward.__code__.co_names or _ROTATION not in forward.__globals__:
        return False
    rotary = Rotary.of_frequencies(torch.rand(_PAIRS), 1.0, torch.device("cpu"))
    q, k = torch.randn(1, 2, 3, 2 * _PAIRS), torch.randn(1, 1, 3, 2 * _PAIRS)
    positions = torch.tensor([0, 5, 2])
    half = positions.float().unsqueeze(1) * rotary.half_frequencies
    whole = torch.cat((half, half), 1).unsqueeze(0)
    try:
        found = forward.__globals__[_ROTATION](q, k, whole.cos(), whole.sin())
    except Exception:  # a rotation that takes something else raises whatever it meets
        return False
    cos, sin = rotary.angles(positions, torch.float32)
    wanted = [rotate(part.squeeze(0).transpose(0, 1), cos, sin).transpose(0, 1) for part in (q, k)]
    return all(torch.allclose(one.squeeze(0), other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def rotary_of(module: nn.Module, head_dim: int, device: torch.device) -> Rotary | None:
    """Ours for a rotary embedding of transformers that turns whole heads; None for one that does something else."""
    frequencies, scale = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, float | int):
        return None
    if frequencies.shape != (head_dim // 2,):
        return None
    ours = Rotary.of_frequencies(frequencies.float().cpu(), float(scale), device)
    positions = torch.tensor([0, 1, 77, 4000], device=device)
    cos, sin = module(torch.zeros(1, device=device), positions.unsqueeze(0))
    half = positions.float().unsqueeze(1) * ours.half_frequencies
    whole = torch.cat((half, half), 1)
    agree = all(
        found.shape == (1, *whole.shape) and torch.allclose(found[0].float(), wanted * ours.scale, atol=1e-3)
        for found, wanted in ((cos, whole.cos()), (sin, whole.sin()))
    )
    return ours if agree else None
