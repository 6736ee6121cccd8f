"""Language models that transformers has: its modules and its loading, our attention, KV, products and norms.

transformers looks up attention by name; ours hands q, k and v to the plan of the forward under way. What a model is
like is seen from a forward on the meta device, before any weight is read. transformers is imported when a model needs
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.attention_tiles import ScoreRules
from outrider.attention.base import AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.base import LanguageModel
from outrider.models.config import ModelShape, eos_token_ids, padded_head_dim, read_configs, stated_dtype
from outrider.models.transformers_modules import leave_rotation, left_for, replace_modules, rotary_of
from outrider.models.weights import Progress

_NAME = "outrider"
"""Of our attention among those of transformers."""
_META = torch.device("meta")
_DYNAMIC_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """What the attention of a layer is called with: heads, and sizes of keys and values."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelShape):
    """A model of transformers from outside. `head_dim` is a power of two, behind which heads are zeros."""

    num_parameters: int
    heads: LayerHeads


class _Attends(Protocol):
    """What is behind the attention that transformers calls: the survey of a model, or a forward."""

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, rules: _Rules) -> Tensor:
        """q [1, H, M, D], k and v [1, KVH, M, D] to [1, M, H, size of v]."""


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a layer asks of its scores beside a scale."""

    window: int | None
    softcap: float | None
    sinks: Tensor | None


_ATTENDS: ContextVar[_Attends] = ContextVar("attends")


def _attention(
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
    """What transformers calls in every layer; without a mask function of its name the mask is None."""
    attended = _ATTENDS.get()(module, query, key, value, scaling, _Rules(sliding_window, softcap, s_aux))
    return attended, None


class TransformersLM(LanguageModel):
    """A causal language model of transformers whose modules read and write our KV."""

    def __init__(
        self,
        base: nn.Module,
        rest: nn.Module,
        config: TransformersConfig,
        dtype: torch.dtype,
        device: torch.device,
        rotary: Rotary | None = None,
    ) -> None:
        """`base` and `rest` are a PreTrainedModel without head and without decoder, see `_split`.

        `rotary` is what layers leave undone, see `leave_rotation`; None where they rotate q and k themselves.
        """
        self.config: TransformersConfig = config
        self.dtype = dtype
        self.device = device
        self._base = base
        self._rest: Any = rest
        self._rotary = rotary or Rotary(None, config.head_dim, device)
        for number, layer in enumerate(_decoder_layers(base, config.num_layers)):
            _watch(layer, number, config.num_layers)

    @torch.inference_mode()
    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See LanguageModel."""
        plan = attention.plan(batch, kv, self.config.num_heads, self._rotary)
        forward = _Planned(plan, self.config, frozenset(feature_layers))
        with _attending(forward):
            output = self._base(
                input_ids=batch.token_ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0), use_cache=False
            )
        hidden = forward.seen[self.config.num_layers + 1] = output[0].squeeze(0)
        return hidden, [forward.seen[number] for number in feature_layers]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        logits: Tensor = self._rest(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0).float()


def _watch(layer: nn.Module, number: int, count: int) -> None:
    """Note the residual stream as it enters a layer, and leaves the last of `count`, for forwards that want it."""
    run = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        under_way = _ATTENDS.get()
        if not isinstance(under_way, _Planned):
            return run(*args, **kwargs)
        if number in under_way.wanted:
            under_way.seen[number] = (args[0] if args else kwargs["hidden_states"]).squeeze(0)
        output = run(*args, **kwargs)
        if number == count - 1 and count in under_way.wanted:
            under_way.seen[count] = (output if isinstance(output, Tensor) else output[0]).squeeze(0)
        return output

    layer.forward = forward


