"""How drafters learn: the base classes of their modules, and unrolled steps against the target's own distribution.

A new kind of head is a `TrainableHead`, or a `TrainableDrafter` with a `runner` of its own, and an entry in
`drafters.MAKERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.device import put
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider_tools.training.attention import OwnKeyMerger, Spans, own_attention
from outrider_tools.training.layers import TrainableLayer, TrainableNorm
from outrider_tools.training.loss import TargetLoss
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.target import TargetModel, target_states
from outrider_tools.training.texts import TextBatch

# Most compiled variants of a function: one for each number of own keys, and a few for each number of targets.
MAX_VARIANTS = 64
# Least size of a channel, so that a channel of zeros is not blown up.
MIN_CHANNEL_SIZE = 1e-3

Wrap = Callable[[Any], Any]
"""Applied to each function of a step that may be compiled: a compiler, or the identity."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Input of drafters: M tokens of the sequences in `spans`.

    Attributes:
        token_ids: int64 [M].
        embedded: [M, hidden], the target's embeddings of the tokens.
        features: [M, len(feature_layers) * hidden], the target's.
    """

    token_ids: Tensor
    embedded: Tensor
    features: Tensor
    spans: Spans


Runner = Callable[[DraftInput, int], Iterator[Tensor]]
"""Runs a drafter some steps ahead at every base at once, each step on the output of the step before it. Yields
[M, hidden] for each step; values of bases whose tokens lie beyond their sequence mean nothing."""


class TrainableDrafter(nn.Module, ABC):
    """A module to train. Its state_dict, buffers included, is what a state on disk holds.

    Attributes:
        config: the target's, or a language model's own.
        feature_layers: layers of the target whose input (`CausalLM.forward_with_features`) the drafter reads.
        lead: after the first step, the output at base i is about token i + 1 + lead.
    """

    feature_layers: tuple[int, ...] = ()
    lead = 1

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def runner(self, rotary: Rotary, wrap: Wrap) -> Runner:
        """Return the function that runs the drafter; `rotary` is the target's."""

    @abstractmethod
    def public_state(self) -> dict[str, Tensor]:
        """Return the checkpoint's tensors by their public names."""

    @abstractmethod
    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint's config.json, made from its target's."""

    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """Adapt to the sizes of the target's features [N, layers * hidden] and embeddings [N, hidden]."""

    def output_rows(self, feature: Tensor) -> Tensor:
        """Return the input of the output matrix, [N, hidden], for what the runner yielded."""
        return feature

    @property
    def output_weight(self) -> Tensor | None:
        """The output matrix [draft vocabulary, hidden]; None if it is the target's."""
        return None

    @property
    def target_ids(self) -> Tensor | None:
        """The target's id of each draft id, int64 [draft vocabulary]; None if the drafter has all tokens."""
        return None

    @property
    def inherited(self) -> list[Tensor]:
        """Weights that begin as the target's own, and so learn more slowly."""
        return []


class DraftVocabularyHead(TrainableDrafter):
    """Projects features of several layers, and has an output matrix over a part of the target's vocabulary."""

    fc: nn.Linear
    norm: TrainableNorm
    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor
    feature_scale: Tensor
    """[layers * hidden], the divisor of features before `fc`. Channels of a residual stream differ a hundredfold, and
    an optimiser that moves all weights alike needs inputs of one size. Merged into `fc` when exported."""
    learned = False
    """Whether `fc` is trained already: `calibrate` then keeps what it computes."""

    def register(self, target_ids: Tensor) -> None:
        """Register the buffers. `target_ids` int64 [draft_vocab_size]: the target's id of each draft id, ascending."""
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        known[target_ids] = True
        # Public heads store the difference of the two ids.
        self.register_buffer("d2t", target_ids - torch.arange(target_ids.shape[0]))
        self.register_buffer("t2d", known)
        self.register_buffer("feature_scale", torch.ones(self.fc.in_features))

    @property
    def target_ids(self) -> Tensor:
        """See TrainableDrafter; int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @property
    def inherited(self) -> list[Tensor]:
        """See TrainableDrafter. These are the output matrix and the norm before it."""
        return [self.lm_head.weight, self.norm.weight]

    @property
    def output_weight(self) -> Tensor:
        """See TrainableDrafter."""
        return self.lm_head.weight

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See TrainableDrafter. The scale of each feature channel is its root mean square."""
        sizes = channel_sizes(features)
        if self.learned:
            self.fc.weight.mul_(sizes / self.feature_scale)
        self.feature_scale.copy_(sizes)

    def project(self, features: Tensor) -> Tensor:
        """Project the features of all layers, [M, layers * hidden], to [M, hidden]."""
        projected: Tensor = self.fc(features / self.feature_scale.to(features.dtype))
        return projected

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        state = dict(self.state_dict())
        state["fc.weight"] = self.fc.weight.detach() / state.pop("feature_scale")
        return state

    @torch.no_grad()
    def start(self, target: TargetModel) -> None:
        """Take the target's final norm and rows of its output matrix, so that guesses make sense from the start."""
        self.lm_head.weight.copy_(target.stored_output()[self.target_ids.cpu()].float())
        self.norm.weight.copy_(target.stored("model.norm.weight").float())


