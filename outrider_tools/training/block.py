"""The trainable block head (DFLASH, DSPARK), under the key names of DeepSpec's heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider_tools.training.attention import OwnKeyMerger, own_attention
from outrider_tools.training.layers import TrainableLayer, TrainableNorm, llama_fields, llama_layer, matrix
from outrider_tools.training.learner import DraftInput, DraftVocabularyHead, Runner, Wrap, channel_sizes
from outrider_tools.training.target import TargetModel


class TrainableBlockHead(DraftVocabularyHead):
    """Guesses `block_size` tokens behind every base at once: its place j guesses token t + 2 + j from base t.

    The block of base t is token t + 1 and masks. Its places attend to keys and values of the features up to t, which
    are the same for all blocks, and to each other: causal flash attention over the first, with the block's own few
    keys merged into its result (see `attention`).
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
        """`config` is the target's, whose attention the layers have. `markov_rank` 0 for no sequential part; else it
        is DSPARK's recurrent one."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
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
        self.register(config.vocab_size, target_ids, self.fc.in_features)
        self.register_buffer("mask_row", torch.zeros(hidden))

    @property
    def output_weight(self) -> Tensor:
        """See TrainableDrafter; what the token before says has columns of its own."""
        if self.markov_head is None:
            return self.lm_head.weight
        return torch.cat((self.lm_head.weight, self.markov_head.markov_w2.weight), 1)

    @torch.no_grad()
    def start(self, target: TargetModel) -> None:
        """See DraftVocabularyHead; and its embedding of the mask."""
        super().start(target)
        self.mask_row.copy_(target.embed(torch.tensor(self.mask_token, device=target.device)))

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See TrainableEagle3Head."""
        self.feature_scale.copy_(channel_sizes(features))

    def context(self, features: Tensor) -> Tensor:
        """What keys and values of the context are made of, [M, hidden]."""
        found: Tensor = self.hidden_norm(self.fc(features / self.feature_scale.to(features.dtype)))
        return found

    def runner(self, rotary: Rotary, wrap: Wrap) -> Runner:
        """See TrainableDrafter. All places of a layer are computed together, one behind the other."""
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
                said, memory = self.markov_head(before, found[place], memory)
                yield torch.cat((found[place], said), 1)

        return run

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        state = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        scale = state.pop("feature_scale")
        del state["mask_row"]
        state["fc.weight"] = state["fc.weight"] / scale
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
        """Of tokens [M], rows [M, hidden] and memory [M, rank]: values [M, rank], and the memory after them."""
        embedded = self.markov_w1(tokens).to(rows.dtype)
        keep, fresh, said = self.joint_proj(torch.cat((memory, embedded, rows), 1)).chunk(3, 1)
        keep = keep.sigmoid()
        return said.tanh(), keep * memory + (1 - keep) * fresh.tanh()
