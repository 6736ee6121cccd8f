"""Surveys models of transformers by forwards on the meta device, before any weight is read.

A model is made without weights and split into its decoder and the rest, which turns hidden states into logits. One
forward shows how its layers attend; another one, in which transformers makes masks, shows which windows they have. What
cannot run is refused by name. transformers is imported when a model needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.attention.base import LayerRules
from outrider.errors import ConfigError
from outrider.models.config import ModelShape, eos_token_ids, padded_head_dim, stated_dtype, text_fields
from outrider.models.families import FAMILIES
from outrider.models.fields import get_int, read_configs
from outrider.models.transformers_modules import (
    ATTENTION,
    NOTED_ATTENTION,
    AttentionHandler,
    LayerCall,
    attention,
    attention_by,
    current_handler,
)

META = torch.device("meta")
_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelShape):
    """The shape of a model of transformers. `head_dim` is a power of two, to which heads are padded with zeros."""

    num_parameters: int
    calls_are_plain: bool

    @property
    def has_plain_attention(self) -> bool:
        """See ModelShape."""
        return self.calls_are_plain


@dataclass(frozen=True, slots=True)
class Survey:
    """A model on the meta device, split in two, and what a forward there shows about it."""

    base: nn.Module
    rest: Any
    config: TransformersConfig
    attentions: list[str]
    """Names of the attention modules in `base`, by layer."""
    calls: list[LayerCall]
    """The attention that each of them asks for."""
    is_whole: bool
    """Whether heads are as many and as large as in the KV cache."""
    is_part: bool
    """Whether it is the text part of a model of images or sound."""

    @property
    def rules(self) -> list[LayerRules]:
        """The attention that each layer asks for, with heads of the size in the KV cache."""
        return [call.rules(self.config.head_dim) for call in self.calls]


def survey_model(folder: Path) -> Survey:
    """Survey a model without reading weights. Raises ConfigError, naming what cannot run."""
    fields, generation = read_configs(folder)
    name = (fields.get("architectures") or ["?"])[0]
    if fields.get("quantization_config"):
        raise ConfigError(f"config.json: {name} through transformers must be unquantized; it has a quantization_config")
    text = text_fields(fields)
    is_part = text is not fields
    model = _empty(folder, name, is_part)
    config = model.config
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = {str(part.get("rope_type", "")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if "longrope" in kinds:
        fix = "; leave out --model-impl transformers" if name in FAMILIES else ""
        raise ConfigError(
            f"config.json: rope_type longrope of {name} is not supported through transformers: it depends on how long "
            f"the longest request is{fix}"
        )
    num_parameters, num_layers = model.num_parameters(), int(config.num_hidden_layers)
    base, notes = split_model(model), _Notes()
    _check_modules(name, base)
    logits = _look(name, base, model, notes)
    _check_layers(name, base, notes, num_layers)
    # In some configurations this is an alias of another field.
    positions = {_POSITIONS: getattr(config, _POSITIONS, None)}
    max_positions = get_int(positions, _POSITIONS, minimum=2)
    notes = _inspect_masks(name, base, model, max_positions)
    num_heads, kv_heads, key_sizes, value_sizes = zip(*notes.sizes.values(), strict=True)
    head_dim = padded_head_dim(max(*key_sizes, *value_sizes))
    shape = TransformersConfig(
        architecture=str(name),
        vocab_size=logits.shape[-1],
        hidden_size=int(config.hidden_size),
        num_layers=num_layers,
        num_heads=num_heads[0],
        num_kv_heads=max(kv_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        eos_token_ids=eos_token_ids(text, generation, logits.shape[-1]),
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=stated_dtype(text),
        num_parameters=num_parameters,
        calls_are_plain=all(call.sinks is None and call.rules(head_dim).is_plain for call in notes.calls.values()),
    )
    names = {module: name for name, module in base.named_modules()}
    return Survey(
        base,
        model,
        shape,
        attentions=[names[notes.modules[number]] for number in range(num_layers)],
        calls=[notes.calls[number] for number in range(num_layers)],
        is_whole=len(set(kv_heads)) == 1 and {*key_sizes, *value_sizes} == {head_dim},
        is_part=is_part,
    )


class _Decoded:
    """A decoder's output that has only hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Replaces the decoder when hidden states are there already: it returns what it gets as embeddings."""

    @property
    def decoder(self) -> _Given:
        """Itself, for families that were once half of an encoder-decoder."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Decoded:
        """Return [1, R, hidden] as the last hidden state."""
        return _Decoded(inputs_embeds)


def split_model(model: Any) -> nn.Module:
    """Take the decoder out of a PreTrainedModel, and return it. The base class of each model names its decoder.

    The model then turns hidden states into logits, with its own scales and caps.
    """
    base: nn.Module = model.base_model
    # It would look at token ids on the host.
    model.base_model.warn_if_padding_and_no_attention_mask = lambda *_: None
    setattr(model, model.base_model_prefix, _Given())
    return base


def _empty(folder: Path, name: str, is_part: bool) -> Any:
    """Make the model, or its text part, without weights, in a format for which every product has a shape rule.

    Raises ConfigError.
    """
    import transformers

    logging, auto = (getattr(transformers, name) for name in ("logging", "AutoModelForCausalLM"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name_of_ours in (ATTENTION, NOTED_ATTENTION):
        transformers.AttentionInterface.register(name_of_ours, attention)
    transformers.AttentionMaskInterface.register(NOTED_ATTENTION, _noted_mask)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if is_part:
            config = _text_part(config)
        known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    except Exception as error:  # transformers may raise anything
        raise ConfigError(
            f"config.json: architecture {name!r} is not known to transformers {transformers.__version__}: "
            f"{first_line(error)}"
        ) from error
    if not known:
        raise ConfigError(f"config.json: {name} is no causal language model of transformers {transformers.__version__}")
    try:
        with META:
            model = auto.from_config(
                config, dtype=torch.bfloat16, attn_implementation=ATTENTION, trust_remote_code=False
            )
    except Exception as error:  # as above
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise _unsupported(name, "transformers makes it with attention of its own alone") from error
        raise ConfigError(f"config.json: transformers cannot make {name} of it: {first_line(error)}") from error
    hold_rotary(model)
    return model.eval()


def hold_rotary(model: Any) -> None:
    """Keep rotary embeddings of the kind `dynamic` as they were made: plain up to max_position_embeddings, beyond which
    nothing is served. Otherwise they would look at the positions of each forward."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layers: "default" if of == "dynamic" else of for layers, of in kind.items()}
        elif kind == "dynamic":
            module.rope_type = "default"