class _Decoded:
    """What a decoder returns, with its hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands for the decoder when hidden states are there already: what it is given as embeddings is its output."""

    @property
    def decoder(self) -> _Given:
        """Families that were once half of an encoder-decoder ask for it."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Decoded:
        """[1, R, hidden] as the last hidden state."""
        return _Decoded(inputs_embeds)


def _split(model: Any) -> nn.Module:
    """Take the decoder out of a PreTrainedModel, which then turns hidden states to logits: scales and caps are its own.

    In its base class a model of transformers names its decoder.
    """
    base: nn.Module = model.base_model
    setattr(model, model.base_model_prefix, _Given())
    return base


class _Planned:
    """A forward: attention by its plan, and the features that are wanted of it."""

    def __init__(self, plan: AttentionPlan, config: TransformersConfig, wanted: frozenset[int]) -> None:
        self.wanted = wanted
        self.seen: dict[int, Tensor] = {}
        self._plan = plan
        self._size = config.head_dim
        self._value_size = config.heads.value_size
        self._fits = config.heads.key_size == config.heads.value_size == config.head_dim
        self._rules: dict[tuple[float, _Rules], LayerRules] = {}

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, rules: _Rules) -> Tensor:
        found = self._rules_of(scaling if scaling is not None else q.shape[-1] ** -0.5, rules)
        if not self._fits:
            # Zeros change no score.
            q, k, v = (functional.pad(part, (0, self._size - part.shape[-1])) for part in (q, k, v))
        heads = torch.cat([part.squeeze(0).transpose(0, 1) for part in (q, k, v)], 1)
        attended = self._plan.attend(layer.layer_idx, heads, None, found)
        attended = attended.view(1, q.shape[2], q.shape[1], self._size)
        return attended if self._fits else attended[..., : self._value_size]

    def _rules_of(self, scaling: float, rules: _Rules) -> LayerRules:
        """Of a layer; layers of the same rules have the same object, which backends keep masks by."""
        found = self._rules.get((scaling, rules))
        if found is None:
            sinks = None if rules.sinks is None else rules.sinks.float()
            scores = ScoreRules(rules.window or 0, rules.softcap or 0.0, sinks)
            is_usual = abs(scaling * self._size**0.5 - 1.0) < 1e-6
            found = self._rules[scaling, rules] = LayerRules(None if is_usual else scaling, scores)
        return found


@contextmanager
def _attending(attends: _Attends) -> Iterator[None]:
    token = _ATTENDS.set(attends)
    try:
        yield
    finally:
        _ATTENDS.reset(token)


def describe_transformers(folder: Path) -> TransformersConfig:
    """What transformers makes of a folder's config.json. Raises ConfigError: names what cannot run."""
    return _survey(folder).config


def load_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> TransformersLM:
    """Load a folder as transformers does; no code of the folder is run. Raises ConfigError.

    On the meta device no weight is read.
    """
    survey = _survey(folder)
    config = survey.config
    if device == _META:
        return TransformersLM(survey.base, survey.rest, config, dtype, device)
    rest = _load(folder, survey.rest.config, dtype, device)
    if progress is not None:
        size = config.num_parameters * dtype.itemsize
        progress(size, size)
    rotary = None
    with torch.inference_mode():
        replace_modules(rest)
        base = _split(rest)
        if survey.leaves_rotation():
            rotary = rotary_of(base.get_submodule("rotary_emb"), config.head_dim, device)
    if rotary is not None:
        leave_rotation([base.get_submodule(name) for name in survey.attentions])
    return TransformersLM(base, rest, config, dtype, device, rotary)


@dataclass(frozen=True, slots=True)
class _Survey:
    """A model on the meta device, split, and what a forward there shows of it."""

    base: nn.Module
    rest: Any
    config: TransformersConfig
    attentions: list[str]
    """Names of the modules in `base` that attend, by layer."""

    def leaves_rotation(self) -> bool:
        """Whether all layers rotate q and k, and right before attention, by the one rotary embedding of the model.

        The model is changed for that: its attention leaves it out from now on.
        """
        rotary = getattr(self.base, "rotary_emb", None)
        if not isinstance(rotary, nn.Module):
            return False
        if not leave_rotation([self.base.get_submodule(name) for name in self.attentions]):
            return False
        cosines: list[Tensor] = []
        calls: list[bool] = []
        rotary.register_forward_hook(lambda module, args, output: cosines.append(output[0]))

        def note(layer: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, rules: _Rules) -> Tensor:
            calls.append(len(cosines) == 1 and left_for(q) is cosines[0] and left_for(k) is cosines[0])
            return _unattended(q, v)

        _forward_on_meta(self.base, note)
        return all(calls)


def _forward_on_meta(base: nn.Module, attends: _Attends) -> Tensor:
    ids = torch.zeros(1, 2, dtype=torch.int64, device=_META)
    with _attending(attends), torch.inference_mode():
        hidden: Tensor = base(input_ids=ids, position_ids=ids, use_cache=False)[0]
    return hidden


