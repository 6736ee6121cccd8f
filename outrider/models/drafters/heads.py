"""Draft models: EAGLE-1/2, EAGLE-3, MTP and block heads on a target's features, and a small language model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.blocks import keep_blocks, read_inputs, read_logits
from kernels.cpu.head_step import HeadStep, HeadWeights, Links, Ranking, Stepped, fits_head
from kernels.elementwise import norm_pairs, recur, rotary_angles, write_keys
from kernels.frontier_state import BlockStore
from kernels.launch import use_triton
from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.linear import Linear
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig
from outrider.models.decoder import DecoderLayer
from outrider.models.drafters.base import DraftHead, DraftModel, required
from outrider.models.drafters.config import MARKOV_INPUT, MARKOV_OUTPUT, BlockConfig, HeadConfig


class EagleHead(DraftHead):
    """EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858).

    A head extrapolates the target's hidden state after its final norm: fc of embedding and feature, side by side, then
    decoder layers, the first without a norm before its attention. The result is the child's feature, and the target's
    output matrix turns it into logits as it is.
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        self.fc = self.linear("fc", 2 * config.decoder.hidden_size, config.fc_bias)
        for number in range(config.decoder.num_layers):
            self.layers.append(DecoderLayer(config.decoder, number, dtype, device, input_norm=number > 0))

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        stream = self.fc(torch.cat((self.embed(batch.token_ids), required(features)), 1))
        stream, _ = self.stack(stream, batch, kv, attention, qkv_input=stream)
        return stream, stream


class Eagle3Head(DraftHead):
    """EAGLE-3 heads (arXiv 2503.01840), and the norms of EAGLE 3.1.

    feature     fc of the target's residual stream at some layers, side by side
    layer 0     attention over the normed embedding and the normed feature, side by side; the residual is the feature
    to logits   norm, then an output matrix over a smaller vocabulary
    to child    the stream before that norm
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        hidden, size, count = config.decoder.hidden_size, config.target_hidden_size, len(config.feature_layers)
        self.fc = self.linear("fc", count * size, config.fc_bias) if config.projects else None
        num_norms = count if config.norm_each else 0
        self.feature_norms = [self.norm(f"fc_norm.{number}", size) for number in range(num_norms)]
        self.joint_norm = self.norm("input_norm", count * size) if config.norm_all else None
        if not self.feature_norms and self.joint_norm is None:
            self._reducer = self.fc
        self._step: HeadStep | None = None
        # The first layer's input norm in checkpoints is for the embedding.
        self.token_norm = self.norm("layers.0.input_layernorm", hidden)
        self.hidden_norm = self.norm("layers.0.hidden_norm", hidden)
        self.final_norm = self.norm("norm", hidden)
        self.layers.append(DecoderLayer(config.decoder, 0, dtype, device, input_size=2 * hidden, input_norm=False))
        for number in range(1, config.decoder.num_layers):
            self.layers.append(DecoderLayer(config.decoder, number, dtype, device))

    def finish_loading(self) -> None:
        """See DraftHead."""
        super().finish_loading()
        few, output = self.stack.few, self.output.on_cpu and self.output.on_cpu.of_few
        if few is None or not output or self.output.bias is not None or self.exchange is not None:
            return
        weights = HeadWeights(
            self.embedding,
            self.token_norm.wide_weight,
            self.hidden_norm.wide_weight,
            self.final_norm.wide_weight,
            output,
            starts_normed=self.config.norm_before_residual,
            leaves_normed=self.config.norm_output,
        )
        self._step = HeadStep(few.shape, weights) if fits_head(few.shape, weights) else None

    def step(self, batch: TokenBatch, links: Links, kv: KVCache, ranking: Ranking | None) -> Stepped | None:
        """See DraftModel."""
        plans = [] if self._step is None else self.stack.plans(batch, kv)
        return self._step(plans[0], batch.token_ids, links, ranking) if self._step and len(plans) == 1 else None

    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        features = features.to(self.dtype)
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), 1)
            features = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.feature_norms, parts, strict=True)], 1
            )
        if self.joint_norm is not None:
            features = self.joint_norm(features)
        return features if self.fc is None else self.fc(features)

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        stream = required(features)
        rows = self._pairs(batch.token_ids, stream)
        if self.config.norm_before_residual:
            stream = rows[:, self.config.decoder.hidden_size :].contiguous()
        stream, _ = self.stack(stream, batch, kv, attention, qkv_input=rows)
        normed = self.final_norm(stream)
        return normed, normed if self.config.norm_output else stream

    def _pairs(self, token_ids: Tensor, stream: Tensor) -> Tensor:
        """Return the normed embeddings of tokens [M] and the normed `stream` [M, hidden], side by side."""
        first, second = self.token_norm, self.hidden_norm
        if use_triton(stream):
            return norm_pairs(self.embedding, token_ids, first.weight, stream, second.weight, first.eps)
        return torch.cat((first(self.embed(token_ids)), second(stream)), 1)


class MtpHead(DraftHead):
    """The multi-token prediction head of MiMo checkpoints: one decoder layer on the target's last hidden state.

    The head takes that state after the target's final norm, and the embedding of the token after it; both are normed
    and projected side by side, the state first. The head's output, after a norm of its own, goes to the target's output
    matrix and, as feature, to the child.
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        hidden = config.decoder.hidden_size
        self.token_norm = self.norm("token_layernorm", hidden)
        self.hidden_norm = self.norm("hidden_layernorm", hidden)
        self.final_norm = self.norm("final_layernorm", hidden)
        self.input = self.linear("input_proj", 2 * hidden)
        self.layers.append(DecoderLayer(config.decoder, 0, dtype, device))

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        tokens = self.token_norm(self.embed(batch.token_ids))
        # The first pair of a sequence has no token, as in the engines that serve this head.
        tokens = tokens.masked_fill((batch.positions == 0).unsqueeze(1), 0.0)
        stream = self.input(torch.cat((self.hidden_norm(required(features)), tokens), 1))
        stream, _ = self.stack(stream, batch, kv, attention)
        rows = self.final_norm(stream)
        return rows, rows


