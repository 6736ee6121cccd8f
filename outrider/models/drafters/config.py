"""The configuration of draft heads, from their config.json and tensor names. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.cuts import cut
from outrider.models.fields import get_bool, get_int, get_object

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
QUANTIZED_NAMES = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")
"""Ends of the names of tensors that stand beside, or in place of, a quantized matrix."""
MARKOV_INPUT, MARKOV_OUTPUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MARKOV_KINDS = ("vanilla", "gated", "rnn")
MAX_BLOCK_SIZE = 64
MIN_SINKS = 16
_MOST_PADDING = 1024
"""Most tokens by which vocabularies of one tokenizer differ, because matrices are padded (Qwen2.5: by 128)."""
LEAST_SAVED_BYTES = 64 << 20
"""A head is cut only if each rank reads at least this much less of its weights in a step. Reading that takes an H100
21 us; a cut adds two sums of 4 us each, and the joining of 32,000 logits in about 12 us, to a step of 32 nodes."""


class ContextWindow(NamedTuple):
    """The part of a context much longer than `size` tokens that a head sees; see drafting.model.context."""

    size: int = 0
    """The last tokens; 0 for all of any context."""
    sinks: int = MIN_SINKS
    """The first tokens, which come right before the last ones; whole pages."""


ALL_SEEN = ContextWindow()


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head on a target's features.

    `decoder` describes the head's own layers; its vocabulary is the target's. `feature_layers` are numbered as in
    `DraftModel`. EAGLE-3 heads have flags: `projects` says whether features pass `fc`, `norm_each` (`fc_norm` in files)
    and `norm_all` (`norm_before_fc`) what is normed before `fc`, `norm_before_residual` whether the residual stream
    starts at the normed feature, and `norm_output` whether children take the normed output.
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
    block: BlockConfig | None = None
    """For a head that guesses a block of tokens in one forward."""
    window: ContextWindow = ALL_SEEN
    num_ranks: int = 1
    """Number of ranks; each has what `decoder` describes, and its rows of the output matrix."""

    def output_rows(self, vocab_size: int) -> int:
        """Return the rows of the output matrix that a rank has if the head guesses `vocab_size` tokens."""
        return vocab_size if vocab_size % self.num_ranks else vocab_size // self.num_ranks

    def block_bytes(self, item_bytes: int) -> int:
        """Return the bytes of a request's block: rows with `item_bytes` a number, float32 logits; 0 without a block."""
        if self.block is None:
            return 0
        return self.block.num_guesses * (self.decoder.hidden_size * item_bytes + self.draft_vocab_size * 4)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """How a head guesses a block.

    Attributes:
        size: places of the block: the root's token, then masks.
        mask_token: the id that stands for what is to be guessed.
        from_root: whether each place, the root's included, guesses the token after its own; else each mask guesses its
            own token, and the root's place guesses nothing.
        markov_rank: width of what the previous token adds to the logits of a place; 0 if it adds nothing.
        markov_kind: one of MARKOV_KINDS.
        window: the checkpoint's own window, the last positions of the context that a block sees; 0 for all.
    """

    size: int
    mask_token: int
    from_root: bool
    markov_rank: int = 0
    markov_kind: str = MARKOV_KINDS[0]
    window: int = 0

    @property
    def num_guesses(self) -> int:
        """Tokens that one forward guesses."""
        return self.size if self.from_root else self.size - 1


def eagle3_config(
    fields: Mapping[str, Any], names: Collection[str], target_layers: int | None, target_hidden: int | None = None
) -> HeadConfig:
    """Return an EAGLE-3 head's configuration from its config.json and its tensors' names, as `head_name` gives them.

    `target_layers` and `target_hidden` are the target's, None if unknown.

    Raises ConfigError, naming the field or option at fault.
    """
    eagle = get_object(fields, "eagle_config")
    # Speculators' checkpoints keep the decoder's fields in an object of their own.
    flat = {**fields, **get_object(fields, "transformer_layer_config")}
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
    flags = {**flat, **{name: value for name, value in eagle.items() if value is not None}}
    # Speculators' checkpoints start the residual stream at the normed feature unless they say otherwise.
    before_residual = "speculators_model_type" in fields
    config = HeadConfig(
        decoder=decoder,
        draft_vocab_size=get_int(flat, "draft_vocab_size", decoder.vocab_size, minimum=1),
        target_hidden_size=hidden,
        feature_layers=layers,
        fc_bias="fc.bias" in names,
        projects=projects,
        norm_each=get_bool(flags, "fc_norm", False),
        norm_all=get_bool(flags, "norm_before_fc", False),
        norm_before_residual=get_bool(flags, "norm_before_residual", before_residual),
        norm_output=get_bool(flags, "norm_output", False),
    )
    if config.norm_each and config.norm_all:
        raise ConfigError("config.json: fc_norm and norm_before_fc exclude each other")
    if config.draft_vocab_size > decoder.vocab_size:
        raise ConfigError(
            f"config.json: draft_vocab_size {config.draft_vocab_size} is above vocab_size {decoder.vocab_size}"
        )
    return config


