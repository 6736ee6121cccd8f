"""Heads that guess a block of tokens in one forward: DFLASH (arXiv 2602.06036), and DSPARK, which adds what a token
does to the next one's chances."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.linear import Linear
from outrider.layers.rotary import rotate
from outrider.models.decoder import DecoderLayer
from outrider.models.drafters.base import DraftHead, required
from outrider.models.drafters.config import MARKOV_INPUT, MARKOV_OUTPUT, OUTPUT, BlockConfig, HeadConfig

MARKOV_GATES = {"gated": "gate_proj", "rnn": "joint_proj"}
"""The layer beside the two matrices, by `BlockConfig.markov_kind`."""


class BlockHead(DraftHead):
    """A block of places behind the committed text, the first of which holds the root's token and the others a mask.

    context   keys and values are products of the target's normed features alone, so that no forward is needed for them
    block     attends to the context and, in both directions, to itself; one forward for all its places
    state     what a node leaves to its children: the block's rows for the places behind it, one behind the other
    to logits the first of these rows and, with DSPARK, `markov_rank` values that follow from the node's own token;
              the output matrix is lm_head and markov_w2 side by side, and so adds what both say

    So a node below the root costs a row of logits and no forward. Behind its block a path's rows are zeros, of which
    no guesses are made.
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
        self.fc = self.linear("fc", len(config.feature_layers) * config.target_hidden_size, config.fc_bias)
        self.feature_norm = self.norm("hidden_norm", hidden)
        self.final_norm = self.norm("norm", hidden)
        self.layers += [DecoderLayer(decoder, number, dtype, device) for number in range(decoder.num_layers)]
        self._injection = Linear(
            hidden, 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim, decoder.qkv_bias, dtype, device
        )
        rank = self.block.markov_rank
        self._markov: MarkovHead | None = None
        if rank:
            self._markov = MarkovHead(self.block, hidden, decoder.vocab_size, dtype, device)
            del self._linears[OUTPUT.removesuffix(".weight")]
            self.output = Linear(hidden + rank, self.vocab_size, False, dtype, device)
        self._memory_size = rank if self.block.markov_kind == "rnn" else 0
        self.state_size = self.block.num_guesses * hidden + self._memory_size
        self.num_scratch = self.block.size
        self._projection: Tensor | None = None

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See DraftHead."""
        found = super().checkpoint_tensors()
        if self._markov is not None:
            output, more = self.output.weight.split((self._hidden, self.block.markov_rank), 1)
            found |= {OUTPUT: output, MARKOV_OUTPUT: more, **self._markov.checkpoint_tensors()}
        return found

    def finish_loading(self) -> None:
        """See DraftHead. Keys and values of all layers' contexts become one product."""
        attentions = [layer.attention for layer in self.layers]
        self._injection.weight.copy_(torch.cat([one.qkv.weight[one.q_size :] for one in attentions]))
        biases = [one.qkv.bias[one.q_size :] for one in attentions if one.qkv.bias is not None]
        if self._injection.bias is not None:
            self._injection.bias.copy_(torch.cat(biases))
        self._injection.pack()
        self._projection = self.fc.weight  # before packing, which on a CPU lays it out anew
        super().finish_loading()
        if self._markov is None:
            return
        self.output.pack()
        self._markov.finish_loading()

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        return self.feature_norm(self.fc(features.to(self.dtype)))

    def projection(self) -> Tensor | None:
        """See DraftModel."""
        return self._projection

    @torch.inference_mode()
    def finish_product(self, product: Tensor) -> Tensor:
        """See DraftModel."""
        product = product.to(self.dtype)
        return self.feature_norm(product if self.fc.bias is None else product + self.fc.bias)

    @torch.inference_mode()
    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, M, kv_heads, head_dim] of positions int [M] with features [M, feature_size]."""
        count = features.shape[0]
        heads = self._injection(features).view(count, self.num_layers, 2, self.num_kv_heads, self.head_dim)
        k, v = heads.unbind(2)
        norm = self.layers[0].attention.qk_norm
        if norm is not None:
            weights = [layer.attention.qk_norm.weight[-1] for layer in self.layers if layer.attention.qk_norm]
            k = functional.rms_norm(k, k.shape[-1:], None, norm.eps) * torch.stack(weights)[None, :, None]
        k = rotate(k.flatten(1, 2), *self.rotary.angles(positions, k.dtype)).view(v.shape)
        return k.transpose(0, 1), v.transpose(0, 1)

    def extend(
        self, batch: TokenBatch, features: Tensor | None, slots: Tensor, kv: KVCache, attention: AttentionBackend
    ) -> None:
        """See DraftModel. Takes no forward; what has a negative slot goes to the cache's last one."""
        k, v = self.context(required(features).contiguous(), batch.positions)
        slots = torch.where(slots < 0, kv.num_slots - 1, slots).long()
        kv.k.index_copy_(1, slots, k)
        kv.v.index_copy_(1, slots, v)

    def block_tokens(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and positions [R * size] of the blocks of R roots."""
        ids = tokens.new_full((tokens.shape[0], self.block.size), self.block.mask_token)
        ids[:, 0] = tokens
        places = positions[:, None] + torch.arange(self.block.size, device=positions.device, dtype=positions.dtype)
        return ids.flatten(), places.flatten()

    @torch.inference_mode()
    def forward_blocks(self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend) -> Tensor:
        """Run the blocks of R roots, as `block_tokens` lays them out: their states [R, state_size].

        In `batch` the places of a block see its context and all of the block.
        """
        plan = attention.plan(batch, kv, self.num_heads, self.rotary)
        stream = self.embed(batch.token_ids)
        for layer in self.layers:
            stream = layer(stream, plan)
        rows = self.final_norm(stream).view(-1, self.block.size, self._hidden)
        state = rows[:, self.block.size - self.block.num_guesses :].flatten(1)
        return functional.pad(state, (0, self._memory_size)) if self._memory_size else state

    @torch.inference_mode()
    def advance(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """From nodes' tokens [M] and what their parents left [M, state_size], which for a root is its block's state.

        Returns:
            rows for `logits` [M, hidden + markov_rank], and what the nodes leave to their children [M, state_size].
        """
        rows = states[:, : self._hidden].contiguous()
        left = states[:, self._hidden : self.block.num_guesses * self._hidden]
        memory = states[:, self.block.num_guesses * self._hidden :]
        if self._markov is not None:
            said, memory = self._markov(tokens, rows, memory)
            rows = torch.cat((rows, said), 1)
        return rows, torch.cat((left, torch.zeros_like(states[:, : self._hidden]), memory), 1)

    def is_over(self, rows: Tensor) -> Tensor:
        """bool [M]: whether rows that `advance` returned are of nodes behind their block, which have no guesses."""
        return ~rows[:, : self._hidden].any(1)

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """Not for this kind: see `extend`, `forward_blocks` and `advance`."""
        raise NotImplementedError("a block head has no forward of single tokens")


class MarkovHead:
    """DSPARK's sequential part: what the token before a place adds to the place's logits, in `markov_rank` values.

    vanilla   the token's embedding
    gated     the same times a gate, of the place's row and the embedding
    rnn       a recurrent cell, of its memory, the embedding and the row; the memory begins as zeros at a block's root
    """

    def __init__(
        self, block: BlockConfig, hidden: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rank = block.markov_rank
        self._kind = block.markov_kind
        self._embedding = torch.empty(vocab_size, rank, dtype=dtype, device=device)
        self._gate: Linear | None = None
        if self._kind == "gated":
            self._gate = Linear(hidden + rank, rank, True, dtype, device)
        elif self._kind == "rnn":
            self._gate = Linear(hidden + 2 * rank, 3 * rank, True, dtype, device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where tensors of the checkpoint belong."""
        found = {MARKOV_INPUT: self._embedding}
        if self._gate is not None:
            found |= self._gate.tensors(f"markov_head.{MARKOV_GATES[self._kind]}")
        return found

    def finish_loading(self) -> None:
        """See DraftHead."""
        if self._gate is not None:
            self._gate.pack()

    def __call__(self, tokens: Tensor, rows: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens [M], rows [M, hidden] and memory [M, rank or 0]: values [M, rank], and the memory after them."""
        embedded = functional.embedding(tokens, self._embedding)
        if self._gate is None:
            return embedded, memory
        if self._kind == "gated":
            return self._gate(torch.cat((rows, embedded), 1)).sigmoid() * embedded, memory
        keep, fresh, said = self._gate(torch.cat((memory, embedded, rows), 1)).chunk(3, 1)
        keep = keep.sigmoid()
        return said.tanh(), keep * memory + (1 - keep) * fresh.tanh()
