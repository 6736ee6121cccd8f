"""Decoders with rotary positions, grouped-query attention and gated MLPs, or mixtures of them: the architectures of
outrider.models.families.

They differ by ModelConfig, not by subclasses. The heads of drafters are made of the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention_tiles import ScoreRules
from kernels.cpu.layout import StackShape
from kernels.cpu.stack import DecoderStack, LayerWeights, StackPlan, pieces
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.exchange import Exchange
from outrider.layers.experts import ExpertMlp
from outrider.layers.linear import Linear, RMSNorm
from outrider.layers.rotary import Rotary, pair_order
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig


class ResidualOutput:
    """Adds a matrix's products to the residual stream: after a norm, if the family has one there, and scaled."""

    def __init__(self, linear: Linear, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.linear = linear
        self.norm = layer_norm(config, dtype, device) if config.family.norms != "before" else None
        self._scale = config.residual_scale
        self.exchange: Exchange | None = None
        """Between ranks that each have some of the matrix's columns."""
        self.next_norm: RMSNorm | None = None
        """The next norm of the residual stream, so that one kernel can do both."""

    @property
    def is_plain(self) -> bool:
        """Whether products are added as they are, without a bias, and on one rank."""
        return self.norm is None and self._scale == 1.0 and self.exchange is None and self.linear.bias is None

    def add_to(self, stream: Tensor, rows: Tensor) -> Tensor:
        """Return the residual stream [M, hidden] plus the output for `rows` [M, in]."""
        exchange = self.exchange
        if self.norm is None and self._scale == 1.0:
            if exchange is None:
                return self.linear.add_to(stream, rows, self.next_norm)
            return exchange.add(stream, self.linear(rows), self.next_norm)
        product = self.linear(rows)
        if exchange is not None:
            product = exchange.total(product)
        return torch.add(stream, product if self.norm is None else self.norm(product), alpha=self._scale)

    def finish_loading(self) -> None:
        """See SelfAttention."""
        if self.exchange is not None and self.exchange.rank:
            # Only rank 0 adds it.
            self.linear.bias = None
        self.linear.pack()
        if self.norm is not None:
            self.norm.finish_loading()


def layer_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device, *shape: int) -> RMSNorm:
    """Return an empty norm with the family's offset, of the residual stream's width unless `shape` is given."""
    return RMSNorm(shape or (config.hidden_size,), config.rms_norm_eps, dtype, device, config.family.norm_offset)