def check_unquantized(names: Collection[str]) -> None:
    """Raise ConfigError if a head with tensors of these `names` is quantized."""
    quantized = next((name for name in names if name.endswith(QUANTIZED_NAMES)), None)
    if quantized is not None:
        raise ConfigError(
            f"config.json: the head's tensor {quantized} is quantized, which is not supported; give one that "
            "quantization left out"
        )


def eagle_config(
    fields: Mapping[str, Any], names: Collection[str], target_layers: int, target_hidden: int
) -> HeadConfig:
    """Return an EAGLE-1 or EAGLE-2 head's configuration, like `eagle3_config`."""
    decoder = _decoder(fields, names)
    _check_target_hidden(decoder.hidden_size, target_hidden)
    return HeadConfig(
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=decoder.hidden_size,
        feature_layers=(target_layers + 1,),
        fc_bias="fc.bias" in names,
    )


def mtp_config(
    target: ModelConfig, names: Collection[str], target_layers: int | None = None, target_hidden: int | None = None
) -> HeadConfig:
    """Return the configuration of the MTP head in a checkpoint with tensors of these `names`, as `mtp_name` gives them.

    The head is in MiMo's layout whatever the target's family, and its layer is like the target's layers. A checkpoint
    may hold the head alone, beside the target's config.json.

    Raises ConfigError if the checkpoint holds no head.
    """
    if target.architecture != "MiMoForCausalLM" and "input_proj.weight" not in names:
        raise ConfigError(
            f"config.json: NEXTN reads a head in MiMo's layout, model.mtp_layers.0, and this is {target.architecture} "
            "without one; heads in the layouts of DeepSeek and Qwen3-Next are not supported"
        )
    _check_target_hidden(target.hidden_size, target_hidden)
    if target_layers not in (None, target.num_layers):
        raise ConfigError(f"the head is of a model of {target.num_layers} layers, the target has {target_layers}")
    return HeadConfig(
        decoder=replace(target, num_layers=1, experts=None, quantization=None),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_layers=(target.num_layers + 1,),
    )


def block_config(
    fields: Mapping[str, Any], names: Collection[str], target_layers: int | None, target_hidden: int | None = None
) -> HeadConfig:
    """Return a DFLASH or DSPARK head's configuration, like `eagle3_config`.

    Heads may be in the layouts of z-lab, DeepSpec and vLLM's speculators. z-lab's fields are in `dflash_config`,
    DeepSpec's beside the others; both number feature layers by their outputs. Speculators' ids name what enters layers.
    """
    own = get_object(fields, "dflash_config")
    flat = {**fields, **get_object(fields, "transformer_layer_config"), **own}
    decoder = _decoder(flat, names)
    hidden = get_int(flat, "target_hidden_size", decoder.hidden_size, minimum=1)
    _check_target_hidden(hidden, target_hidden)
    if hidden != decoder.hidden_size:
        raise ConfigError(
            f"config.json: hidden_size {decoder.hidden_size} of a block head must be the target's {hidden}"
        )
    has_markov = MARKOV_INPUT in names
    speculators = fields.get("speculators_model_type")
    if speculators:
        layers = tuple(_ids(flat, "aux_hidden_state_layer_ids", minimum=0))
    else:
        layers = tuple(number + 1 for number in _ids(flat, "target_layer_ids", minimum=-1))
    if target_layers is not None and max(layers) > target_layers:
        raise ConfigError(f"config.json: the feature layers reach beyond the target's {target_layers} layers")
    kind = str(flat.get("markov_head_type") or MARKOV_KINDS[0]).lower()
    if has_markov and kind not in MARKOV_KINDS:
        raise ConfigError(f"config.json: markov_head_type {kind!r} is not supported; it must be one of {MARKOV_KINDS}")
    # z-lab's blocks guess the masks' own tokens; DeepSpec's files say nothing, and its blocks guess the next tokens.
    from_root = speculators == "dspark" if speculators else not own
    block = BlockConfig(
        size=get_int(flat, "block_size", minimum=2),
        mask_token=get_int(flat, "mask_token_id", minimum=0),
        from_root=get_bool(flat, "sample_from_anchor", from_root),
        markov_rank=get_int(flat, "markov_rank", minimum=1) if has_markov else 0,
        markov_kind=kind,
        window=_window(flat, decoder.num_layers),
    )
    if block.size > MAX_BLOCK_SIZE:
        raise ConfigError(f"config.json: block_size {block.size} is above {MAX_BLOCK_SIZE}")
    if block.mask_token >= decoder.vocab_size:
        raise ConfigError(
            f"config.json: mask_token_id {block.mask_token} is outside the vocabulary of {decoder.vocab_size}"
        )
    draft_vocab_size = get_int(flat, "draft_vocab_size", decoder.vocab_size, minimum=1)
    bias, window = "fc.bias" in names, ContextWindow(block.window)
    return HeadConfig(decoder, draft_vocab_size, hidden, layers, fc_bias=bias, block=block, window=window)


