"""The parts of a round, each timed alone on its own data: products, attention, sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine.rounds import tree_parents
from benchmarks.engine.timing import median_ms
from kernels.attention import tree_attention
from kernels.linear import stream_linear
from kernels.linear_configs import MAX_ROWS
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.attention.paged import MAX_PATH, RoundTokens, TreeBuffers, choose_splits
from outrider.cache.kv import KVCache
from outrider.device import num_processors
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.sampling.device import DeviceSampler
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import EXACT
from verify_service.executors.round_buffers import NUM_COMMITTED, Bucket

# Number of layers with their own weights: several times the L2 cache.
DISTINCT_LAYERS = 4

Product = Callable[[Tensor, Tensor, Tensor], object]


def cublas(rows: Tensor, weight: Tensor, out: Tensor) -> object:
    """Compute rows @ weight^T with the library."""
    return torch.mm(rows, weight.t(), out=out)


def streamed(rows: Tensor, weight: Tensor, out: Tensor) -> object:
    """Compute rows @ weight^T with our kernel."""
    return stream_linear(rows, weight, out=out)


def streamed_gated(rows: Tensor, weight: Tensor, out: Tensor) -> object:
    """Compute gate_up with our kernel, as the model does: the output has half as many numbers."""
    return stream_linear(rows, weight, gated=True)


class BareProducts:
    """Only the products of a model's forward, in its order, on random weights that no cache holds.

    All layers share the weights of a few; q, k and v are one matrix, and so are gate and up.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._sizes = {
            "qkv": (heads, config.hidden_size),
            "output": (config.hidden_size, config.num_heads * config.head_dim),
            "gate_up": (2 * config.intermediate_size, config.hidden_size),
            "down": (config.hidden_size, config.intermediate_size),
            "head": (config.vocab_size, config.hidden_size),
        }
        self._device, self._dtype = device, dtype
        self._num_layers = config.num_layers
        self._weights = {
            name: [self._random(*size) for _ in range(1 if name == "head" else DISTINCT_LAYERS)]
            for name, size in self._sizes.items()
        }
        self.num_bytes = sum(
            (1 if name == "head" else config.num_layers) * rows * columns * dtype.itemsize
            for name, (rows, columns) in self._sizes.items()
        )

    def warm(self, num_rows: int) -> None:
        """Run our kernel once on each matrix, to compile it."""
        rows, outs = self._buffers(num_rows)
        for name, weights in self._weights.items():
            (streamed_gated if name == "gate_up" else streamed)(rows[name], weights[0], outs[name])

    def measure(self, num_rows: int) -> dict[str, float]:
        """Return the milliseconds of all products for `num_rows` rows: by cuBLAS, ours, and the faster one for each."""
        makers: dict[str, dict[str, Product]] = {"cublas": dict.fromkeys(self._sizes, cublas)}
        if num_rows <= MAX_ROWS:
            makers["ours"] = {name: streamed_gated if name == "gate_up" else streamed for name in self._sizes}
        found = {maker: self._all_ms(num_rows, products) for maker, products in makers.items()}
        if len(makers) > 1:
            best = {
                name: min(
                    (products[name] for products in makers.values()), key=lambda p: self._one_ms(num_rows, name, p)
                )
                for name in self._sizes
            }
            found["mixed"] = self._all_ms(num_rows, best)
        return found

    def _all_ms(self, num_rows: int, products: dict[str, Product]) -> float:
        rows, outs = self._buffers(num_rows)

        def work() -> None:
            for layer in range(self._num_layers):
                for name in ("qkv", "output", "gate_up", "down"):
                    products[name](rows[name], self._weights[name][layer % DISTINCT_LAYERS], outs[name])
            products["head"](rows["head"], self._weights["head"][0], outs["head"])

        return median_ms(work, self._device)

    def _one_ms(self, num_rows: int, name: str, product: Product) -> float:
        rows, outs = self._buffers(num_rows)

        def work() -> None:
            for layer in range(self._num_layers):
                weights = self._weights[name]
                product(rows[name], weights[layer % len(weights)], outs[name])

        return median_ms(work, self._device, repeats=7)

    def _buffers(self, num_rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rows = {name: self._random(num_rows, size[1]) for name, size in self._sizes.items()}
        return rows, {name: self._random(num_rows, size[0]) for name, size in self._sizes.items()}

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self._dtype, device=self._device).normal_(0.0, 0.02)


class _NoAttention(AttentionBackend):
    """Returns the queries, so that a forward with it runs everything but attention."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        return _QueriesPlan(num_heads)


class _QueriesPlan(AttentionPlan):
    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        return heads[:, : self._num_heads].reshape(heads.shape[0], -1).contiguous()


def linear_forward(model: CausalLM, num_tokens: int) -> Callable[[], object]:
    """Return the model's forward with logits, without attention and rotation: products, norms and activations."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=model.device)
    batch, kv, attention = TokenBatch(tokens, tokens), model.new_kv(1), _NoAttention()
    return lambda: model.logits(model.forward(batch, kv, attention))


