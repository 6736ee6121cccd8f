"""What a draft head's config.json and tensor names say. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig, get_bool, get_int

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
QUANTIZED_NAMES = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")
"""Ends of the names of tensors that stand beside, or in place of, a quantized matrix."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head on a target's features.

    `decoder` describes its own layers; its vocabulary is the target's. `feature_layers` are numbered as in
    `DraftModel`. Of the flags of EAGLE-3 heads, `projects` says whether features pass `fc`, `norm_each` (`fc_norm` in
    files) and `norm_all` (`norm_before_fc`) what is normed before it, `norm_before_residual` whether the residual
    stream starts at the normed feature, and `norm_output` whether children take the normed output.
    """

    decoder: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    fc_bias: bool = False
    projects: bool = True
    norm_each: bool = False
    norm_all: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


def eagle3_config(
    fields: Mapping[str, Any], names: Collection[str], target_layers: int | None, target_hidden: int | None = None
) -> HeadConfig:
    """An EAGLE-3 head from its config.json and the names of its tensors, as `head_name` gives them.

    `target_layers` and `target_hidden` are the target's, None where it is not known.

    Raises:
        ConfigError: names the field or option at fault.
    """
    eagle = _eagle_fields(fields)
    flat = {**fields, **_layer_fields(fields)}
    decoder = _decoder(flat, names)
    hidden = get_int(flat, "target_hidden_size", decoder.hidden_size, minimum=1)
    _check_target_hidden(hidden, target_hidden)
    if get_bool(eagle, "use_aux_hidden_state", True):
        layers = _feature_layers(fields, eagle, target_layers)
    else:
        layers = (_target_layers(target_layers, "a head of the last hidden state") + 1,)
    projects = "fc.weight" in names or len(layers) > 1
    if not projects and hidden != decoder.hidden_size:
        raise ConfigError(
            f"config.json: a head without fc needs hidden_size {decoder.hidden_size} to be the target's {hidden}"
        )
    # Speculators' checkpoints start the residual stream at the normed feature unless they say otherwise.
    before_residual = "speculators_model_type" in fields
    config = HeadConfig(
        decoder=decoder,
        draft_vocab_size=get_int(flat, "draft_vocab_size", decoder.vocab_size, minimum=1),
        target_hidden_size=hidden,
        feature_layers=layers,
        fc_bias="fc.bias" in names,
        projects=projects,
        norm_each=get_bool(eagle, "fc_norm", get_bool(flat, "fc_norm", False)),
        norm_all=get_bool(eagle, "norm_before_fc", get_bool(flat, "norm_before_fc", False)),
        norm_before_residual=get_bool(
            eagle, "norm_before_residual", get_bool(flat, "norm_before_residual", before_residual)
        ),
        norm_output=get_bool(eagle, "norm_output", get_bool(flat, "norm_output", False)),
    )
    if config.norm_each and config.norm_all:
        raise ConfigError("config.json: fc_norm and norm_before_fc exclude each other")
    if config.draft_vocab_size > decoder.vocab_size:
        raise ConfigError(
            f"config.json: draft_vocab_size {config.draft_vocab_size} is above vocab_size {decoder.vocab_size}"
        )
    return config


def eagle_config(
    fields: Mapping[str, Any], names: Collection[str], target_layers: int, target_hidden: int
) -> HeadConfig:
    """An EAGLE-1 or EAGLE-2 head, likewise."""
    decoder = _decoder(fields, names)
    _check_target_hidden(decoder.hidden_size, target_hidden)
    return HeadConfig(
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=decoder.hidden_size,
        feature_layers=(target_layers + 1,),
        fc_bias="fc.bias" in names,
    )


def mtp_config(target: ModelConfig, names: Collection[str]) -> HeadConfig:
    """The head in a checkpoint with tensors of these `names`, as `mtp_name` gives them.

    It is in MiMo's layout whatever the target's family, and its layer is like the target's layers. A checkpoint may
    hold the head alone, beside the target's config.json.

    Raises:
        ConfigError: the checkpoint holds no head.
    """
    if target.architecture != "MiMoForCausalLM" and "input_proj.weight" not in names:
        raise ConfigError(
            f"config.json: NEXTN reads the head in a MiMoForCausalLM checkpoint, and this is {target.architecture} "
            "without model.mtp_layers.0"
        )
    quantized = [name for name in names if name.endswith(QUANTIZED_NAMES)]
    if quantized:
        raise ConfigError(
            f"config.json: the head's tensor {quantized[0]} is quantized, which is not supported; give one that "
            "quantization left out"
        )
    return HeadConfig(
        decoder=replace(target, num_layers=1, experts=None, quantization=None),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_layers=(target.num_layers + 1,),
    )


def _decoder(fields: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """The head's layers as those of a Llama; which biases and norms there are is told by their tensors."""
    ignored = ("eos_token_id", "bos_token_id", "attention_bias", "mlp_bias")
    plain = {name: value for name, value in fields.items() if name not in ignored}
    config = ModelConfig.from_fields({**plain, "architectures": ["LlamaForCausalLM"]}, {})
    return replace(
        config,
        qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        mlp_bias="layers.0.mlp.up_proj.bias" in names,
    )


def _eagle_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    found = fields.get("eagle_config") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: eagle_config must be an object, got {found!r}")
    return found


def _layer_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Speculators' checkpoints keep the decoder's fields in an object of their own."""
    found = fields.get("transformer_layer_config") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: transformer_layer_config must be an object, got {found!r}")
    return found


def _feature_layers(fields: Mapping[str, Any], eagle: Mapping[str, Any], target_layers: int | None) -> tuple[int, ...]:
    """Layers whose entering residual stream the head takes.

    Ids in `eagle_config` name layers by their outputs, which enter the layer after; ids beside it name what enters.
    """
    if eagle.get(LAYER_IDS):
        layers = tuple(number + 1 for number in _ids(eagle[LAYER_IDS], minimum=-1))
    elif fields.get(LAYER_IDS):
        layers = tuple(_ids(fields[LAYER_IDS], minimum=0))
    else:
        count = _target_layers(target_layers, f"config.json has no {LAYER_IDS}, so that feature layers")
        if count < 4:
            raise ConfigError(f"the default feature layers need a target of 4 layers or more, and it has {count}")
        layers = (2, count // 2, count - 3)
    if target_layers is not None and max(layers) > target_layers:
        raise ConfigError(f"config.json: {LAYER_IDS} reach beyond the target's {target_layers} layers")
    return layers


def _ids(value: Any, minimum: int) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) and item >= minimum for item in value):
        raise ConfigError(f"config.json: {LAYER_IDS} must be layer numbers, got {value!r}")
    return value


def _target_layers(target_layers: int | None, what: str) -> int:
    if target_layers is None:
        raise ConfigError(f"{what} depend on the target's number of layers; give --target-model-path")
    return target_layers


def _check_target_hidden(head: int, target: int | None) -> None:
    if target is not None and head != target:
        raise ConfigError(f"the head takes features of hidden size {head}, the target's is {target}")
