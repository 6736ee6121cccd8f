"""Language models through transformers: its modules and its loading, with our attention, KV, products and norms.

transformers looks up attention by name; ours passes q, k and v to the plan of the current forward. transformers is
imported when a model needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.attention.base import AttentionBackend, LayerRules, TokenBatch
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.config import check_heads
from outrider.models.transformers_modules import (
    ATTENTION,
    HostConstants,
    PlannedForward,
    attention_by,
    current_handler,
    replace_attention,
    replace_modules,
)
from outrider.models.transformers_survey import (
    META,
    TransformersConfig,
    first_line,
    hold_rotary,
    split_model,
    survey_model,
)
from outrider.models.weights import Progress

log = get_logger(__name__)

_PART_KEYS = {r"^model\.language_model\.": "model."}
"""The prefix of a text part's tensors in the whole model, and in the text model alone."""


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
        rules: Sequence[LayerRules] = (),
    ) -> None:
        """`base` is the decoder of a PreTrainedModel, and `rest` is the model without it; see `split_model`.

        `rotary` and `rules`, by layer, are for layers whose attention is ours; see `replace_attention`.
        """
        self.config: TransformersConfig = config
        self.dtype = dtype
        self.device = device
        self._base = base
        self._rest: Any = rest
        self._rules = rules
        no_rotation = Rotary(None, config.head_dim, device)
        self._rotary = rotary or no_rotation
        self._no_rotation = no_rotation if rotary else None
        self._copies: dict[tuple[object, ...], Tensor] = {}
        self._was_run = False
        for number, layer in enumerate(_decoder_layers(base, config.num_layers)):
            _watch(layer, number, config.num_layers)

    @torch.inference_mode()
    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See LanguageModel."""
        plan = attention.plan(batch, kv, self.config.num_heads, self._rotary)
        forward = PlannedForward(
            plan,
            self.config.num_kv_heads,
            self.config.head_dim,
            self._no_rotation,
            self._rules,
            frozenset(feature_layers),
        )
        with attention_by(forward), self._constants():
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

    @contextmanager
    def _constants(self) -> Iterator[None]:
        """Use HostConstants in a forward on a GPU, unless the first one showed that there are none: it takes time."""
        if self.device.type != "cuda" or (self._was_run and not self._copies):
            yield
            return
        with HostConstants(self._copies):
            yield
        self._was_run = True


def _watch(layer: nn.Module, number: int, count: int) -> None:
    """Have a layer note the residual stream that enters it, or leaves the last of `count`, if a forward wants it."""
    run = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = current_handler()
        if not isinstance(current, PlannedForward) or not current.wanted:
            return run(*args, **kwargs)
        if number in current.wanted:
            current.seen[number] = _rows(args[0] if args else kwargs["hidden_states"])
        output = run(*args, **kwargs)
        if number == count - 1 and count in current.wanted:
            current.seen[count] = _rows(output if isinstance(output, Tensor) else output[0])
        return output

    layer.forward = forward


def _rows(stream: Tensor) -> Tensor:
    """Return [M, hidden] of a residual stream [1, M, hidden]; of several, as in Gemma 3n, the first is active."""
    return stream.flatten(0, -3)[0]


def _decoder_layers(base: nn.Module, count: int) -> Sequence[nn.Module]:
    """Return the list of `count` layers in a decoder."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ConfigError(f"{type(base).__name__} of transformers has no list of its {count} layers")


def load_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> TransformersLM:
    """Load a model folder through transformers, without running code from it. Raises ConfigError.

    On the meta device no weights are read.
    """
    survey = survey_model(folder)
    config = survey.config
    if device == META:
        return TransformersLM(survey.base, survey.rest, config, dtype, device, rules=survey.rules)
    if device.type == "cuda":
        check_heads(config)
        if any(weight.dim() == 3 for weight in survey.base.parameters()):
            _check_experts(config.architecture, dtype, device)
    rest = _load(folder, survey.rest.config, dtype, device, survey.is_part)
    if progress is not None:
        size = config.num_parameters * dtype.itemsize
        progress(size, size)
    base, rotary = rest.base_model, None
    with torch.inference_mode():
        if survey.is_whole:
            rotary = replace_attention(base, survey.attentions, config.num_heads, survey.calls, config.head_dim)
        replace_modules(rest)
    split_model(rest)
    return TransformersLM(base, rest, config, dtype, device, rotary, survey.rules)


def _check_experts(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if torch multiplies experts one by one, from sizes on the host, which no graph can hold."""
    if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (9, 0):
        raise ConfigError(
            f"--dtype: {name} has experts, which run through transformers on a GPU in bfloat16 alone, and from compute "
            "capability 9.0 on"
        )


def _load(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, is_part: bool) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    # With accelerate, tensors go to the device one by one; without it, all are on the host first.
    direct = device.type != "cpu" and find_spec("accelerate") is not None
    try:
        model, loading_info = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            device_map=device if direct else None,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=_PART_KEYS if is_part else None,
            # Refused below, by name.
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers may raise anything
        raise ConfigError(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    for tensor, stored, wanted in sorted(loading_info["mismatched_keys"]):
        raise ConfigError(f"{folder}: tensor {tensor} has shape {list(stored)}, config.json calls for {list(wanted)}")
    for tensor in sorted(loading_info["missing_keys"]):
        raise ConfigError(f"{folder}: tensor {tensor} missing from the checkpoint")
    unread = sorted(loading_info["unexpected_keys"])
    if unread and not is_part:
        log.warning(
            "%s: tensor %s and %d more are not used by the model of config.json", folder, unread[0], len(unread) - 1
        )
    hold_rotary(model)
    return model.to(device).requires_grad_(False)
