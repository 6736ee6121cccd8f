"""Builds a draft model and its runner from options."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.config.draft import DraftOptions
from outrider.device import choose_device, gib, out_of_memory
from outrider.drafting.base import Needs
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.drafting.model.drafter import BRANCHING, LONE_BRANCHING, MAX_BURST_STEPS, ModelDrafter
from outrider.drafting.model.runner import BurstRunner, RunnerOptions
from outrider.drafting.model.torch_runner import TorchRunner
from outrider.errors import ConfigError
from outrider.graphs import compile_aside
from outrider.logs import get_logger
from outrider.models.capacity import DRAFT_REGION, DRAFT_ROWS, DRAFT_WORK_BYTES, cpu_tokens, memory_room
from outrider.models.drafters.base import DraftModel, offered_projection
from outrider.models.drafters.kinds import model_algorithm
from outrider.models.drafters.loader import load_draft_model
from outrider.models.progress import ConsoleProgress

_logger = get_logger(__name__)

PAGE_SIZE = 16
GPU_CHUNK = 2048
CPU_CHUNK = 256
_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
"""Head dimensions that our attention kernels support."""
_MIN_WIDE_ROWS = 32
_MIN_TOKENS = 512
_CPU_REGION, _CPU_LOCKSTEP_REGION = 64, 128
"""Tree slots of a request; in lockstep enough for eight steps of eight nodes, as a tree may run two thirds of them."""
_MEMORY_FIX = "lower --max-total-tokens, --mem-fraction-static or --max-requests"


def load_model_drafter(options: DraftOptions) -> ModelDrafter:
    """Load the model that the options name and build its runner. Raises ConfigError naming the option at fault."""
    # Refuse what the device does not support before weights are read.
    options = replace(options, device=str(choose_device(options.device)))
    options.check()
    # Before loading the model, which compiles functions for this number of threads.
    torch.set_num_threads(options.threads)
    model = load_draft_model(options)
    runner = build_runner(model, options)
    needs = Needs(
        vocab_size=model.target_vocab_size,
        token_ids_hash=model.token_ids_hash,
        hidden_size=model.hidden_size,
        feature_layers=tuple(model.feature_layers),
        max_positions=min(model.max_positions, runner.shape.max_context + runner.shape.lag),
        projection=offered_projection(model),
    )
    _logger.info(
        "the draft model guesses for sequences of up to %d tokens, of ids below %d",
        needs.max_positions,
        needs.vocab_size,
    )
    return ModelDrafter(runner, (model_algorithm(options.speculative_algorithm).lower(),), needs)


def build_runner(model: DraftModel, options: DraftOptions) -> BurstRunner:
    """Return the runner for the model's device, warmed up, which takes seconds to minutes on a GPU.

    Raises ConfigError naming the option at fault.
    """
    on_gpu = model.device.type == "cuda"
    if on_gpu and model.head_dim not in _HEAD_DIMS:
        raise ConfigError(
            f"--speculative-draft-model-path: head_dim {model.head_dim} does not run on a GPU; supported are "
            f"{_HEAD_DIMS}; choose --device cpu"
        )
    shape = _shape(options, model, on_gpu)
    chunk = GPU_CHUNK if on_gpu else CPU_CHUNK
    use_graphs = not options.disable_cuda_graph
    runner_options = RunnerOptions(chunk_size=chunk, rank_by_noise=options.rank_by_noise, use_graphs=use_graphs)
    if not on_gpu:
        shape = _with_pages(options, shape, cpu_tokens(model.kv_bytes))
        return TorchRunner(model, shape, TorchAttention(), runner_options)
    with torch.cuda.device(model.device):
        shape = _with_pages(options, shape, _gpu_tokens(options, model, shape))
        with out_of_memory("the draft model's KV cache and steps", _MEMORY_FIX):
            runner = CudaRunner(model, shape, TritonAttention(), runner_options)
            with ConsoleProgress() as progress, compile_aside():
                runner.capture(lambda done, total: progress("capturing draft steps", done, total))
    _logger.info(
        "draft KV of %d context tokens and %d rows of %d tree slots, %s in all",
        shape.num_pages * shape.page_size,
        shape.num_rows,
        shape.region,
        gib(runner.num_bytes),
    )
    return runner


def _shape(options: DraftOptions, model: DraftModel, on_gpu: bool) -> BurstShape:
    """Return the runner's shape, except for the number of context pages."""
    num_rows = min(options.max_requests, DRAFT_ROWS if on_gpu else 32)
    wide = 128 if num_rows > _MIN_WIDE_ROWS else 64
    return BurstShape(
        num_rows=num_rows,
        region=DRAFT_REGION if on_gpu else _CPU_LOCKSTEP_REGION if options.lockstep else _CPU_REGION,
        branching=options.speculative_eagle_topk or (BRANCHING if on_gpu else 4),
        lone_branching=0 if options.speculative_eagle_topk or not on_gpu else LONE_BRANCHING,
        max_seeds=512 if on_gpu else 128,
        max_steps=MAX_BURST_STEPS if on_gpu else 8,
        max_width=wide if on_gpu else 8,
        page_size=PAGE_SIZE,
        num_pages=1,
        max_context=max(min(options.max_positions, model.max_positions), 1),
        feature_size=model.feature_size,
        window=model.window,
        has_blocks=model.block_bytes > 0,
    )


def _with_pages(options: DraftOptions, shape: BurstShape, fitting: int) -> BurstShape:
    """Return `shape` with pages for as many tokens as the options ask for, or else fit, and all rows can use.

    A context that the pages could never hold is not served: it would be computed up to there, again and again.
    """
    tokens = options.max_total_tokens or fitting
    if tokens < min(_MIN_TOKENS, shape.max_context):
        raise ConfigError(f"--max-total-tokens: {tokens} tokens are too few; allow at least {_MIN_TOKENS}")
    size = shape.page_size
    num_pages = min(-(-tokens // size), -(-shape.max_context // size) * shape.num_rows)
    # If long contexts are cut, the pages hold only a part of them.
    longest = shape.max_context if shape.window.size else min(shape.max_context, num_pages * size)
    return replace(shape, num_pages=num_pages, max_context=longest)


def _gpu_tokens(options: DraftOptions, model: DraftModel, shape: BurstShape) -> int:
    """Return the context tokens that fit in what --mem-fraction-static leaves beside weights, tree regions, features,
    blocks and logits."""
    per_token = model.kv_bytes
    slots = shape.num_rows * shape.region
    beside = slots * (per_token + max(model.feature_size, model.state_size) * model.dtype.itemsize)
    beside += (shape.num_rows + 1) * model.block_bytes
    beside += 3 * shape.max_width * model.vocab_size * 4 + DRAFT_WORK_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    own = torch.cuda.memory_reserved(model.device)
    room = memory_room(free, total, own, options.mem_fraction_static) - beside
    if room < _MIN_TOKENS * per_token and not options.max_total_tokens:
        raise ConfigError(
            f"--mem-fraction-static: {options.mem_fraction_static} of {gib(total)} leaves {max(room, 0) / 2**30:.2f} "
            f"GiB for context KV beside {gib(beside)} for tree slots and steps of {shape.num_rows} requests, too "
            f"little for {_MIN_TOKENS} tokens of {per_token / 1024:.0f} KiB; raise it (at most 0.98), lower "
            f"--max-requests, choose a smaller draft model or free some of the {gib(total - free - own)} of others"
        )
    return max(room // per_token, 0)