def _text_part(config: Any) -> Any:
    """Return the language model's part of a larger configuration, which says whether its head is its embedding."""
    text = config.get_text_config()
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text


def _check_modules(name: str, base: nn.Module) -> None:
    """Raise ConfigError for what a forward would not show: state beside the KV cache, and positions of its own."""
    # Convolutions may stand beside attention in the same layer.
    if any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in base.modules()):
        why = "it has convolutions over tokens; state-space, recurrent and hybrid models are not run"
        raise _unsupported(name, why)
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in base.modules()):
        why = "it counts positions from behind its padding token; only models that count from 0 are run"
        raise _unsupported(name, why)


def _look(name: str, base: nn.Module, model: Any, notes: _Notes, is_masked: bool = False) -> Tensor:
    """Run a forward that `notes` are taken of, and return its logits, which have no values. Raises ConfigError.

    `is_masked`: say by an attention mask that all tokens are one text. Otherwise transformers would derive this from
    positions when it makes masks, and these have no values.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device=META)
    # It has values, because some models look at them.
    mask = {"attention_mask": torch.ones(1, 2, dtype=torch.int64)} if is_masked else {}
    try:
        with attention_by(notes), torch.inference_mode():
            hidden = base(input_ids=ids, position_ids=ids, use_cache=False, **mask)[0]
            logits: Tensor = model(inputs_embeds=hidden, use_cache=False).logits
    except Exception as error:  # as above
        raise ConfigError(
            f"config.json: {name} does not run through transformers, whose forward would need values on the host or "
            f"fails: {first_line(error)}"
        ) from error
    return logits


def _check_layers(name: str, base: nn.Module, notes: _Notes, num_layers: int) -> None:
    """Raise ConfigError for layers that attend in other ways than ours, and for a model that takes no positions."""
    if notes.count != num_layers or set(notes.calls) != set(range(num_layers)):
        raise _unsupported(
            name,
            f"of its {num_layers} layers {notes.count} attend through the attention interface of transformers; "
            "state-space, recurrent and hybrid models are not run",
        )
    if not notes.is_causal:
        raise _unsupported(name, "its layers attend both ways")
    query_heads, kv_heads = (set(numbers) for numbers in list(zip(*notes.sizes.values(), strict=True))[:2])
    if len(query_heads) > 1 or any(max(kv_heads) % number for number in kv_heads):
        query, kv = (" or ".join(map(str, sorted(numbers))) for numbers in (query_heads, kv_heads))
        raise _unsupported(
            name,
            f"its layers have {query} query and {kv} kv heads; all must have the same number of query heads, and "
            "numbers of kv heads that divide the largest of them",
        )
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise _unsupported(name, "it takes no position_ids, but counts positions in transformers' own cache")


def _inspect_masks(name: str, base: nn.Module, model: Any, max_positions: int) -> _Notes:
    """Return notes of a forward with transformers' masks, which show windows. Raises ConfigError for other masks."""
    notes = _Notes(max_positions)
    model.set_attn_implementation(NOTED_ATTENTION)
    _look(name, base, model, notes, is_masked=True)
    model.set_attn_implementation(ATTENTION)
    if notes.has_own_mask:
        why = "its layers mask scores by a rule of their own; only causal attention and sliding windows are run"
        raise _unsupported(name, why)
    return notes


