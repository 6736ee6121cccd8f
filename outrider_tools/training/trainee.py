"""A drafter about to be trained, of any kind: how it begins and learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import ConfigError
from outrider_tools.training.eagle import EagleHead
from outrider_tools.training.eagle3 import Eagle3Head, HeadShape, default_feature_layers
from outrider_tools.training.eagle3_learner import Eagle3Learner
from outrider_tools.training.export import Drafter
from outrider_tools.training.feature_learner import FeatureLearner
from outrider_tools.training.initial_head import InitialHead
from outrider_tools.training.learner import Learner
from outrider_tools.training.mtp import MtpHead
from outrider_tools.training.run_options import RunOptions
from outrider_tools.training.standalone import SmallModel, StandaloneLearner, small_config, start_small_model
from outrider_tools.training.target import Target
from outrider_tools.training.texts import Texts
from outrider_tools.training.vocabulary import choose_vocabulary, coverage


@dataclass(frozen=True, slots=True)
class Trainee:
    """A drafter's module on the target's device, how it learns, and what the record says of it besides."""

    module: Drafter
    learner: Learner
    facts: dict[str, Any]


def make_trainee(target: Target, texts: Texts, options: RunOptions) -> Trainee:
    """The untrained drafter that `options.algorithm` names; the same for the same options and texts.

    Raises:
        ConfigError: the target or the sizes do not allow it.
    """
    torch.manual_seed(options.trainer.seed)
    if options.algorithm == "EAGLE3":
        return _eagle3(target, texts, options)
    if options.algorithm == "STANDALONE":
        model = SmallModel(small_config(target.config, options.layers, options.hidden))
        start_small_model(model, target)
        model.to(target.device)
        return Trainee(model, StandaloneLearner(target, model), {"vocabulary_coverage": 1.0})
    head = EagleHead(target.config) if options.algorithm == "EAGLE" else MtpHead(target.config)
    head.to(target.device)
    learner = FeatureLearner(target, head, options.trainer.unroll, options.feature_weight)
    return Trainee(head, learner, {"vocabulary_coverage": 1.0})


def _eagle3(target: Target, texts: Texts, options: RunOptions) -> Trainee:
    if options.init_from is not None:
        head = InitialHead(options.init_from, target.config).head(target)
    else:
        head = _new_head(target, texts, options)
    known = coverage(texts, head.target_ids.cpu().numpy(), target.config.vocab_size)
    return Trainee(head, Eagle3Learner(target, head, options.trainer), {"vocabulary_coverage": known})


def _new_head(target: Target, texts: Texts, options: RunOptions) -> Eagle3Head:
    config = target.config
    layers = options.feature_layers
    if not layers:
        if config.num_layers < 4:
            raise ConfigError(f"--feature-layers: must be given for a target of {config.num_layers} layers")
        layers = default_feature_layers(config.num_layers)
    chosen = choose_vocabulary(texts, config.vocab_size, options.draft_vocab_size, config.eos_token_ids)
    shape = HeadShape(config, options.draft_vocab_size, layers, options.intermediate_size)
    head = Eagle3Head(shape, torch.from_numpy(chosen)).to(target.device)
    target.start(head)
    return head
