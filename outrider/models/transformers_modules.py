"""Modules of transformers' models in the form that is fast here: our products, norms, MLPs and attention.

Attention that is called in every layer goes to a forward's plan. What replaces a module is tried beside it on random
rows, and stays away if it does not compute the same. It is no module itself: those cost two microseconds a call.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention, silu
from torch.overrides import TorchFunctionMode

from kernels.attention_tiles import ScoreRules
from outrider.attention.base import AttentionPlan, LayerRules
from outrider.layers.linear import Linear, RMSNorm
from outrider.layers.rotary import Rotary, rotate

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that multiply the same rows: their matrices become one."""
_ROWS = 3
_MAX_CONSTANTS = 256
"""What differs from forward to forward, and is none, must not pile up."""
Replacement = Callable[[Tensor], Tensor]
"""What stands in the place of a module: [..., in] to [..., out]."""
ATTENTION = "outrider"
"""Of our attention among those of transformers."""
NOTED_ATTENTION = "outrider-noted"
"""The same where transformers makes masks, for a model's attention to be looked at."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asks of attention: the factor on scores, and what else is done to them."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def rules(self, head_dim: int, rotary: Rotary | None = None) -> LayerRules:
        """The same for a plan over heads of `head_dim`; `rotary`: if it is not the plan's."""
        sinks = None if self.sinks is None else self.sinks.float()
        scores = ScoreRules(self.window or 0, self.softcap or 0.0, sinks)
        is_usual = abs(self.scaling * head_dim**0.5 - 1.0) < 1e-6
        return LayerRules(None if is_usual else self.scaling, scores, rotary)


class Attends(ABC):
    """Whatever is behind the attention of a model's layers while it runs."""

    @abstractmethod
    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """q [1, H, M, D], k and v [1, KVH, M, D], rotated, to [1, M, H, size of v]. `layer` is the calling module."""

    def window_of(self, mask: Tensor) -> int | None:
        """How many positions a layer's mask lets a query see, None for all up to its own."""
        raise NotImplementedError

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """[M, H + 2 * KVH, D] before rotation, of layer `number`, to [M, H * D]."""
        raise NotImplementedError


_ATTENDS: ContextVar[Attends] = ContextVar("attends")


def under_way() -> Attends:
    """What attends in this thread."""
    return _ATTENDS.get()


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Within, layers that this thread runs attend so."""
    token = _ATTENDS.set(attends)
    try:
        yield
    finally:
        _ATTENDS.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; a mask that it has says which window holds, and `sliding_window` where it has none."""
    current = under_way()
    window = sliding_window if attention_mask is None else current.window_of(attention_mask)
    call = LayerCall(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    return current.attend(module, query, key, value, call), None


@dataclass
class PlannedForward(Attends):
    """A forward: attention by its plan, and the features that are wanted of it.

    `still` turns nothing: for heads that come rotated, if the plan turns those of other layers. `rules`, by layer, are
    those of `attend_heads`, and windows for all.
    """

    plan: AttentionPlan
    num_kv_heads: int
    head_dim: int
    still: Rotary | None
    rules: Sequence[LayerRules]
    wanted: frozenset[int]
    seen: dict[int, Tensor] = field(default_factory=dict)
    _told: dict[LayerCall, LayerRules] = field(default_factory=dict)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """See Attends. A layer with fewer kv heads than others has each of them several times in the KV cache."""
        # Made once a forward for all layers that ask for the same. Here there are no masks to tell windows.
        call = replace(call, window=self.rules[layer.layer_idx].scores.window)
        rules = self._told.get(call)
        if rules is None:
            rules = self._told[call] = call.rules(self.head_dim, self.still)
        size, value_size = self.head_dim, v.shape[-1]
        # Zeros change no score.
        parts = [part if part.shape[-1] == size else pad(part, (0, size - part.shape[-1])) for part in (q, k, v)]
        if (copies := self.num_kv_heads // k.shape[1]) > 1:
            parts[1:] = (part.repeat_interleave(copies, 1) for part in parts[1:])
        heads = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts], 1)
        attended = self.plan.attend(layer.layer_idx, heads, None, rules).view(1, q.shape[2], q.shape[1], size)
        # Some families ask for a view of it.
        return attended if value_size == size else attended[..., :value_size].contiguous()

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """See Attends."""
        return self.plan.attend(number, heads, None, self.rules[number])