@dataclass(frozen=True)
class EvenRound:
    """Rows of equal size: `num_tokens` in all, each row a root and the nodes of a tree below it."""

    num_rows: int
    num_tokens: int
    context: int

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return self.num_tokens // self.num_rows

    @property
    def max_row_tokens(self) -> int:
        """Tokens of a row that the graph of such a round must allow for."""
        return Bucket(self.num_tokens, self.num_rows).max_row_tokens


class RoundParts:
    """Attention and sampling on their own KV cache, pages and trees."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, num_slots: int, page_size: int) -> None:
        self._model, self._attention = model, attention
        self._device, self._config = model.device, model.config
        self._kv = model.new_kv(-(-num_slots // page_size) * page_size)
        for cache in (*self._kv.k_layers, *self._kv.v_layers):
            cache.normal_()
        self._page_size = page_size

    def attention_us(self, shape: EvenRound) -> float:
        """Return the microseconds a layer of tree attention alone."""
        tokens, tables = self._tokens(shape)
        buffers = TreeBuffers(shape.num_tokens, MAX_PATH, self._device)
        splits = self._splits(shape)
        batch = buffers.batch(tokens, tables, self._page_size, shape.max_row_tokens, splits, by_path=False)
        q = self._heads(shape)[:, : self._config.num_heads].contiguous()
        where = (batch.page_tables, batch.table_rows, batch.first, batch.cached_len)
        scale, mask = self._config.head_dim**-0.5, batch.mask
        if mask is None:
            raise ValueError("a round's batch has a mask")

        def work() -> None:
            for k, v in zip(self._kv.k_layers, self._kv.v_layers, strict=True):
                tree_attention(
                    q,
                    k,
                    v,
                    *where,
                    mask,
                    page_size=self._page_size,
                    max_row_tokens=batch.max_row_tokens,
                    num_splits=batch.num_splits,
                    scale=scale,
                )

        return median_ms(work, self._device) * 1e3 / self._config.num_layers

    def attend_ms(self, shape: EvenRound) -> float:
        """Return the milliseconds of work around attention in all layers: expand trees, rotate q and k, write KV."""
        tokens, tables = self._tokens(shape)
        buffers = TreeBuffers(shape.num_tokens, MAX_PATH, self._device)
        heads, config = self._heads(shape), self._config
        rotary = Rotary(config.rope, config.head_dim, self._device)
        splits = self._splits(shape)

        def work() -> None:
            batch = buffers.batch(tokens, tables, self._page_size, shape.max_row_tokens, splits, by_path=False)
            plan = self._attention.plan(batch, self._kv, config.num_heads, rotary)
            for layer in range(config.num_layers):
                plan.attend(layer, heads, None)

        return median_ms(work, self._device)

    def sampling_us(self, shape: EvenRound, params: SamplingParams) -> float:
        """Return the microseconds of sampling, walk and compaction for logits that a forward has just written."""
        tokens, tables = self._tokens(shape)
        vocab, rows = self._config.vocab_size, shape.num_rows
        sampler = DeviceSampler(rows, shape.num_tokens, NUM_COMMITTED, vocab, self._device, EXACT)
        for row in range(rows):
            sampler.admit(row, params, [1, 2, 3], 2)
        logits = torch.randn(shape.num_tokens, vocab, device=self._device) * 3
        wide = (NUM_COMMITTED,)
        outs = [torch.zeros(rows, *size, dtype=torch.int32, device=self._device) for size in ((), (), wide, wide)]
        num_tokens, error, committed, accepted = outs

        def work() -> None:
            sampler.commit(logits, tokens, shape.max_row_tokens, num_tokens, error, committed, accepted)
            self._kv.compact(tokens, accepted, num_tokens, tables, self._page_size)

        return median_ms(work, self._device) * 1e3

    def _heads(self, shape: EvenRound) -> Tensor:
        config = self._config
        size = (shape.num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        return torch.randn(size, device=self._device).to(self._model.dtype)

    def _splits(self, shape: EvenRound) -> int:
        heads = (self._config.num_heads, self._config.num_kv_heads)
        return choose_splits(
            shape.num_tokens, shape.num_rows, shape.max_row_tokens, *heads, num_processors(self._device)
        )

    def _tokens(self, shape: EvenRound) -> tuple[RoundTokens, Tensor]:
        """Return a round of that shape, and page tables that place its rows one after the other."""
        count, rows = shape.row_tokens, range(shape.num_rows)
        tree = tree_parents(count - 1)
        depths = [0]
        for parent in tree:
            depths.append(depths[parent + 1] + 1)
        parents = [-1, *(parent + 1 for parent in tree)]
        cached = shape.context - 1
        pages = -(-(cached + count) // self._page_size)
        vocab = self._config.vocab_size

        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        tokens = RoundTokens(
            token_ids=put([(7919 * index) % vocab for index in range(shape.num_tokens)]),
            positions=put([cached + depth for _ in rows for depth in depths]),
            parents=put([parent if parent < 0 else row * count + parent for row in rows for parent in parents]),
            rows=put([row for row in rows for _ in range(count)]),
            first=put([row * count for row in range(shape.num_rows + 1)]),
            cached_len=put([cached] * shape.num_rows),
            root=put([row * count for row in rows]),
            table_rows=put(list(rows)),
        )
        return tokens, put(list(range(shape.num_rows * pages))).view(shape.num_rows, pages)
