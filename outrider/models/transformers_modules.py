"""Faster replacements for modules of transformers' models: our products, norms, MLPs and attention.

The attention calls of all layers go to a forward's plan. A replacement is tried beside its module on random rows, and
is not used if it computes something else. It is not a module itself, because calling one costs two microseconds.
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
"""Most copies that are kept: values that differ from forward to forward must not pile up."""
Replacement = Callable[[Tensor], Tensor]
"""What replaces a module: maps [..., in] to [..., out]."""
ATTENTION = "outrider"
"""The name of our attention in transformers."""
NOTED_ATTENTION = "outrider-noted"
"""The name of the same attention with masks made by transformers, for the survey of how a model attends."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The attention that a layer asks for: the factor on scores, and what else is done to them."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def rules(self, head_dim: int, rotary: Rotary | None = None) -> LayerRules:
        """Return the rules for a plan over heads of `head_dim`; `rotary` is given if it is not the plan's."""
        sinks = None if self.sinks is None else self.sinks.float()
        scores = ScoreRules(self.window or 0, self.softcap or 0.0, sinks)
        is_usual = abs(self.scaling * head_dim**0.5 - 1.0) < 1e-6
        return LayerRules(None if is_usual else self.scaling, scores, rotary)


class AttentionHandler(ABC):
    """Handles the attention calls of a model's layers while it runs."""

    @abstractmethod
    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """Attend with q [1, H, M, D] and k and v [1, KVH, M, D], rotated; return [1, M, H, size of v].

        `layer` is the calling module.
        """

    def window_of(self, mask: Tensor) -> int | None:
        """Return how many positions a layer's mask lets a query see; None for all up to its own."""
        raise NotImplementedError

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """Attend with heads [M, H + 2 * KVH, D] of layer `number`, before rotation; return [M, H * D]."""
        raise NotImplementedError


_HANDLER: ContextVar[AttentionHandler] = ContextVar("current_handler")


def current_handler() -> AttentionHandler:
    """Return the handler of this thread."""
    return _HANDLER.get()