@dataclass
class DenseForward(Attends):
    """Attention of one text over itself, to try modules with. `positions` int64 [M]; `calls` by layer."""

    positions: Tensor
    num_heads: int
    rotary: Rotary
    calls: Sequence[LayerCall]
    seen: list[Tensor] = field(default_factory=list)
    """Queries, keys and values of each call."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """See Attends."""
        self.seen += (q, k, v)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scaling, enable_gqa=True)
        return attended.transpose(1, 2)

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """See Attends."""
        num_kv_heads = (heads.shape[1] - self.num_heads) // 2
        qk, v = heads.split((self.num_heads + num_kv_heads, num_kv_heads), 1)
        turned = rotate(qk, *self.rotary.angles(self.positions, heads.dtype))
        q, k = turned.split((self.num_heads, num_kv_heads), 1)
        parts = [part.transpose(0, 1).unsqueeze(0) for part in (q, k, v)]
        return self.attend(None, parts[0], parts[1], parts[2], self.calls[number]).flatten(2).squeeze(0)


class HostConstants(TorchFunctionMode):
    """Keeps in `copies` what modules copy from the host to a GPU, and gives it to them while a CUDA graph is captured,
    which can hold no such copy.

    What they copy are numbers that they make anew in every forward, as Gemma 3n does its epsilon; the forward that runs
    before each capture copies the same. A copy is found by what it was made of.
    """

    def __init__(self, copies: dict[tuple[object, ...], Tensor], kind: str = "cuda") -> None:
        """`kind`: of the device that is copied to."""
        super().__init__()
        self._copies = copies
        self._kind = kind

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        given = args[0] if args else options.get("data")
        if func not in (torch.tensor, torch.Tensor.to) or (isinstance(given, Tensor) and given.device.type != "cpu"):
            return func(*args, **options)
        if not isinstance(given, Tensor):
            # Not by their text: that of arrays and of lists of tensors is cut short and rounded.
            given = torch.tensor(given, dtype=options.get("dtype"), device="cpu")
        numbers = given.flatten().contiguous().view(torch.uint8).numpy().tobytes()
        told = [("", value) for value in args[1:]] + [item for item in options.items() if item[0] != "data"]
        key = (func, given.dtype, given.shape, numbers, *((name, _told(value)) for name, value in told))
        if self._kind == "cuda" and torch.cuda.is_current_stream_capturing() and key in self._copies:
            return self._copies[key].clone()
        made = func(*args, **options)
        if made.device.type == self._kind and len(self._copies) < _MAX_CONSTANTS:
            self._copies.setdefault(key, made.clone())
        return made


def _told(value: object) -> object:
    """What a copy is told beside its numbers, as part of a key: of a tensor, as which to become, where it lies."""
    return (value.device, value.dtype) if isinstance(value, Tensor) else repr(value)


def replace_attention(
    base: nn.Module, names: Sequence[str], num_heads: int, calls: Sequence[LayerCall], head_dim: int
) -> Rotary | None:
    """Replace attention modules of a loaded decoder, called `names` by layer, that do no more than ours.

    They rotate halves of whole heads by the decoder's one rotary embedding. Returns ours for that embedding, and None
    where nothing was replaced.
    """
    embedding = getattr(base, "rotary_emb", None)
    rotary = _rotary(embedding, head_dim) if isinstance(embedding, nn.Module) else None
    if rotary is None or not isinstance(embedding, nn.Module):
        return None
    count, positions = 0, torch.tensor([0, 3, 50], device=rotary.half_frequencies.device)
    for number, name in enumerate(names):
        module = base.get_submodule(name)
        # Rows that a clip changes may not be among those that are compared.
        if calls[number].sinks is not None or getattr(getattr(module, "config", None), "clip_qkv", None):
            continue
        better = _attention(module, number, head_dim)
        forward = DenseForward(positions, num_heads, rotary, calls)
        if better is not None and _attends_alike(module, better, embedding, forward):
            parent, _, child = name.rpartition(".")
            _put(base.get_submodule(parent), child, better)
            count += 1
    return rotary if count else None


def replace_modules(model: Any) -> None:
    """Replace norms, gated MLPs and linear layers of a loaded PreTrainedModel."""
    head = model.get_output_embeddings()
    agree: dict[type[nn.Module], bool] = {}
    # Parents come before their children, whose own children are left alone where they were replaced.
    for parent in list(model.modules()):
        if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue  # it runs what are modules, and no other functions
        for name, child in list(parent.named_children()):
            kind = type(child)
            if not agree.get(kind, True):
                continue
            better = _norm(child) or _gated_mlp(child)
            if better is None:
                continue
            if kind not in agree:
                agree[kind] = _agree(child, better)
            if agree[kind]:
                _put(parent, name, better)
        if "weight" in unwrap(type(parent).forward).__code__.co_names:
            continue  # it looks at the weights of its children
        _fuse(parent)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                _put(parent, name, _product(_linear([child]), to_float32=child is head))


def _put(parent: nn.Module, name: str, better: Callable[..., Any]) -> None:
    delattr(parent, name)
    object.__setattr__(parent, name, better)


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


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear] | None:
    """Its children of these names, if they are linear layers that have biases all or none."""
    found = [getattr(module, name, None) for name in names]
    linears = [child for child in found if type(child) is nn.Linear]
    if len(linears) < len(names) or len({(child.in_features, child.bias is None) for child in linears}) > 1:
        return None
    return linears


def _product(linear: Linear, to_float32: bool = False) -> Replacement:
    """Our product in the place of an nn.Linear."""
    product: Replacement = linear.to_float32 if to_float32 else linear
    return lambda rows: product(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)


class _FusedProduct(threading.local):
    """The last input of fused products, and what came of it; forwards may run on several threads at a time."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.rows: Tensor | None = None
        self.product: Tensor | None = None