def _unattended(q: Tensor, v: Tensor) -> Tensor:
    """What attention returns, without values."""
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def _load(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    # With accelerate tensors go to the device one by one, without it they are all on the host first.
    direct = device.type != "cpu" and find_spec("accelerate") is not None
    try:
        model, told = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=_NAME,
            device_map=device if direct else None,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises whatever its parts do
        raise ConfigError(f"{folder}: transformers cannot load it: {_first_line(error)}") from error
    missing = sorted(told["missing_keys"])
    if missing:
        raise ConfigError(f"{folder}: tensor {missing[0]} missing from the checkpoint")
    return model.to(device).requires_grad_(False)


def _survey(folder: Path) -> _Survey:
    """Look at a model without reading weights. Raises ConfigError: names what cannot run."""
    fields, generation = read_configs(folder)
    name = (fields.get("architectures") or ["?"])[0]
    if fields.get("quantization_config"):
        raise ConfigError(f"config.json: {name} through transformers must be unquantized; it has a quantization_config")
    model = _empty(folder, name)
    config = model.config
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = {str(part.get("rope_type", "")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & set(_DYNAMIC_ROPE):
        raise ConfigError(
            f"config.json: rope_type {', '.join(kinds & set(_DYNAMIC_ROPE))} of {name} is not supported through "
            "transformers: it depends on how long the longest request is"
        )
    calls: dict[int | None, tuple[LayerHeads, bool]] = {}
    attentions: dict[int | None, nn.Module] = {}
    count = 0

    def note(layer: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, rules: _Rules) -> Tensor:
        nonlocal count
        count += 1
        heads = LayerHeads(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        number = getattr(layer, "layer_idx", None)
        attentions[number] = layer
        calls[number] = heads, getattr(layer, "is_causal", True) is not False
        return _unattended(q, v)

    num_parameters = model.num_parameters()
    base = _split(model)
    try:
        hidden = _forward_on_meta(base, note)
        with torch.inference_mode():
            logits = model(inputs_embeds=hidden, use_cache=False).logits
    except Exception as error:  # as above
        raise ConfigError(
            f"config.json: {name} does not run through transformers, whose forward would need values on the host or "
            f"fails: {_first_line(error)}"
        ) from error
    num_layers = int(config.num_hidden_layers)
    if count != num_layers or set(calls) != set(range(num_layers)):
        raise ConfigError(
            f"config.json: {name} is not supported: of its {num_layers} layers {count} attend through the attention "
            "interface of transformers; state-space, recurrent and hybrid models are not run"
        )
    heads, _ = calls[0]
    if any(found != (heads, True) for found in calls.values()):
        raise ConfigError(f"config.json: {name} is not supported: its layers attend both ways or differ in their heads")
    max_positions = int(config.max_position_embeddings)
    shape = TransformersConfig(
        architecture=str(name),
        vocab_size=logits.shape[-1],
        hidden_size=int(config.hidden_size),
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=padded_head_dim(max(heads.key_size, heads.value_size)),
        max_positions=max_positions,
        eos_token_ids=eos_token_ids(fields, generation),
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=stated_dtype(fields),
        num_parameters=num_parameters,
        heads=heads,
    )
    names = {module: name for name, module in base.named_modules()}
    return _Survey(base, model, shape, [names[attentions[number]] for number in range(num_layers)])


def _empty(folder: Path, name: str) -> Any:
    """The model without weights, in a format for which every product has a shape rule. Raises ConfigError."""
    import transformers

    logging, auto = (getattr(transformers, name) for name in ("logging", "AutoModelForCausalLM"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    transformers.AttentionInterface.register(_NAME, _attention)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    except Exception as error:  # as above
        raise ConfigError(
            f"config.json: architecture {name!r} is not known to transformers {transformers.__version__}: "
            f"{_first_line(error)}"
        ) from error
    if not known:
        raise ConfigError(f"config.json: {name} is no causal language model of transformers {transformers.__version__}")
    try:
        with _META:
            model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation=_NAME, trust_remote_code=False)
    except Exception as error:  # as above
        if isinstance(error, KeyError) and error.args == (_NAME,):
            raise ConfigError(
                f"config.json: {name} is not supported: transformers makes it with attention of its own alone"
            ) from error
        raise ConfigError(f"config.json: transformers cannot make {name} of it: {_first_line(error)}") from error
    return model.eval()


def _decoder_layers(base: nn.Module, count: int) -> Sequence[nn.Module]:
    """The list of `count` layers in a decoder."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ConfigError(f"{type(base).__name__} of transformers has no list of its {count} layers")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