class SelfAttention:
    """Grouped-query attention over rows [M, input_size]; `layer` is its layer of the KV cache.

    `rotary` is the layer's own rotary embedding, if it is not the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        input_size: int,
        rotary: Rotary | None = None,
    ) -> None:
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.weight_head_dim
        self._padding = (config.head_dim - self.head_dim) // 2
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        # q, k and v are one matrix: heads in that order, so that q and k are rotated (and normed) as one tensor.
        name, num_out = f"model.layers.{layer}.self_attn", self.q_size + 2 * self.kv_size
        self._parts = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        """Rows of the matrices that are separate in checkpoints."""
        if config.family.fused:
            self._parts = {"qkv_proj": num_out}
        scheme = config.scheme_of(*(f"{name}.{part}" for part in self._parts))
        self.qkv = Linear(input_size, num_out, config.qkv_bias, dtype, device, scheme)
        scheme = config.scheme_of(f"{name}.o_proj")
        output = Linear(self.q_size, config.hidden_size, config.output_bias, dtype, device, scheme)
        self.output = ResidualOutput(output, config, dtype, device)
        count = config.num_heads + config.num_kv_heads
        self.qk_norm = layer_norm(config, dtype, device, count, config.head_dim) if config.qk_norm else None
        wide_sizes = (self.q_size, self.kv_size) if config.family.wide_qk_norm else ()
        self.wide_norms = [layer_norm(config, dtype, device, size) for size in wide_sizes]
        self._order = pair_order(config.rope, self.head_dim)
        sinks = torch.empty(config.num_heads, dtype=torch.float32, device=device) if config.family.sinks else None
        scores = ScoreRules(config.window_of(layer), config.attention_softcap, sinks)
        rules = LayerRules(config.attention_scale, scores, rotary)
        self.rules = PLAIN if rules.is_plain and rotary is None else rules
        """How the layer attends. Sinks, if there are any, are empty until they are loaded."""

    @property
    def is_plain(self) -> bool:
        """Whether the layer sees all keys with the model's rotary embedding, has no norms over all heads and no
        padding, and adds its output as it is."""
        is_usual = self.rules.scores == PLAIN.scores and self.rules.rotary is None
        return is_usual and not self.wide_norms and not self._padding and self.output.is_plain

    def __call__(self, rows: Tensor, residual: Tensor, plan: AttentionPlan) -> Tensor:
        """Return `residual` [M, hidden] plus the attention's output for `rows`."""
        made = self.qkv(rows)
        if self.wide_norms:
            *parts, v = made.split((self.q_size, self.kv_size, self.kv_size), 1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.wide_norms, parts, strict=True)]
            made = torch.cat((*normed, v), 1)
        heads = made.view(rows.shape[0], -1, self.head_dim)
        if self._padding:
            return self.output.add_to(residual, self._attend_padded(heads, plan))
        return self.output.add_to(residual, plan.attend(self.layer, heads, self.qk_norm, self.rules))

    def _attend_padded(self, heads: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend with zeros behind each half of a head: pairs stay pairs, and zeros change no score."""
        num_rows, half = len(heads), self.head_dim // 2
        padded = functional.pad(heads.view(num_rows, -1, 2, half), (0, self._padding)).flatten(2)
        attended = plan.attend(self.layer, padded, None, self.rules).view(num_rows, self.num_heads, 2, -1)
        return attended[..., :half].reshape(num_rows, self.q_size)

    def of_stream(self, stream: Tensor, norm: RMSNorm, plan: AttentionPlan) -> Tensor:
        """Return the residual stream [M, hidden] plus the attention's output for the normed stream."""
        attended = None
        if not self.wide_norms and not self._padding:
            attended = plan.attend_stream(self.layer, stream, norm, self.qkv, self.qk_norm, self.rules)
        return self(norm(stream), stream, plan) if attended is None else self.output.add_to(stream, attended)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill: q, k and v as views of the fused matrix; head norms fill the row of one head."""
        found = self.qkv.tensors(*self._parts, rows=list(self._parts.values()))
        found |= self.output.linear.tensors("o_proj")
        if self.qk_norm is not None:
            found["q_norm.weight"] = self.qk_norm.weight[0]
            found["k_norm.weight"] = self.qk_norm.weight[self.num_heads]
        if self.wide_norms:
            found |= {f"{name}_norm.weight": norm.weight for name, norm in zip("qk", self.wide_norms, strict=True)}
        if self.rules.scores.sinks is not None:
            found["sinks"] = self.rules.scores.sinks
        return found

    def finish_loading(self) -> None:
        """Choose memory layouts. Called once when the weights are filled."""
        if self.qk_norm is not None:
            if self._order is not None:
                self.qk_norm.weight[:] = self.qk_norm.weight[:, self._order]
            self.qk_norm.weight[: self.num_heads] = self.qk_norm.weight[0].clone()
            self.qk_norm.weight[self.num_heads :] = self.qk_norm.weight[self.num_heads].clone()
        for norm in (*self.wide_norms, *([] if self.qk_norm is None else [self.qk_norm])):
            norm.finish_loading()
        self.qkv.pack(self._row_order())
        self.output.finish_loading()

    def _row_order(self) -> Tensor | None:
        """Return the checkpoint's row for each row of q, k and v, int64; None if all are in place."""
        if self._order is None:
            return None
        rows = torch.arange(self.q_size + 2 * self.kv_size).view(-1, self.head_dim)
        turned = self.num_heads + self.num_kv_heads
        rows[:turned] = rows[:turned, self._order]
        return rows.view(-1).to(self.qkv.weight.device)


class GatedMlp:
    """A gated MLP."""

    name = "mlp"
    """Its name in checkpoints."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = config.intermediate_size
        self._gelu = config.activation != "silu"
        name = f"model.layers.{layer}.mlp"
        self._parts = (
            {"gate_up_proj": 2 * self.size} if config.family.fused else {"gate_proj": self.size, "up_proj": self.size}
        )
        """See SelfAttention."""
        scheme = config.scheme_of(*(f"{name}.{part}" for part in self._parts))
        self.gate_up = Linear(config.hidden_size, 2 * self.size, config.mlp_bias, dtype, device, scheme)
        scheme = config.scheme_of(f"{name}.down_proj")
        down = Linear(self.size, config.hidden_size, config.mlp_bias, dtype, device, scheme)
        self.down = ResidualOutput(down, config, dtype, device)

    @property
    def is_plain(self) -> bool:
        """Whether it gates by silu, has no bias, and adds its output as it is."""
        return not self._gelu and self.gate_up.bias is None and self.down.is_plain

    def __call__(self, stream: Tensor, norm: RMSNorm | None, plan: AttentionPlan) -> Tensor:
        """Return the residual stream [M, hidden] plus the MLP's output for the normed stream."""
        return self.down.add_to(stream, self.gate_up.normed_gated(stream, norm, self._gelu))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill, gate and up as halves of one matrix."""
        gate_up = self.gate_up.tensors(*self._parts, rows=list(self._parts.values()))
        return gate_up | self.down.linear.tensors("down_proj")

    def finish_loading(self) -> None:
        """See SelfAttention."""
        self.gate_up.pack()
        self.down.finish_loading()


class DecoderLayer:
    """Attention and MLP, each with a residual around it and with norms before or after it, as the family has them.

    `input_size` is the width of attention's input, if it is not the residual stream's. `input_norm` False leaves out
    the norm before attention. `rotary`: see SelfAttention.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        input_size: int | None = None,
        input_norm: bool = True,
        rotary: Rotary | None = None,
    ) -> None:
        before = config.family.norms != "after"
        self.attention_norm = layer_norm(config, dtype, device) if before and input_norm else None
        self.attention = SelfAttention(config, layer, dtype, device, input_size or config.hidden_size, rotary)
        self.mlp_norm = layer_norm(config, dtype, device) if before else None
        experts = config.experts
        self.mlp: GatedMlp | ExpertMlp
        if experts is not None and layer in experts.layers:
            self.mlp = ExpertMlp(config, experts, layer, dtype, device)
        else:
            self.mlp = GatedMlp(config, layer, dtype, device)
        self.ends = self.attention.output, self.mlp.down if isinstance(self.mlp, GatedMlp) else self.mlp
        """The parts that add to the residual stream."""

    def __call__(self, stream: Tensor, plan: AttentionPlan, qkv_input: Tensor | None = None) -> Tensor:
        """Return the stream [M, hidden] after the layer; `qkv_input` [M, input_size] replaces attention's input."""
        if qkv_input is None and self.attention_norm is not None:
            stream = self.attention.of_stream(stream, self.attention_norm, plan)
        else:
            stream = self.attention(stream if qkv_input is None else qkv_input, stream, plan)
        return self.mlp(stream, self.mlp_norm, plan)

    def few_rows(self, config: ModelConfig) -> tuple[StackShape, LayerWeights] | None:
        """Return what kernels.cpu.stack needs of the layer; None if it cannot do what the layer does."""
        attention, mlp, before = self.attention, self.mlp, self.attention_norm
        if not attention.is_plain or not isinstance(mlp, GatedMlp) or not mlp.is_plain or self.mlp_norm is None:
            return None
        linears = attention.qkv, attention.output.linear, mlp.gate_up, mlp.down.linear
        packed = [linear.on_cpu.of_few for linear in linears if linear.on_cpu is not None]
        matrices = [matrix for matrix in packed if matrix is not None]
        kinds = {matrix.kind for matrix in matrices}
        if len(matrices) < len(linears) or len(kinds) > 1:
            return None
        bias, norm = attention.qkv.bias, attention.qk_norm
        shape = StackShape(
            config.hidden_size, attention.num_heads, attention.num_kv_heads, attention.head_dim, mlp.size,
            eps=config.rms_norm_eps, scale=attention.rules.scale or attention.head_dim**-0.5, kind=kinds.pop(),
            qkv_input_size=attention.qkv.size if before is None else 0,
            has_bias=bias is not None, has_qk_norm=norm is not None,
        )  # fmt: skip
        qkv, output, gate_up, down = matrices
        weights = LayerWeights(
            None if before is None else before.wide_weight, qkv, output, self.mlp_norm.wide_weight, gate_up, down,
            qkv_bias=None if bias is None else bias.float(), qk_norm=None if norm is None else norm.wide_weight,
        )  # fmt: skip
        return shape, weights

    def join(self, exchange: Exchange) -> None:
        """See CausalLM."""
        for end in self.ends:
            end.exchange = exchange

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill by their Hugging Face names below the layer's own."""
        found = {f"{name}.weight": norm.weight for name, norm in self._norms().items()}
        found |= {f"self_attn.{name}": tensor for name, tensor in self.attention.checkpoint_tensors().items()}
        found |= {f"{self.mlp.name}.{name}": tensor for name, tensor in self.mlp.checkpoint_tensors().items()}
        return found

    def _norms(self) -> dict[str, RMSNorm]:
        """Return norms by checkpoint names; the one before the MLP has its own name if there is one after attention."""
        attention_end = self.attention.output.norm
        mlp_end = self.mlp.down.norm if isinstance(self.mlp, GatedMlp) else None
        found = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": attention_end or self.mlp_norm,
            "pre_feedforward_layernorm": self.mlp_norm if attention_end is not None else None,
            "post_feedforward_layernorm": mlp_end,
        }
        return {name: norm for name, norm in found.items() if norm is not None}

    def finish_loading(self) -> None:
        """See SelfAttention."""
        for norm in (self.attention_norm, self.mlp_norm):
            if norm is not None:
                norm.finish_loading()
        self.attention.finish_loading()
        self.mlp.finish_loading()


