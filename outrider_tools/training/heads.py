"""The trainable heads, under the key names of public ones: EAGLE, EAGLE-3, MTP in MiMo's layout, and DeepSpec's heads
that guess blocks (DFLASH, DSPARK).

EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858) share a head; EAGLE-3's (arXiv 2503.01840) is new or from a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.models.drafters.config import EMBEDDING, OUTPUT, HeadConfig, default_feature_layers, eagle3_config
from outrider.models.drafters.kinds import MTP_PREFIX, algorithm_of, head_name
from outrider.models.drafters.loader import CONFIG, ids_of_offsets
from outrider.models.fields import read_json
from outrider.models.weights import StoredTensor, check_tensors, stored_tensors
from outrider_tools.training.attention import OwnKeyMerger, own_attention
from outrider_tools.training.layers import (
    INPUT_NORM,
    MLP_NORM,
    TrainableLayer,
    TrainableNorm,
    llama_fields,
    llama_layer,
    matrix,
)
from outrider_tools.training.learner import (
    DraftInput,
    DraftVocabularyHead,
    Runner,
    TrainableHead,
    Wrap,
    channel_sizes,
    levelling_weight,
)
from outrider_tools.training.target import TargetModel

# Initial size of what a new head adds to its stream, relative to the target's features.
START_SIZE = 0.3


class TrainableEagleHead(TrainableHead):
    """`fc` over embedding and feature, and one layer without a norm before its attention.

    The residual stream is the next hidden state itself. Its channels differ a hundredfold in some targets, so the
    trained weights work on the stream divided by `feature_scale`, channel by channel; the file holds the product.
    """

    token_scale: Tensor
    feature_scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.feature_layers = (config.num_layers + 1,)
        self.fc = matrix(2 * hidden, hidden)
        self.layer = TrainableLayer(llama_layer(config), (MLP_NORM,))
        with torch.no_grad():
            # A random head that is sure of its guesses would waste many of the first steps.
            for part in (self.fc, self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
                part.weight.mul_(START_SIZE)
        self.register_buffer("token_scale", torch.ones(hidden))
        self.register_buffer("feature_scale", torch.ones(hidden))

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See TrainableDrafter."""
        for scale, rows in ((self.feature_scale, features), (self.token_scale, embedded)):
            scale.copy_(channel_sizes(rows))
        self.layer.post_attention_layernorm.weight.copy_(levelling_weight(self.feature_scale))

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See TrainableHead."""
        scaled = torch.cat([embedded / self.token_scale, feature / self.feature_scale], -1)
        stream = self._rescaled(self.fc(scaled.to(feature.dtype)))
        return stream, (stream / self.feature_scale).to(stream.dtype)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """See TrainableHead."""
        stream = stream + self._rescaled(self.layer.self_attn.output(attended))
        return stream + self._rescaled(self.layer.mlp(self.layer.post_attention_layernorm(stream)))

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        state = {name: tensor.detach() for name, tensor in self.layer.state_dict().items()}
        rows, columns = self.feature_scale[:, None], 1 / self.feature_scale[None]
        for name in ("q", "k", "v"):
            state[f"self_attn.{name}_proj.weight"] = state[f"self_attn.{name}_proj.weight"] * columns
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            state[name] = state[name] * rows
        fc = rows * self.fc.weight.detach() / torch.cat([self.token_scale, self.feature_scale])[None]
        return {"fc.weight": fc, **{f"layers.0.{name}": tensor for name, tensor in state.items()}}

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter."""
        return llama_fields(self.config, "LlamaForCausalLMEagle", target_fields)

    def _rescaled(self, rows: Tensor) -> Tensor:
        return (rows * self.feature_scale).to(rows.dtype)


# What an initial head's layer must share with the target's, and what no trainable head has.
SHARED = ("hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope")
LACKING = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm")