class _Notes(AttentionHandler):
    """Notes how layers call attention; the tensors that it returns have no values."""

    def __init__(self, max_positions: int = 0) -> None:
        self.modules: dict[Any, nn.Module] = {}
        self.calls: dict[Any, LayerCall] = {}
        self.sizes: dict[Any, tuple[int, ...]] = {}
        """Numbers of query and kv heads, sizes of keys and values."""
        self.count = 0
        self.is_causal = True
        self.has_own_mask = False
        """Whether a layer masks by something other than a window."""
        self._max_positions = max_positions
        self._masks: list[tuple[Tensor, int | None]] = []
        """Each mask that was made, and its window."""

    def mask(self, mask_function: Callable[..., Tensor], q_length: int, kv_length: int) -> Tensor:
        """Return bool [1, 1, q_length, kv_length] without values, which stands for a mask when layers get it."""
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=META)
        self._masks.append((mask, _window(mask_function, self._max_positions)))
        return mask

    def window_of(self, mask: Tensor) -> int | None:
        """See AttentionHandler."""
        window = next((window for made, window in self._masks if _is_same(mask, made)), None)
        self.has_own_mask = self.has_own_mask or window is None
        return window or None

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        number = getattr(layer, "layer_idx", None)
        self.modules[number], self.calls[number] = layer, call
        self.sizes[number] = (q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        self.count += 1
        self.is_causal = self.is_causal and getattr(layer, "is_causal", True) is not False
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def _is_same(mask: Tensor, made: Tensor) -> bool:
    """Whether `mask` is `made` or a view of all of it: some families take a slice of rows, here of all."""
    return mask.shape == made.shape and mask.untyped_storage() is made.untyped_storage()


def _window(mask_function: Callable[..., Tensor], max_positions: int) -> int | None:
    """Return how many positions, up to its own, a query sees by a mask function of transformers; 0 for all of them.

    Returns None if the mask is not a window.
    """
    keys, zero = torch.arange(max_positions), torch.tensor(0)
    size = 0
    for query in (max_positions - 1, max(max_positions - 2, 0), max_positions // 2, 0):
        seen = mask_function(zero, zero, torch.tensor(query), keys)
        size = size or int(seen.sum())
        if not torch.equal(seen, (keys <= query) & (keys > query - size)):
            return None
    return 0 if size == max_positions else size


def _noted_mask(*, mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **_: Any) -> Tensor:
    """The function that transformers calls for masks of `NOTED_ATTENTION`."""
    notes = current_handler()
    if not isinstance(notes, _Notes):
        raise TypeError("masks are made for a model that is looked at alone")
    return notes.mask(mask_function, q_length, kv_length)


def _unsupported(name: str, why: str) -> ConfigError:
    return ConfigError(f"config.json: {name} is not supported: {why}")


def first_line(error: Exception) -> str:
    """Return an error's message in one line, without the list of everything that could be wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