def _window(fields: Mapping[str, Any], num_layers: int) -> int:
    """Return how many positions every layer sees; 0 for all."""
    kinds = fields.get("layer_types") or ["full_attention"] * num_layers
    if kinds == ["full_attention"] * num_layers:
        return 0
    if kinds != ["sliding_attention"] * num_layers:
        raise ConfigError(
            f"config.json: layer_types of a block head must be {num_layers} times sliding_attention or full_attention, "
            f"not {kinds!r}"
        )
    return get_int(fields, "sliding_window", minimum=1)


def _decoder(fields: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """Return the head's layers as those of a Llama; tensor names show which biases and norms there are."""
    windows = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    ignored = ("eos_token_id", "bos_token_id", "attention_bias", "mlp_bias", *windows)
    plain = {name: value for name, value in fields.items() if name not in ignored}
    config = ModelConfig.from_fields({**plain, "architectures": ["LlamaForCausalLM"]}, {})
    return replace(
        config,
        qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        mlp_bias="layers.0.mlp.up_proj.bias" in names,
    )


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return early, middle and late layers of a target, whose input is the feature, as in public heads."""
    return 2, num_layers // 2, num_layers - 3


def _feature_layers(fields: Mapping[str, Any], eagle: Mapping[str, Any], target_layers: int | None) -> tuple[int, ...]:
    """Return the layers whose entering residual stream the head takes.

    Ids in `eagle_config` name layers by their outputs, which enter the next layer; other ids name the entered layer.
    """
    if eagle.get(LAYER_IDS):
        layers = tuple(number + 1 for number in _ids(eagle, LAYER_IDS, minimum=-1))
    elif fields.get(LAYER_IDS):
        layers = tuple(_ids(fields, LAYER_IDS, minimum=0))
    else:
        count = _target_layers(target_layers, f"config.json has no {LAYER_IDS}, so that feature layers")
        if count < 4:
            raise ConfigError(f"the default feature layers need a target of 4 layers or more, and it has {count}")
        layers = default_feature_layers(count)
    if target_layers is not None and max(layers) > target_layers:
        raise ConfigError(f"config.json: {LAYER_IDS} reach beyond the target's {target_layers} layers")
    return layers


def _ids(fields: Mapping[str, Any], name: str, minimum: int) -> list[int]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, int) and item >= minimum for item in value):
        raise ConfigError(f"config.json: {name} must be layer numbers, got {value!r}")
    return value


def _target_layers(target_layers: int | None, what: str) -> int:
    if target_layers is None:
        raise ConfigError(f"{what} depend on the target's number of layers; give --target-model-path")
    return target_layers


def _check_target_hidden(head: int, target: int | None) -> None:
    if target is not None and head != target:
        raise ConfigError(
            f"the head takes features of hidden size {head}, the target's is {target}; use a head trained for this "
            "target"
        )


def check_vocabulary(head: HeadConfig, target: int | None) -> None:
    """Raise ConfigError if a head's vocabulary differs by more than padding from the `target`'s, if that is known."""
    own = head.decoder.vocab_size
    if target is not None and abs(own - target) > _MOST_PADDING:
        raise ConfigError(
            f"the head has a vocabulary of {own}, the target one of {target}; use a head trained for this target"
        )


def cut_head(head: HeadConfig, world: int, item_bytes: int) -> HeadConfig | None:
    """Return what one of `world` ranks has of a head, with `item_bytes` a number; None if rank 0 has the whole head.

    A head is not cut if it cannot be divided or is faster on one rank. Nor is one that guesses blocks, because a round
    has one forward of them, or one whose residual stream, which ranks exchange, is not as wide as the target's.
    """
    if head.block is not None or head.decoder.hidden_size != head.target_hidden_size:
        return None
    try:
        part = replace(head, decoder=cut(head.decoder, world), num_ranks=world)
    except ConfigError:
        return None
    return part if (_cut_elements(head) - _cut_elements(part)) * item_bytes >= LEAST_SAVED_BYTES else None


def _cut_elements(head: HeadConfig) -> int:
    """Return the elements of the matrices that a cut divides."""
    decoder = head.decoder
    heads = 2 * decoder.num_heads + 2 * decoder.num_kv_heads
    layer = heads * decoder.head_dim + 3 * decoder.intermediate_size
    return decoder.hidden_size * (decoder.num_layers * layer + head.output_rows(head.draft_vocab_size))