class TrainableEagle3Head(DraftVocabularyHead, TrainableHead):
    """An EAGLE-3 head; see the module. Its vocabulary may be a part of the target's."""

    def __init__(
        self, config: ModelConfig, target_ids: Tensor, feature_layers: tuple[int, ...], mlp_size: int = 0
    ) -> None:
        """`config` is the target's. The head has its attention, and its MLP unless `mlp_size` sets another width.

        `target_ids` int64 [draft_vocab_size]: the target's id of each draft id, ascending.
        """
        super().__init__(config)
        self.feature_layers = feature_layers
        self.fc = matrix(len(feature_layers) * config.hidden_size, config.hidden_size)
        plain = replace(llama_layer(config), intermediate_size=mlp_size or config.intermediate_size)
        # Queries, keys and values are projected from twice the width: the token's embedding and the feature before it.
        self.midlayer = TrainableLayer(plain, ("hidden_norm", INPUT_NORM, MLP_NORM), 2 * config.hidden_size)
        self.norm = TrainableNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = matrix(config.hidden_size, target_ids.shape[0])
        self.register(target_ids)

    @property
    def decoder_layer(self) -> TrainableLayer:
        """See TrainableHead."""
        return self.midlayer

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[None, Tensor]:
        """See TrainableHead."""
        layer = self.midlayer
        return None, torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], -1)

    def output_rows(self, feature: Tensor) -> Tensor:
        """See TrainableDrafter."""
        rows: Tensor = self.norm(feature)
        return rows

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter."""
        target = self.config
        found = llama_fields(
            target,
            "LlamaForCausalLMEagle3",
            target_fields,
            intermediate_size=self.midlayer.mlp.gate_proj.out_features,
            draft_vocab_size=self.lm_head.out_features,
            target_hidden_size=target.hidden_size,
        )
        if self.feature_layers != default_feature_layers(target.num_layers):
            # The config names the layer whose output a head reads; we number layers by their input.
            found["eagle_config"] = {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.feature_layers],
            }
        return found


class StoredEagle3Head:
    """A head in a folder, checked against the target that it will be trained for.

    Attributes:
        config: the head's config.
        target_ids: int64 [draft_vocab_size], the target's ids of the tokens that it guesses, ascending.
    """

    def __init__(self, folder: Path, target: ModelConfig) -> None:
        """Raises ConfigError, which names the field or tensor at fault and both values."""
        self._folder = folder
        found = algorithm_of(folder)
        if found != "EAGLE3":
            raise self._misfit("algorithm", found, "EAGLE3")
        self._stored = stored_tensors(folder, head_name)
        self.config = eagle3_config(read_json(folder / "config.json"), self._stored, target.num_layers)
        self._check(target)
        self.target_ids, self._order = self._vocabulary(target.vocab_size)

    def head(self, target: TargetModel, target_ids: Tensor | None = None) -> TrainableEagle3Head:
        """Return a trainable head, on the target's device, that computes the same as the folder's.

        `target_ids` int64, ascending: the tokens that it guesses, with those of the folder's head among them; None for
        no others. The output matrix's rows of the others are made from the target's, by the linear map that best
        makes the stored rows from the target's rows of their tokens.

        Raises ConfigError if the folder's tensors are not those of such a head, or its embedding is not the target's.
        """
        config = self.config
        sizes = (config.feature_layers, config.decoder.intermediate_size)
        target_ids = self.target_ids if target_ids is None else target_ids
        head = TrainableEagle3Head(target.config, target_ids, *sizes)
        weights = {
            name.replace("midlayer.", "layers.0.", 1): weight.detach() for name, weight in head.named_parameters()
        }
        stored = dict(self._stored)
        embedding = stored.pop(EMBEDDING, None)
        if embedding is not None:
            self._check_embedding(embedding, target)
        output = weights[OUTPUT]
        weights[OUTPUT] = output.new_empty(self.target_ids.shape[0], output.shape[1])
        check_tensors(stored, weights, self._folder, CONFIG)
        for name, weight in weights.items():
            weight.copy_(stored[name].read())
        learned, rows = weights[OUTPUT][self._order], target.stored_output()[target_ids].float()
        known = torch.searchsorted(target_ids, self.target_ids)
        output.copy_(rows @ torch.linalg.lstsq(rows[known], learned).solution)
        output[known] = learned
        head.learned = True
        return head.to(target.device)

    def _vocabulary(self, whole: int) -> tuple[Tensor, Tensor]:
        """Return target ids int64 [draft_vocab_size], ascending, and their rows in the folder's output matrix."""
        size, offsets = self.config.draft_vocab_size, self._stored.pop("d2t", None)
        if offsets is None:
            if size != whole:
                raise self._misfit("draft_vocab_size", size, f"{whole} where tensor d2t is missing")
            return torch.arange(size), torch.arange(size)
        found = ids_of_offsets(offsets.read(), size, whole, str(offsets.path)).sort()
        return found.values, found.indices

    def _check(self, target: ModelConfig) -> None:
        decoder, plain = self.config.decoder, HeadConfig(self.config.decoder, 0, 0, ())
        wanted: list[tuple[str, Any, Any]] = [
            ("target_hidden_size", self.config.target_hidden_size, target.hidden_size),
            *((name, getattr(decoder, name), getattr(target, name)) for name in SHARED),
            ("num_hidden_layers", decoder.num_layers, 1),
            *((name, getattr(decoder, name), False) for name in LACKING),
        ]
        # The flags of EAGLE-3 heads: all of them have defaults.
        flags = [field.name for field in fields(HeadConfig) if isinstance(field.default, bool)]
        wanted += [(name, getattr(self.config, name), getattr(plain, name)) for name in flags]
        for name, value, needed in wanted:
            if value != needed:
                raise self._misfit(name, value, needed)

    def _check_embedding(self, stored: StoredTensor, target: TargetModel) -> None:
        # A head is trained and written with the target's own embedding.
        own = target.embed(torch.arange(target.config.vocab_size, device=target.device))
        if stored.shape != tuple(own.shape):
            raise self._misfit(stored.name, list(stored.shape), list(own.shape))
        if not torch.equal(stored.read().to(own.device, own.dtype), own):
            raise ConfigError(f"--init-from {self._folder}: tensor {stored.name} is not the target's embedding")

    def _misfit(self, name: str, value: Any, needed: Any) -> ConfigError:
        return ConfigError(f"--init-from {self._folder}: the head's {name} is {value}, and must be {needed} here")