class _FusedPart:
    """Columns [first, end) of a fused product. The first part that sees new rows computes them for all."""

    def __init__(self, fused: _FusedProduct, first: int, end: int, is_last: bool) -> None:
        self._fused = fused
        self._columns = slice(first, end)
        self._is_last = is_last

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        fused = self._fused
        product = fused.product
        if product is None or fused.rows is not rows:
            fused.rows = rows
            fused.product = product = fused.linear(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)
        if self._is_last:
            # Nothing may keep memory of a captured forward.
            fused.rows = fused.product = None
        return product[..., self._columns]


def _fuse(parent: nn.Module) -> None:
    for names in _FUSED:
        linears = _linears(parent, names)
        if linears is None:
            continue
        fused, first = _FusedProduct(_linear(linears)), 0
        for name, part in zip(names, linears, strict=True):
            end = first + part.out_features
            _put(parent, name, _FusedPart(fused, first, end, is_last=name == names[-1]))
            first = end


def _norm(module: nn.Module) -> Replacement | None:
    """A root mean square norm in the place of what looks like one."""
    weights = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(weights) != ["weight"] or weights["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = weights["weight"].data
    norm = RMSNorm((0,), eps, weight.dtype, weight.device)
    norm.weight = weight
    return lambda rows: norm(rows.flatten(0, -2)).view_as(rows)


def _gated_mlp(module: nn.Module) -> Replacement | None:
    """silu(gate) * up, then down, in the place of what looks like a gated MLP."""
    inner, outer = _linears(module, ("gate_proj", "up_proj")), _linears(module, ("down_proj",))
    if inner is None or outer is None or not _has_children(module, {"gate_proj", "up_proj", "down_proj", "act_fn"}):
        return None
    act = getattr(module, "act_fn", None)
    # Where gates are far from 0, what comes of another function differs by no more than bfloat16 rounds.
    if act is not None and not _is_silu(act, inner[0].weight.device):
        return None
    gate_up, down = _linear(inner), _linear(outer)
    return lambda rows: down(gate_up.gated(rows.flatten(0, -2))).view_as(rows)


def _attention(module: nn.Module, number: int, head_dim: int) -> Callable[..., tuple[Tensor, None]] | None:
    """Attention in the place of what looks like it."""
    inner, outer = _linears(module, ("q_proj", "k_proj", "v_proj")), _linears(module, ("o_proj",))
    if inner is None or outer is None or not _has_children(module, {"q_proj", "k_proj", "v_proj", "o_proj"}):
        return None
    qkv, output = _linear(inner), _linear(outer)

    def attend(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[1, M, hidden] to the same shape; there are no attention weights to return."""
        rows = hidden_states.squeeze(0)
        heads = qkv(rows).view(rows.shape[0], -1, head_dim)
        return output(under_way().attend_heads(number, heads)).unsqueeze(0), None

    return attend


def _is_silu(act: Callable[[Tensor], Tensor], device: torch.device) -> bool:
    numbers = torch.linspace(-4.0, 4.0, 65, device=device)
    try:
        return torch.allclose(act(numbers), silu(numbers), atol=1e-5)
    except Exception:  # one with weights of its own, in bfloat16, takes no such numbers
        return False


def _has_children(module: nn.Module, names: set[str]) -> bool:
    """Whether it has no others, and no weights of its own."""
    return {name for name, _ in module.named_children()} <= names and not list(module.parameters(recurse=False))


def _attends_alike(
    module: nn.Module, other: Callable[..., tuple[Tensor, None]], embedding: nn.Module, forward: DenseForward
) -> bool:
    """Whether two attentions make the same of random rows at the positions of a forward, which begins here."""
    rows = _random_rows(module)
    angles = embedding(rows, forward.positions.unsqueeze(0))
    with attending(forward):
        try:
            found = module(hidden_states=rows, position_embeddings=angles, attention_mask=None)
        except Exception:  # one that takes something else raises whatever it meets
            return False
        made = other(rows)
    # Where scores are all but equal, or far apart, their rotation does not show in what comes of them.
    theirs, ours = (found[0], *forward.seen[:3]), (made[0], *forward.seen[3:])
    return len(found) == 2 and len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _agree(module: nn.Module, other: Replacement) -> bool:
    """Whether two modules make the same of random rows."""
    # With a mean: without, what subtracts it is no further off than bfloat16 rounds.
    rows = _random_rows(module) + 1.0
    found = other(rows)
    try:
        return _close(found, module(rows))
    except Exception:  # one that takes or returns something else raises whatever it meets
        return False


def _random_rows(module: nn.Module) -> Tensor:
    """[1, 3, hidden] for a module whose first weight takes rows of that size."""
    weight = next(module.parameters())
    return torch.randn(1, _ROWS, weight.shape[-1], dtype=weight.dtype, device=weight.device)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding."""
    limit = 1e-4 if expected.dtype == torch.float32 else 3e-2
    return bool((found - expected).abs().max() <= limit * expected.abs().max())


def _rotary(embedding: nn.Module, head_dim: int) -> Rotary | None:
    """Ours for a rotary embedding of transformers that turns whole heads; None for one that does something else."""
    frequencies, scale = getattr(embedding, "inv_freq", None), getattr(embedding, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, float | int):
        return None
    if frequencies.shape != (head_dim // 2,):
        return None
    return Rotary.of_frequencies(frequencies.float().cpu(), float(scale), frequencies.device)