class LayerStack:
    """The decoder layers of a model or a head, each with its part of the KV cache, run in the fastest way there is.

    On a CPU, rows go through all layers in one function (kernels.cpu.stack), if the layers allow it: few rows, or any
    number if the function is the fastest way for them, too.
    """

    def __init__(self, layers: Sequence[DecoderLayer], config: ModelConfig, rotary: Rotary) -> None:
        """`layers` may be filled later, before `finish_loading`."""
        self.layers, self._config, self._rotary = layers, config, rotary
        self.few: DecoderStack | None = None
        """The function; None if there is none for these layers."""

    def finish_loading(self) -> None:
        """Choose memory layouts and the function. Called once when all weights are filled."""
        for layer in self.layers:
            layer.finish_loading()
        few = [found for layer in self.layers if (found := layer.few_rows(self._config)) is not None]
        shapes = {shape for shape, _ in few}
        if len(few) == len(self.layers) and len(shapes) == 1 and (shape := shapes.pop()).fits:
            self.few = DecoderStack(shape, [weights for _, weights in few])

    def __call__(
        self,
        stream: Tensor,
        batch: TokenBatch,
        kv: KVCache,
        attention: AttentionBackend,
        wanted: Sequence[int] = (),
        qkv_input: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the residual stream [M, hidden] after all layers, and as it enters each of the layers `wanted`.

        `qkv_input` [M, any] replaces the normed stream as the input of the first layer's attention.
        """
        if plans := self.plans(batch, kv):
            stream = stream.clone()
            found = {number: torch.empty_like(stream) for number in wanted if number < len(self.layers)}
            first = 0
            for few in plans:
                rows = slice(first, first + few.rows)
                taps = {number: kept[rows] for number, kept in found.items()}
                few.run(stream[rows], taps, None if qkv_input is None else qkv_input[rows])
                first += few.rows
            return stream, found
        plan = attention.plan(batch, kv, self._config.num_heads, self._rotary)
        found = {}
        for number, layer in enumerate(self.layers):
            if number in wanted:
                found[number] = stream
            stream = layer(stream, plan, None if number else qkv_input)
        return stream, found

    def plans(self, batch: TokenBatch, kv: KVCache) -> list[StackPlan]:
        """Return the batch in the form for the function, in parts for one run each; empty if it is not used for it."""
        if self.few is None or batch.token_ids.numel() > self.few.max_rows or kv.k.dtype != torch.bfloat16:
            return []
        found = batch.queries()
        if found is None:
            return []
        positions = batch.positions.long()
        # In bfloat16, as in rotations layer by layer.
        angles = self._rotary.tables(positions, torch.bfloat16)
        caches = kv.k_layers, kv.v_layers
        return [self.few.plan(*piece, angles, caches) for piece in pieces(*found, positions)]


class CausalLM(LanguageModel):
    """Embedding, decoder layers, final norm and output matrix. Built empty; `load_model` fills it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config: ModelConfig = config
        self.dtype = dtype
        self.device = device
        self.has_experts = config.experts is not None
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        # In the model's dtype, like transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self.rotary = Rotary(config.rope, config.weight_head_dim, device, config.head_dim)
        others = {config.rope_of(layer) for layer in range(config.num_layers)} - {config.rope}
        rotaries = {rope: Rotary(rope, config.weight_head_dim, device, config.head_dim) for rope in others}
        self.layers = [
            DecoderLayer(config, layer, dtype, device, rotary=rotaries.get(config.rope_of(layer)))
            for layer in range(config.num_layers)
        ]
        self.norm = layer_norm(config, dtype, device)
        following = [layer.attention_norm for layer in self.layers[1:]]
        for layer, next_norm in zip(self.layers, [*following, self.norm], strict=True):
            first, last = layer.ends
            first.next_norm, last.next_norm = layer.mlp_norm, next_norm
        rows = 0 if config.tie_embeddings else config.vocab_size // config.vocab_cuts
        scheme = None if config.tie_embeddings else config.scheme_of("lm_head")
        self.head = Linear(config.hidden_size, rows, False, dtype, device, scheme and scheme.without_library())
        self.exchange: Exchange | None = None
        """Between ranks that each have their part of the weights."""
        self._stack = LayerStack(self.layers, config, self.rotary)

    def join(self, exchange: Exchange) -> None:
        """Compute as one of several ranks that each have their part of the weights; call before `finish_loading`.

        `config` must be what `outrider.models.cuts.cut` makes for that many ranks.
        """
        self.exchange = exchange
        for layer in self.layers:
            layer.join(exchange)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill by their names in the checkpoint; some are views of fused ones."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_embeddings:
            found |= self.head.tensors("lm_head")
        for number, layer in enumerate(self.layers):
            found |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """Choose memory layouts. Called once when all tensors are filled.

        It goes layer by layer, so that no more than one matrix is in memory twice.
        """
        if self.config.tie_embeddings:
            # Rows are looked up in the plain layout. If packing helps, the head is a second copy in another layout.
            self.head.weight = self.embedding
            if self.exchange is not None and self.config.vocab_cuts > 1:
                self.head.weight = self.embedding.chunk(self.config.vocab_cuts)[self.exchange.rank]
        self.head.pack()
        self.norm.finish_loading()
        self._stack.finish_loading()
        self.steady_rows = 0 if self._stack.few is None else self._stack.few.max_rows

    @torch.inference_mode()
    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See LanguageModel."""
        count = len(self.layers)
        stream, features = self._stack(self.embedded(batch.token_ids), batch, kv, attention, feature_layers)
        features[count] = stream
        hidden = features[count + 1] = self.norm(stream)
        return hidden, [features[number] for number in feature_layers]

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the residual stream [M, hidden_size] that enters the first layer."""
        stream = functional.embedding(token_ids, self.embedding)
        return stream if self._embedding_scale == 1.0 else stream * self._embedding_scale

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        logits = self.head.to_float32(hidden)
        if self.exchange is not None and self.config.vocab_cuts > 1:
            logits = self.exchange.join(logits)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