class TrainableMtpHead(TrainableHead):
    """`input_proj` over the normed feature and the normed embedding, a layer like the target's, and a norm.

    Its output takes the place of the next hidden state. The first pair of a sequence has no token, as in the engines
    that serve this head.
    """

    skips_first_token = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.feature_layers = (config.num_layers + 1,)
        self.token_layernorm = TrainableNorm(hidden, eps)
        self.hidden_layernorm = TrainableNorm(hidden, eps)
        self.input_proj = matrix(2 * hidden, hidden)
        self.layer = TrainableLayer(config)
        self.final_layernorm = TrainableNorm(hidden, eps)

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See TrainableDrafter. Input norms begin so that all channels come out alike, the last norm at their sizes."""
        for norm, rows in ((self.hidden_layernorm, features), (self.token_layernorm, embedded)):
            norm.weight.copy_(levelling_weight(channel_sizes(rows)))
        self.final_layernorm.weight.copy_(channel_sizes(features, least=0.0))

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See TrainableHead."""
        inputs = torch.cat([self.hidden_layernorm(feature), self.token_layernorm(embedded)], -1)
        stream: Tensor = self.input_proj(inputs)
        return stream, self.layer.input_layernorm(stream)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """See TrainableHead."""
        output: Tensor = self.final_layernorm(super().finish(stream, attended))
        return output

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        return {MTP_PREFIX + name.removeprefix("layer."): tensor for name, tensor in self.state_dict().items()}

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter. The head gets its own folder, with the target's fields and the number of modules."""
        return {**target_fields, "num_nextn_predict_layers": 1}