class TrainableHead(TrainableDrafter):
    """Guesses the token after next from the target's features and the next token; has one layer.

    At base t the input is the feature of position t with token t + 1, and the first guess is token t + 2. Step j of the
    unrolled head takes its own feature of step j - 1 with token t + 1 + j, and guesses token t + 2 + j.

    Attributes:
        skips_first_token: whether the first pair of a sequence has no token.
    """

    skips_first_token = False
    layer: TrainableLayer

    @property
    def decoder_layer(self) -> TrainableLayer:
        """The head's only layer, under whatever name its weights have."""
        return self.layer

    @abstractmethod
    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor | None, Tensor]:
        """Turn a step's tokens and features [M, hidden] into the layer's residual stream [M, hidden], None if it is the
        feature itself, and the rows [M, width] that its attention projects."""

    def project(self, features: Tensor) -> Tensor:
        """Return the target's features as a step takes them, [M, hidden]."""
        return features

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Return the step's features [M, hidden], from the stream and attention's output [M, H, D]."""
        return self.decoder_layer.finish(stream, attended)

    def before_attention(
        self, embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Return the residual stream as `enter` does, and q [M, H, D], k and v [M, KVH, D]."""
        stream, rows = self.enter(embedded, feature)
        return stream, *self.decoder_layer.self_attn.project(rows, cos, sin)

    def runner(self, rotary: Rotary, wrap: Wrap) -> Runner:
        """See TrainableDrafter. Step j computes the same as drafting j + 1 tokens past the root: see `attention`."""
        project, before, after = wrap(self.project), wrap(self.before_attention), wrap(self.finish)
        columns = OwnKeyMerger(wrap)

        def run(given: DraftInput, num_steps: int) -> Iterator[Tensor]:
            spans, num_tokens = given.spans, given.token_ids.shape[0]
            feature = project(given.features)
            # Tokens beyond the end are missing; zeros take their place.
            embedded = functional.pad(given.embedded, (0, 0, 0, num_steps))
            own_k: list[Tensor] = []
            own_v: list[Tensor] = []
            for step in range(num_steps):
                tokens = embedded[1 + step : 1 + step + num_tokens]
                if step == 0 and self.skips_first_token:
                    tokens = tokens.masked_fill(spans.positions.unsqueeze(1) == 0, 0.0)
                angles = rotary.angles(spans.positions + step, feature.dtype)
                stream, q, k, v = before(tokens, feature, *angles)
                if step == 0:
                    true_k, true_v = k, v
                else:
                    own_k.append(k)
                    own_v.append(v)
                attended = own_attention(q, true_k, true_v, own_k, own_v, spans, columns)
                feature = after(feature if stream is None else stream, attended)
                yield feature

        return run