NOWHERE = -(1 << 30)
"""A position that stands for no root: everything lies behind its block."""


class BlockHead(DraftHead):
    """DFLASH (arXiv 2602.06036), and DSPARK, which adds how a token changes the chances of the next one.

    A block of places follows the committed text; the first place holds the root's token, the others a mask.

    context   keys and values are products of only the target's normed features, so that they need no forward
    block     attends to the context and, in both directions, to itself; one forward for all its places, and one product
              for their logits
    node      takes its place's logits and, with DSPARK, adds markov_w2's product with `markov_rank` values that follow
              from the node's own token

    So a node below the root costs no forward and no product with the output matrix. No guesses are made behind the
    block.
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        if config.block is None:
            raise ConfigError("a block head needs the fields of a block")
        self.block: BlockConfig = config.block
        decoder, hidden = config.decoder, config.decoder.hidden_size
        self._hidden = hidden
        self._reducer = self.linear("fc", len(config.feature_layers) * config.target_hidden_size, config.fc_bias)
        self.feature_norm = self.norm("hidden_norm", hidden)
        self.final_norm = self.norm("norm", hidden)
        self.layers += [DecoderLayer(decoder, number, dtype, device) for number in range(decoder.num_layers)]
        self._injection = Linear(
            hidden, 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim, decoder.qkv_bias, dtype, device
        )
        rank = self.block.markov_rank
        self._markov = MarkovHead(self.block, decoder, self.vocab_size, dtype, device) if rank else None
        self.state_size = rank if self.block.markov_kind == "rnn" else 0
        self.num_scratch = self.block.size
        self.block_bytes = config.block_bytes(dtype.itemsize)
        self._key_norm: Tensor | None = None
        self._key_eps = 0.0

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See DraftHead."""
        found = super().checkpoint_tensors()
        if self._markov is not None:
            found |= self._markov.checkpoint_tensors()
        return found

    def finish_loading(self) -> None:
        """See DraftHead. The products for keys and values of all layers' contexts become one."""
        attentions = [layer.attention for layer in self.layers]
        self._injection.weight.copy_(torch.cat([one.qkv.weight[one.q_size :] for one in attentions]))
        biases = [one.qkv.bias[one.q_size :] for one in attentions if one.qkv.bias is not None]
        if self._injection.bias is not None:
            self._injection.bias.copy_(torch.cat(biases))
        self._injection.pack()
        super().finish_loading()
        norms = [one.qk_norm for one in attentions if one.qk_norm is not None]
        if norms:
            self._key_norm = torch.stack([norm.weight[-self.num_kv_heads :] for norm in norms])
            self._key_eps = norms[0].eps
        if self._markov is not None:
            self._markov.finish_loading()

    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        return self.feature_norm(super().project(features))

    def finish_product(self, product: Tensor) -> Tensor:
        """See DraftModel."""
        return self.feature_norm(super().finish_product(product))

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [layers, M, kv_heads, head_dim] of positions int [M], features [M, feature_size]."""
        shape = (self.num_layers, features.shape[0], self.num_kv_heads, self.head_dim)
        k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        self._write_keys(features, positions, torch.arange(shape[1], device=self.device), k, v)
        return k, v

    def _write_keys(self, features: Tensor, positions: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        heads = self._injection(features).view(-1, self.num_layers, 2 * self.num_kv_heads, self.head_dim)
        angles = rotary_angles(positions, self.rotary.half_frequencies, self.rotary.scale)
        write_keys(heads, *angles, slots, k, v, self._key_norm, self._key_eps)

    def extend(
        self, batch: TokenBatch, features: Tensor | None, slots: Tensor, kv: KVCache, attention: AttentionBackend
    ) -> None:
        """See DraftModel. Needs no forward; tokens with a negative slot are not written."""
        self._write_keys(required(features).contiguous(), batch.positions, slots, kv.k, kv.v)

    def block_tokens(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids and positions [R * size] of the blocks of R roots."""
        ids = tokens.new_full((tokens.shape[0], self.block.size), self.block.mask_token)
        ids[:, 0] = tokens
        places = positions[:, None] + torch.arange(self.block.size, device=positions.device, dtype=positions.dtype)
        return ids.flatten(), places.flatten()

    def forward_blocks(self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend) -> Tensor:
        """Run the blocks of R roots as `block_tokens` lays them out; return rows of guesses [R * num_guesses, hidden].

        In `batch`, the places of a block see its context and all of the block.
        """
        plan = attention.plan(batch, kv, self.num_heads, self.rotary)
        stream = self.embed(batch.token_ids)
        for layer in self.layers:
            stream = layer(stream, plan)
        size, count = self.block.size, self.block.num_guesses
        return self.final_norm(stream).view(-1, size, self._hidden)[:, size - count :].flatten(0, 1)

    def advance(self, tokens: Tensor, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Take the tokens [M] of nodes, the rows of their places [M, hidden] and the memory of their parents.

        `memory` [M, state_size] is zeros for a root.

        Returns rows for `logits` [M, hidden + markov_rank], and the nodes' memory for their children [M, state_size].
        """
        if self._markov is None:
            return rows, memory
        values, memory = self._markov(tokens, rows, memory)
        return torch.cat((rows, values), 1), memory

    def logits(self, rows: Tensor) -> Tensor:
        """See DraftModel. `rows` [M, hidden] are those of places; with DSPARK, values of tokens may follow in each."""
        logits = super().logits(rows[:, : self._hidden].contiguous())
        if self._markov is not None and rows.shape[1] > self._hidden:
            logits += self._markov.product(rows[:, self._hidden :].contiguous())
        return logits

    def new_blocks(self, count: int) -> BlockStore:
        """Return room for the blocks of `count` requests, with no block in it."""
        num_places = count * self.block.num_guesses
        return BlockStore(
            torch.full((count,), NOWHERE, dtype=torch.int32, device=self.device),
            torch.zeros(num_places, self._hidden, dtype=self.dtype, device=self.device),
            torch.zeros(num_places, self.vocab_size, device=self.device),
        )

    def keep_blocks(self, blocks: BlockStore, where: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Keep what `forward_blocks` returned for the requests `where`, int [R], of roots at `positions`, int [R]."""
        keep_blocks(blocks, where, positions, rows, self.logits(rows))

    def read_blocks(
        self, blocks: BlockStore, where: Tensor, tokens: Tensor, positions: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits for the children of M nodes.

        Args:
            where: int [M], the requests of the nodes, negative for padding; `tokens` and `positions`, int [M], are the
                nodes' own.
            memory: [M, state_size], what the nodes' parents left; ignored for roots.

        Returns logits float32 [M, vocab_size], -inf outside the block, where there are no guesses, and what the nodes
        leave to their children [M, state_size].
        """
        if self._markov is None:
            return read_logits(blocks, where, positions), memory
        values, memory = self._markov.read(blocks, where, tokens, positions, memory)
        return read_logits(blocks, where, positions, self._markov.product(values)), memory

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """Not for this kind: see `extend`, `forward_blocks` and `advance`."""
        raise NotImplementedError("a block head has no forward of single tokens")


class MarkovHead:
    """DSPARK's sequential part: `markov_rank` values that say what the token before a place adds to the place's logits.

    vanilla   the token's embedding
    gated     the embedding times a gate computed from the place's row and the embedding
    rnn       a recurrent cell over its memory, the embedding and the row; the memory is zeros at a block's root
    """

    def __init__(
        self, block: BlockConfig, decoder: ModelConfig, num_guessed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`decoder` is the head's; `num_guessed` is the number of ids that the head guesses."""
        self._rank = rank = block.markov_rank
        self._kind, hidden = block.markov_kind, decoder.hidden_size
        self._embedding = torch.empty(decoder.vocab_size, rank, dtype=dtype, device=device)
        self._output = Linear(rank, num_guessed, False, dtype, device)
        self._gate: Linear | None = None
        if self._kind == "gated":
            self._gate = Linear(hidden + rank, rank, True, dtype, device)
        elif self._kind == "rnn":
            self._gate = Linear(hidden + 2 * rank, 3 * rank, True, dtype, device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to fill by their names in the checkpoint."""
        found = {MARKOV_INPUT: self._embedding, MARKOV_OUTPUT: self._output.weight}
        if self._gate is not None:
            found |= self._gate.tensors(f"markov_head.{'gate_proj' if self._kind == 'gated' else 'joint_proj'}")
        return found

    def finish_loading(self) -> None:
        """See DraftHead."""
        self._output.pack()
        if self._gate is not None:
            if self._kind == "gated":
                # Checkpoints have the row's columns before the embedding's.
                self._gate.weight.copy_(self._gate.weight.roll(self._rank, 1))
            self._gate.pack()

    def product(self, values: Tensor) -> Tensor:
        """Return what is added to places' logits, float32 [M, num_guessed], for `values` [M, rank]."""
        return self._output.to_float32(values)

    def __call__(self, tokens: Tensor, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [M, rank] for tokens [M], rows [M, hidden] and memory [M, rank or 0], and the new memory."""
        embedded = functional.embedding(tokens, self._embedding)
        if self._gate is None:
            return embedded, memory
        return self._values(self._gate, torch.cat((memory, embedded, rows), 1), memory)

    def read(
        self, blocks: BlockStore, where: Tensor, tokens: Tensor, positions: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do the same for nodes of blocks; see BlockHead.read_blocks."""
        if self._gate is None:
            return functional.embedding(tokens, self._embedding), memory
        inputs = read_inputs(blocks, where, positions, memory, tokens, self._embedding)
        return self._values(self._gate, inputs, memory)

    def _values(self, gate: Linear, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and memory for memory, embeddings and rows, side by side [M, (rank or 0) + rank + hidden]."""
        joint = gate(inputs)
        if self._kind == "gated":
            return joint.sigmoid() * inputs[:, : self._rank], memory
        return recur(joint, inputs[:, : self._rank])


class StandaloneDraft(DraftModel):
    """Any causal language model; `target_ids` int32 are those of its output matrix's rows, None for all."""

    def __init__(self, model: LanguageModel, token_ids_hash: str, target_ids: Tensor | None = None) -> None:
        super().__init__(model.config, model.config.vocab_size, target_ids, model.dtype, model.device)
        self.model = model
        self.token_ids_hash = token_ids_hash

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        return self.model.forward(batch, kv, attention), None

    def logits(self, rows: Tensor) -> Tensor:
        """See DraftModel."""
        return self.model.logits(rows)