class TrainableBlockHead(DraftVocabularyHead):
    """Guesses `block_size` tokens behind every base at once: its place j guesses token t + 2 + j from base t.

    The block of base t consists of token t + 1 and masks. Its places attend to keys and values of the features up to t,
    which all blocks share, and to each other: causal flash attention over the shared ones, with the block's own few
    keys merged into the result (see `attention`).
    """

    mask_row: Tensor

    def __init__(
        self,
        config: ModelConfig,
        target_ids: Tensor,
        feature_layers: tuple[int, ...],
        *,
        block_size: int,
        num_layers: int,
        mlp_size: int,
        mask_token: int,
        markov_rank: int = 0,
    ) -> None:
        """`config` is the target's, and the layers have its attention. A `markov_rank` of 0 means no sequential part;
        otherwise it is DSPARK's recurrent one."""
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.feature_layers = feature_layers
        self.block_size = block_size
        self.mask_token = mask_token
        self.markov_rank = markov_rank
        plain = replace(llama_layer(config), intermediate_size=mlp_size)
        self._mlp_size = mlp_size
        self.fc = matrix(len(feature_layers) * hidden, hidden)
        self.hidden_norm = TrainableNorm(hidden, eps)
        self.layers = nn.ModuleList(TrainableLayer(plain) for _ in range(num_layers))
        self.norm = TrainableNorm(hidden, eps)
        self.lm_head = matrix(hidden, target_ids.shape[0])
        self.markov_head: MarkovPart | None = None
        if markov_rank:
            self.markov_head = MarkovPart(config.vocab_size, target_ids.shape[0], hidden, markov_rank)
        self.register(target_ids)
        self.register_buffer("mask_row", torch.zeros(hidden))

    @property
    def output_weight(self) -> Tensor:
        """See TrainableDrafter. The sequential part's output has columns of its own."""
        if self.markov_head is None:
            return super().output_weight
        return torch.cat((self.lm_head.weight, self.markov_head.markov_w2.weight), 1)

    @torch.no_grad()
    def start(self, target: TargetModel) -> None:
        """See DraftVocabularyHead. Also takes the target's embedding of the mask."""
        super().start(target)
        self.mask_row.copy_(target.embed(torch.tensor(self.mask_token, device=target.device)))

    def context(self, features: Tensor) -> Tensor:
        """Return the rows that keys and values of the context are made from, [M, hidden]."""
        found: Tensor = self.hidden_norm(self.project(features))
        return found

    def runner(self, rotary: Rotary, wrap: Wrap) -> Runner:
        """See TrainableDrafter. A layer computes all places together, one after the other in memory."""
        context, output, columns = wrap(self.context), wrap(self.norm.forward), OwnKeyMerger(wrap)
        own = cast(Iterable[TrainableLayer], self.layers)
        layers = [(wrap(layer.self_attn.keys), wrap(layer.project), wrap(layer.finish)) for layer in own]

        def run(given: DraftInput, num_steps: int) -> Iterator[Tensor]:
            spans, size = given.spans, self.block_size
            num_tokens = given.token_ids.shape[0]
            rows = context(given.features)
            true_angles = rotary.angles(spans.positions, rows.dtype)
            places = torch.cat([spans.positions + 1 + place for place in range(size)])
            angles = rotary.angles(places, rows.dtype)
            first = functional.pad(given.embedded, (0, 0, 0, 1))[1:]
            masks = self.mask_row.to(first.dtype).expand((size - 1) * num_tokens, -1)
            stream = torch.cat([first, masks])
            for true_keys, before, after in layers:
                true_k, true_v = true_keys(rows, *true_angles)
                q, k, v = before(stream, *angles)
                own_k, own_v = list(k.split(num_tokens)), list(v.split(num_tokens))
                attended = [
                    own_attention(query, true_k, true_v, own_k, own_v, spans, columns) for query in q.split(num_tokens)
                ]
                stream = after(stream, torch.cat(attended))
            found = output(stream).split(num_tokens)
            if self.markov_head is None:
                yield from found[:num_steps]
                return
            tokens = functional.pad(given.token_ids, (0, size))
            memory = rows.new_zeros(num_tokens, self.markov_rank)
            for place in range(min(size, num_steps)):
                before = tokens[1 + place : 1 + place + num_tokens]
                values, memory = self.markov_head(before, found[place], memory)
                yield torch.cat((found[place], values), 1)

        return run

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        state = super().public_state()
        del state["mask_row"]
        return state

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter."""
        own: dict[str, Any] = {
            "num_hidden_layers": len(self.layers),
            "intermediate_size": self._mlp_size,
            "draft_vocab_size": self.lm_head.out_features,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token,
            "target_layer_ids": [layer - 1 for layer in self.feature_layers],
            "num_target_layers": self.config.num_layers,
            "layer_types": ["full_attention"] * len(self.layers),
            "markov_rank": self.markov_rank,
            "enable_confidence_head": False,
        }
        if self.markov_rank:
            own["markov_head_type"] = "rnn"
        return llama_fields(self.config, "Qwen3DSparkModel", target_fields, **own)


class MarkovPart(nn.Module):
    """DSPARK's recurrent sequential part: see outrider.models.drafters.heads."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.joint_proj = matrix(2 * rank + hidden, 3 * rank, bias=True)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, tokens: Tensor, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Take tokens [M], rows [M, hidden] and memory [M, rank]. Return values [M, rank], and the new memory."""
        embedded = self.markov_w1(tokens).to(rows.dtype)
        keep, fresh, output = self.joint_proj(torch.cat((memory, embedded, rows), 1)).chunk(3, 1)
        keep = keep.sigmoid()
        return output.tanh(), keep * memory + (1 - keep) * fresh.tanh()