class Learner:
    """A drafter, and how it learns from batches.

    Attributes:
        fixed_shape: whether all batches must have one shape.
    """

    def __init__(
        self,
        target: TargetModel,
        module: TrainableDrafter,
        options: TrainerOptions,
        feature_weight: float = 0.0,
        *,
        compiled: bool | None = None,
    ) -> None:
        """`feature_weight` is that of the smooth L1 distance to the target's hidden states, beside the loss on tokens.

        If `compiled` is None, the options decide on a GPU, as they do about batches of one shape; a CPU uses neither.
        """
        self.module = module
        on_gpu = target.device.type == "cuda"
        self.fixed_shape = on_gpu and options.packed
        self._target = target
        self._num_steps = options.unroll
        self._feature_weight = feature_weight
        wrap = _compiler(on_gpu and options.compile and self.fixed_shape if compiled is None else compiled)
        self._loss = TargetLoss(wrap, options.hit_weight)
        self._run = module.runner(target.rotary, wrap)
        self._output_rows = wrap(module.output_rows)
        self._target_output: Tensor | None = None
        if module.output_weight is None:
            self._target_output = target.stored_output().to(target.device, target.dtype)
        whole = torch.arange(target.config.vocab_size, device=target.device)
        ids = module.target_ids
        self._target_ids = whole if ids is None else ids
        self._draft_ids = torch.full_like(whole, -1)
        self._draft_ids[self._target_ids] = torch.arange(self._target_ids.shape[0], device=target.device)

    def prepare(self, batch: TextBatch) -> None:
        """Fit the drafter to a batch. Called once, before the first step of a new training."""
        given, _ = self._draft_input(batch)
        places = torch.from_numpy(batch.targets[: batch.num_targets]).to(self._target.device)
        self.module.calibrate(given.features[places], given.embedded[places])

    def losses(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of each step that the drafter runs on itself, float32 [steps], with what backward needs; and
        the share of the batch's targets where the likeliest tokens agree, float32 [steps].

        The trainer sums the losses, weighted by `decay`, and runs backward.
        """
        given, hidden = self._draft_input(batch)
        targets, found, counts = self._places(batch)
        hidden = hidden.index_select(0, targets)
        target_probs = self._loss.target_probs(self._target.model, hidden, self._target_ids, self._draft_ids, counts)
        count = counts.sum(dtype=torch.float32)
        losses, rates = [], []
        # Read for each batch: the matrix may be computed from several parameters.
        output = self._target_output if self._target_output is not None else self.module.output_weight
        if output is None:
            raise ValueError("a drafter that had no output matrix of its own has none of the target's")
        with self._target.autocast():
            for rows in self._rows(given, targets, found):
                loss, hits = self._loss(self._output_rows(rows), output, target_probs, count)
                if self._feature_weight:
                    loss = loss + self._feature_weight * _distance(rows, hidden, counts)
                losses.append(loss)
                rates.append(hits.sum() / count)
        return torch.stack(losses), torch.stack(rates)

    def output_moments(self, batch: TextBatch) -> Tensor:
        """Return the sum of x x^T over the rows x that the output matrix takes, float32 [hidden, hidden]."""
        given, _ = self._draft_input(batch)
        targets, found, counts = self._places(batch)
        with self._target.autocast():
            rows = [self._output_rows(rows).detach()[counts].float() for rows in self._rows(given, targets, found)]
        return torch.cat(rows).T @ torch.cat(rows)

    def _rows(self, given: DraftInput, targets: Tensor, found: Tensor) -> Iterator[Tensor]:
        """Yield the features [R, hidden] from which each step that the drafter runs on itself guesses the targets."""
        for step, feature in enumerate(self._run(given, self._num_steps)):
            # The token after place i is guessed from base i - lead; each further step begins one base earlier.
            lead = self.module.lead + step
            places = found[lead : lead + feature.shape[0]]
            rows: Tensor = _PickRows.apply(feature, targets - lead, places)  # type: ignore[no-untyped-call]
            yield rows

    def _draft_input(self, batch: TextBatch) -> tuple[DraftInput, Tensor]:
        """Return the drafter's input, and the target's hidden states [M, hidden]."""
        target = self._target
        token_ids = put(batch.token_ids, target.device)
        spans = Spans.of(put(batch.bounds, target.device), token_ids.shape[0], batch.longest)
        features, hidden = target_states(target.model, token_ids, spans, self.module.feature_layers)
        if features.shape[1]:
            # Features tell what came before a part; without features a drafter could not know it.
            spans = Spans.of(put(batch.parts, target.device), token_ids.shape[0], batch.longest)
        return DraftInput(token_ids, target.embed(token_ids), features, spans), hidden

    def _places(self, batch: TextBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch's targets [R]; the index of each token (and of those beyond the last) among them, R for
        none; and which targets count, bool [R]."""
        size, count = batch.targets.size, batch.num_targets
        found = np.full(batch.token_ids.size + self._num_steps + 1, size, np.int64)
        found[batch.targets[:count]] = np.arange(count)
        parts = put(np.concatenate([batch.targets, np.arange(size) < count, found]), self._target.device)
        targets, counts, found_at = parts.split((size, size, found.size))
        return targets, found_at, counts.bool()


def _compiler(on: bool) -> Wrap:
    """Return a compiler for functions of fixed shapes if `on`, else the identity."""
    if not on:
        return lambda piece: piece
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    return lambda piece: torch.compile(piece, dynamic=False, fullgraph=True)


def _distance(rows: Tensor, true: Tensor, counts: Tensor) -> Tensor:
    """Return the smooth L1 distance of own and true features [R, hidden], with each channel in units of its own size: a
    scalar, the mean over the rows with a True in bool `counts` [R]."""
    share = (counts / counts.sum()).unsqueeze(1)
    scale = (true.float().square() * share).sum(0).sqrt().clamp_(min=MIN_CHANNEL_SIZE)
    distance = functional.smooth_l1_loss(rows.float() / scale, true.float() / scale, reduction="none")
    return (distance * share).sum(0).mean()


class _PickRows(torch.autograd.Function):
    """Picks rows of a matrix [M, K] at int64 `rows` [R], each at most once, so that backward is a look-up, too: int64
    `places` [M] says where each row went, R for nowhere."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return matrix.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Rows that were picked a second time get no gradient for it.
        (places,) = ctx.saved_tensors
        return functional.pad(grad, (0, 0, 0, 1)).index_select(0, places), None, None


def channel_sizes(rows: Tensor, least: float = MIN_CHANNEL_SIZE) -> Tensor:
    """Return the root mean square of each channel over rows [N, C], at least `least`: float32 [C].

    Channels of features and embeddings differ a hundredfold in some targets.
    """
    return rows.float().square().mean(0).sqrt().clamp_(min=least)


def levelling_weight(sizes: Tensor) -> Tensor:
    """Return the weight [C] of an RMS norm that makes channels of these sizes [C] equally large. The norm itself
    divides all channels by the same number."""
    return sizes.square().mean().sqrt() / sizes
