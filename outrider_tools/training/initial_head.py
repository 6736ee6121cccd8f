"""The EAGLE-3 head that a training begins as, of this project or another, in place of random weights."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig, read_json
from outrider.models.drafters.base import EMBEDDING, OUTPUT
from outrider.models.drafters.config import HeadConfig, eagle3_config
from outrider.models.drafters.loader import Stored, algorithm_of, check_tensors, head_name, stored_tensors
from outrider.models.drafters.token_ids import ids_of_offsets
from outrider_tools.training.eagle3 import Eagle3Head, HeadShape
from outrider_tools.training.run_options import RunOptions
from outrider_tools.training.target import Target

# Of the head's layer: what it has in common with the target's, and what no trainable head has.
SHARED = ("hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope")
LACKING = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm")
# Options that a head decides.
SIZES = ("draft_vocab_size", "intermediate_size", "feature_layers")
DRAFT_VOCAB_SIZE = 8192


class InitialHead:
    """A head in a folder, checked against the target that it is to be trained for.

    Attributes:
        shape: of the trainable head that takes its weights.
        target_ids: int64 [draft_vocab_size], the target's id of each row of its output matrix, ascending.
    """

    def __init__(self, folder: Path, target: ModelConfig) -> None:
        """Raises ConfigError: names the field or tensor at fault, and both values."""
        self._folder = folder
        found = algorithm_of(folder)
        if found != "EAGLE3":
            raise self._misfit("algorithm", found, "EAGLE3")
        self._stored = stored_tensors(folder, head_name)
        config = eagle3_config(read_json(folder / "config.json"), self._stored, target.num_layers)
        self._check(config, target)
        self.shape = HeadShape(target, config.draft_vocab_size, config.feature_layers, config.decoder.intermediate_size)
        self.target_ids, self._order = self._vocabulary(self._stored.pop("d2t", None))

    def head(self, target: Target) -> Eagle3Head:
        """A trainable head, on the target's device, that computes what the head in the folder does.

        Raises:
            ConfigError: the folder's tensors are not those of such a head, or its embedding is not the target's.
        """
        head = Eagle3Head(self.shape, self.target_ids)
        weights = {
            name.replace("midlayer.", "layers.0.", 1): weight.detach() for name, weight in head.named_parameters()
        }
        stored = dict(self._stored)
        embedding = stored.pop(EMBEDDING, None)
        if embedding is not None:
            self._check_embedding(embedding, target)
        check_tensors(stored, weights, self._folder)
        for name, weight in weights.items():
            tensor = stored[name].read()
            weight.copy_(tensor[self._order] if name == OUTPUT else tensor)
        head.learned = True
        return head.to(target.device)

    def _vocabulary(self, offsets: Stored | None) -> tuple[Tensor, Tensor]:
        """Target ids, ascending, and where their rows lie in the folder's output matrix."""
        size, whole = self.shape.draft_vocab_size, self.shape.target.vocab_size
        if offsets is None:
            if size != whole:
                raise self._misfit("draft_vocab_size", size, f"{whole} where tensor d2t is missing")
            return torch.arange(size), torch.arange(size)
        sorted_ids = ids_of_offsets(offsets.read(), size, whole, str(offsets.path)).sort()
        return sorted_ids.values, sorted_ids.indices

    def _check(self, config: HeadConfig, target: ModelConfig) -> None:
        decoder, plain = config.decoder, HeadConfig(config.decoder, 0, 0, ())
        wanted: list[tuple[str, Any, Any]] = [("target_hidden_size", config.target_hidden_size, target.hidden_size)]
        wanted += [(name, getattr(decoder, name), getattr(target, name)) for name in SHARED]
        wanted += [("num_hidden_layers", decoder.num_layers, 1)]
        wanted += [(name, getattr(decoder, name), False) for name in LACKING]
        # The flags of EAGLE-3 heads, which all have a default.
        flags = [field.name for field in fields(HeadConfig) if isinstance(field.default, bool)]
        wanted += [(name, getattr(config, name), getattr(plain, name)) for name in flags]
        for name, value, needed in wanted:
            if value != needed:
                raise self._misfit(name, value, needed)

    def _check_embedding(self, stored: Stored, target: Target) -> None:
        vocab_size, hidden = self.shape.target.vocab_size, self.shape.target.hidden_size
        if stored.shape != (vocab_size, hidden):
            raise self._misfit(stored.name, list(stored.shape), [vocab_size, hidden])
        # A head is trained and written with the target's own.
        own = target.embed(torch.arange(vocab_size, device=target.device))
        if not torch.equal(stored.read().to(own.device, own.dtype), own):
            raise ConfigError(f"--init-from {self._folder}: tensor {stored.name} is not the target's embedding")

    def _misfit(self, name: str, value: Any, needed: Any) -> ConfigError:
        return ConfigError(f"--init-from {self._folder}: the head's {name} is {value}, and must be {needed} here")


def resolved(options: RunOptions, target: ModelConfig) -> RunOptions:
    """Options with sizes in place of those that were not given: the initial head's, or the default.

    Raises:
        ConfigError: the initial head does not fit the target or a size that was given, or another kind is trained.
    """
    if options.algorithm != "EAGLE3":
        named = {"--init-from": options.init_from, "--hit-weight": options.trainer.hit_weight}
        for option, value in named.items():
            if value:
                raise ConfigError(f"{option} {value}: is for --algorithm EAGLE3 alone, not {options.algorithm}")
    if options.init_from is None:
        return replace(options, draft_vocab_size=options.draft_vocab_size or DRAFT_VOCAB_SIZE)
    shape = InitialHead(options.init_from, target).shape
    for name in SIZES:
        given, own = getattr(options, name), getattr(shape, name)
        if given and given != own:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {given}: the head of --init-from has {own}; leave the option out")
    return replace(options, **{name: getattr(shape, name) for name in SIZES})