@contextmanager
def attention_by(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` handle the attention of layers that this thread runs within the block."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


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
    """Our attention as transformers calls it. A mask, if there is one, gives the window, else `sliding_window` does."""
    current = current_handler()
    window = sliding_window if attention_mask is None else current.window_of(attention_mask)
    call = LayerCall(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    return current.attend(module, query, key, value, call), None


@dataclass
class PlannedForward(AttentionHandler):
    """A forward: attends by its plan, and collects the `wanted` features in `seen`.

    `no_rotation` rotates nothing: it is for heads that are rotated already, if the plan rotates those of other layers.
    `rules`, by layer, are those of `attend_heads`; their windows hold for `attend`, too.
    """

    plan: AttentionPlan
    num_kv_heads: int
    head_dim: int
    no_rotation: Rotary | None
    rules: Sequence[LayerRules]
    wanted: frozenset[int]
    seen: dict[int, Tensor] = field(default_factory=dict)
    _rules_of: dict[LayerCall, LayerRules] = field(default_factory=dict)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """See AttentionHandler. If a layer has fewer kv heads than others, each is several times in the KV cache."""
        # Made once per forward for all layers that ask for the same. Here there are no masks that show windows.
        call = replace(call, window=self.rules[layer.layer_idx].scores.window)
        rules = self._rules_of.get(call)
        if rules is None:
            rules = self._rules_of[call] = call.rules(self.head_dim, self.no_rotation)
        size, value_size = self.head_dim, v.shape[-1]
        # Zeros change no score.
        parts = [part if part.shape[-1] == size else pad(part, (0, size - part.shape[-1])) for part in (q, k, v)]
        if (copies := self.num_kv_heads // k.shape[1]) > 1:
            parts[1:] = (part.repeat_interleave(copies, 1) for part in parts[1:])
        heads = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts], 1)
        attended = self.plan.attend(layer.layer_idx, heads, None, rules).view(1, q.shape[2], q.shape[1], size)
        # Some families take a view of the result.
        return attended if value_size == size else attended[..., :value_size].contiguous()

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """See AttentionHandler."""
        return self.plan.attend(number, heads, None, self.rules[number])


@dataclass
class DenseForward(AttentionHandler):
    """Attention of one text over itself, for trying modules. `positions` int64 [M]; `calls` by layer."""

    positions: Tensor
    num_heads: int
    rotary: Rotary
    calls: Sequence[LayerCall]
    seen: list[Tensor] = field(default_factory=list)
    """Queries, keys and values of each call."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """See AttentionHandler."""
        self.seen += (q, k, v)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scaling, enable_gqa=True)
        return attended.transpose(1, 2)

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """See AttentionHandler."""
        num_kv_heads = (heads.shape[1] - self.num_heads) // 2
        qk, v = heads.split((self.num_heads + num_kv_heads, num_kv_heads), 1)
        turned = rotate(qk, *self.rotary.angles(self.positions, heads.dtype))
        q, k = turned.split((self.num_heads, num_kv_heads), 1)
        parts = [part.transpose(0, 1).unsqueeze(0) for part in (q, k, v)]
        return self.attend(None, parts[0], parts[1], parts[2], self.calls[number]).flatten(2).squeeze(0)


class HostConstants(TorchFunctionMode):
    """Keeps in `copies` what modules copy from the host to a GPU, and supplies it while a CUDA graph is captured, since
    a graph cannot hold such copies.

    Modules copy numbers that they make again in every forward, such as the epsilon of Gemma 3n; the forward before each
    capture copies the same ones. A copy is found by what it was made of.
    """

    def __init__(self, copies: dict[tuple[object, ...], Tensor], kind: str = "cuda") -> None:
        """`kind` is the type of the device that is copied to."""
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
            # Not keyed by the text of values, which is cut short and rounded for arrays and lists of tensors.
            given = torch.tensor(given, dtype=options.get("dtype"), device="cpu")
        numbers = given.flatten().contiguous().view(torch.uint8).numpy().tobytes()
        arguments = [("", value) for value in args[1:]] + [item for item in options.items() if item[0] != "data"]
        key = (func, given.dtype, given.shape, numbers, *((name, _key_part(value)) for name, value in arguments))
        if self._kind == "cuda" and torch.cuda.is_current_stream_capturing() and key in self._copies:
            return self._copies[key].clone()
        made = func(*args, **options)
        if made.device.type == self._kind and len(self._copies) < _MAX_CONSTANTS:
            self._copies.setdefault(key, made.clone())
        return made


def _key_part(value: object) -> object:
    """Return an argument of a copy as part of a key: of a tensor, device and dtype, which the result takes from it."""
    return (value.device, value.dtype) if isinstance(value, Tensor) else repr(value)


def replace_attention(
    base: nn.Module, names: Sequence[str], num_heads: int, calls: Sequence[LayerCall], head_dim: int
) -> Rotary | None:
    """Replace those attention modules of a loaded decoder, called `names` by layer, that do no more than ours.

    Ours rotate halves of whole heads by the decoder's one rotary embedding. Returns our form of that embedding; None if
    nothing was replaced.
    """
    embedding = getattr(base, "rotary_emb", None)
    rotary = _rotary(embedding, head_dim) if isinstance(embedding, nn.Module) else None
    if rotary is None or not isinstance(embedding, nn.Module):
        return None
    count, positions = 0, torch.tensor([0, 3, 50], device=rotary.half_frequencies.device)
    for number, name in enumerate(names):
        module = base.get_submodule(name)
        # The rows that are compared may not include any that a clip changes.
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
    # Parents come before their children, so that a whole MLP is replaced before its linear layers, and these are then
    # not visited: the iterator looks for children after the loop's body.
    for parent in model.modules():
        if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue  # it can run modules, but no other functions
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
            continue  # it reads the weights of its children
        _fuse(parent)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                _put(parent, name, _product(_linear([child]), to_float32=child is head))


def _put(parent: nn.Module, name: str, better: Callable[..., Any]) -> None:
    delattr(parent, name)
    object.__setattr__(parent, name, better)


def _linear(parts: list[nn.Linear]) -> Linear:
    """Return one product for stacked matrices that multiply the same rows."""
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
    """Return a module's children of these names if they are linear layers that can be fused; else None.

    They must have the same input size, and biases all or none.
    """
    found = [getattr(module, name, None) for name in names]
    linears = [child for child in found if type(child) is nn.Linear]
    if len(linears) < len(names) or len({(child.in_features, child.bias is None) for child in linears}) > 1:
        return None
    return linears


def _product(linear: Linear, to_float32: bool = False) -> Replacement:
    """Return our product as the replacement of an nn.Linear."""
    product: Replacement = linear.to_float32 if to_float32 else linear
    return lambda rows: product(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)


class _FusedProduct(threading.local):
    """The last input of a fused product, and its result, for each thread: forwards may run on several at a time."""

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
        """Map [..., in] to [..., out]."""
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
    """Return a root mean square norm as the replacement of a module that looks like one; None for any other."""
    weights = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(weights) != ["weight"] or weights["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = weights["weight"].data
    norm = RMSNorm((0,), eps, weight.dtype, weight.device)
    norm.weight = weight
    return lambda rows: norm(rows.flatten(0, -2)).view_as(rows)


def _gated_mlp(module: nn.Module) -> Replacement | None:
    """Return silu(gate) * up, then down, as the replacement of what looks like a gated MLP; None for any other."""
    inner, outer = _linears(module, ("gate_proj", "up_proj")), _linears(module, ("down_proj",))
    if inner is None or outer is None or not _has_children(module, {"gate_proj", "up_proj", "down_proj", "act_fn"}):
        return None
    act = getattr(module, "act_fn", None)
    # Checked apart: if gates are far from 0, results of another function differ by no more than bfloat16 rounds.
    if act is not None and not _is_silu(act, inner[0].weight.device):
        return None
    gate_up, down = _linear(inner), _linear(outer)
    return lambda rows: down(gate_up.gated(rows.flatten(0, -2))).view_as(rows)


def _attention(module: nn.Module, number: int, head_dim: int) -> Callable[..., tuple[Tensor, None]] | None:
    """Return attention as the replacement of a module that looks like it; None for any other."""
    inner, outer = _linears(module, ("q_proj", "k_proj", "v_proj")), _linears(module, ("o_proj",))
    if inner is None or outer is None or not _has_children(module, {"q_proj", "k_proj", "v_proj", "o_proj"}):
        return None
    qkv, output = _linear(inner), _linear(outer)

    def attend(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Map [1, M, hidden] to the same shape; there are no attention weights to return."""
        rows = hidden_states.squeeze(0)
        heads = qkv(rows).view(rows.shape[0], -1, head_dim)
        return output(current_handler().attend_heads(number, heads)).unsqueeze(0), None

    return attend


def _is_silu(act: Callable[[Tensor], Tensor], device: torch.device) -> bool:
    numbers = torch.linspace(-4.0, 4.0, 65, device=device)
    try:
        return torch.allclose(act(numbers), silu(numbers), atol=1e-5)
    except Exception:  # an activation with bfloat16 weights of its own does not take these numbers
        return False


def _has_children(module: nn.Module, names: set[str]) -> bool:
    """Whether a module has only children of these names, and no weights of its own."""
    return {name for name, _ in module.named_children()} <= names and not list(module.parameters(recurse=False))


def _attends_alike(
    module: nn.Module, other: Callable[..., tuple[Tensor, None]], embedding: nn.Module, forward: DenseForward
) -> bool:
    """Whether two attentions agree on random rows at the positions of `forward`, which must not have been used yet."""
    rows = _random_rows(module)
    angles = embedding(rows, forward.positions.unsqueeze(0))
    with attention_by(forward):
        try:
            found = module(hidden_states=rows, position_embeddings=angles, attention_mask=None)
        except Exception:  # a module that takes something else may raise anything
            return False
        made = other(rows)
    # If scores are almost equal, or far apart, a wrong rotation shows in queries and keys, but not in the output.
    theirs, ours = (found[0], *forward.seen[:3]), (made[0], *forward.seen[3:])
    return len(found) == 2 and len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _agree(module: nn.Module, other: Replacement) -> bool:
    """Whether two modules agree on random rows."""
    # With a mean: without one, a norm that subtracts it would differ by no more than bfloat16 rounds.
    rows = _random_rows(module) + 1.0
    found = other(rows)
    try:
        return _close(found, module(rows))
    except Exception:  # a module that takes or returns something else may raise anything
        return False


def _random_rows(module: nn.Module) -> Tensor:
    """Return rows [1, 3, hidden] for a module whose first weight takes rows of that size."""
    weight = next(module.parameters())
    return torch.randn(1, _ROWS, weight.shape[-1], dtype=weight.dtype, device=weight.device)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether both are equal up to rounding."""
    limit = 1e-4 if expected.dtype == torch.float32 else 3e-2
    return bool((found - expected).abs().max() <= limit * expected.abs().max())


def _rotary(embedding: nn.Module, head_dim: int) -> Rotary | None:
    """Return our form of a rotary embedding of transformers that rotates whole heads; None for any other."""
    frequencies, scale = getattr(embedding, "inv_freq", None), getattr(embedding, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, float | int):
        return None
    if frequencies.shape != (head_dim // 2,):
        return None
    return Rotary.of_frequencies(frequencies.float().cpu(), float(scale), frequencies.device)
