"""Loads what a verify engine runs, if it fits: the target, or a rank's part of it, and its rounds' draft model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from outrider.attention.flashinfer_backend import check_installed
from outrider.config.draft import NAIVE_EAGLE, DraftOptions
from outrider.config.verify import LEAST_SIZED_TOKENS, VerifyOptions
from outrider.device import check_fp8, choose_device, choose_dtype, gib, out_of_memory
from outrider.errors import ConfigError, under
from outrider.host.rank_memory import RankMemory
from outrider.layers.exchange import Exchange, HostExchange, PeerExchange, device_exchange
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig, check_heads
from outrider.models.cuts import check_target, cut
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.kinds import (
    can_do_without_model,
    check_drafter,
    drafters_of_service,
    named_head,
    without_model,
)
from outrider.models.drafters.loader import is_cut, load_draft_model
from outrider.models.elements import model_elements
from outrider.models.loader import describe_model, load_model
from outrider.models.progress import ConsoleProgress
from outrider.models.store import resolve_model
from outrider.models.store_folder import count_tokens
from outrider.models.transformers_survey import TransformersConfig
from verify_service.executors.round_drafts import DraftingOptions

log = get_logger(__name__)


@dataclass(frozen=True)
class RoundDraft:
    """A draft model that drafts inside rounds, and its options."""

    model: DraftModel
    options: DraftingOptions
    is_chain: bool
    """Whether a round takes one draft token of each request."""

    @property
    def token_bytes(self) -> int:
        """Bytes that drafting takes beside each token of the target's KV cache: the draft's KV, and features."""
        model = self.model
        width = model.feature_size if model.projection() is not None else len(model.feature_layers) * model.hidden_size
        return model.kv_bytes + width * model.dtype.itemsize


def load(options: VerifyOptions, memory: RankMemory | None = None) -> tuple[Path, LanguageModel]:
    """Find and load the target, or a rank's part of it. `memory`: memory that the ranks share.

    Raises ConfigError for a target that cannot run, if possible before weights are read.
    """
    # Check the machine first: the model may have to be fetched.
    device = choose_device(options.device)
    if memory is not None:
        device = _rank_device(device, memory)
    _check_machine(options, device)
    with under("--model"):
        path = resolve_model(options.model, impl=options.model_impl)
    check_target(path, options)
    config = describe_model(path, options.model_impl)
    part: ModelConfig | None = None
    if memory is not None:
        config = part = cut(config, memory.world)
    options.check_lengths(config.max_positions)
    with under("--model"):
        count_tokens(path)
    if _needs_draft(options) and (draft_options := named_draft(options, path)) is not None:
        check_drafter(draft_options, path)
    dtype = choose_dtype(options.dtype, device, config.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_model(config, dtype, device, options.mem_fraction_static)
    with ConsoleProgress() as progress, out_of_memory("the weights", "choose a smaller model"):
        stage = f"loading weights into memory, dtype {str(dtype).removeprefix('torch.')}"
        report = partial(progress, stage) if memory is None or not memory.rank else None
        exchange = None
        if memory is not None and part is not None:
            exchange = _exchange(options, part, dtype, device, memory)
        where = (path, dtype, device, report, options.model_impl, options.context_length)
        model = load_model(*where, exchange, own_products=options.deterministic)
    if options.kv_cache_dtype == "fp8_e4m3":
        model.kv_dtype = torch.float8_e4m3fn
    return path, model


def _check_machine(options: VerifyOptions, device: torch.device) -> None:
    """Raise ConfigError for options that do not fit `device`, which was chosen if they leave it open."""
    options = replace(options, device=str(device))
    options.check()
    if options.wants_flashinfer:
        check_installed()
    if options.kv_cache_dtype == "fp8_e4m3":
        check_fp8(device, "--kv-cache-dtype: fp8_e4m3")


def _rank_device(first: torch.device, memory: RankMemory) -> torch.device:
    """Return the device of a rank: `first`, that of rank 0, or one of the GPUs after it."""
    if first.type != "cuda":
        return first
    index, count = first.index or 0, torch.cuda.device_count()
    if index + memory.world > count:
        raise ConfigError(
            f"--tensor-parallel-size: {memory.world} ranks from cuda:{index} on need {index + memory.world} GPUs, and "
            f"torch sees {count}"
        )
    return torch.device("cuda", index + memory.rank)


def _exchange(
    options: VerifyOptions, part: ModelConfig, dtype: torch.dtype, device: torch.device, memory: RankMemory
) -> Exchange:
    if device.type != "cuda":
        return HostExchange(memory)
    columns = part.vocab_size // part.vocab_cuts
    return device_exchange(
        options.rank_exchange, memory, part.hidden_size, columns, dtype, device, options.rank_seconds
    )


def load_draft(options: VerifyOptions, path: Path, target: LanguageModel) -> RoundDraft | None:
    """Load the draft model, or a rank's part of it, that drafts inside rounds on a GPU; None if the options name none.

    Also None for a model that cannot draft, if n-grams may draft without it. If the model is not cut, rank 0 loads all
    of it and the other ranks nothing. Raises ConfigError.
    """
    draft_options = named_draft(options, path)
    if draft_options is None or target.device.type != "cuda":
        return None
    try:
        return _load_named(options, draft_options, path, target)
    except ConfigError as error:
        if _needs_draft(options):
            raise
        without_model(options.draft_model(str(path)), error)
        return None


def _needs_draft(options: VerifyOptions) -> bool:
    """Whether a draft model that cannot draft ends the service, as with ranks: none could tell if others went on."""
    return options.tensor_parallel_size > 1 or not can_do_without_model(options)


def _load_named(
    options: VerifyOptions, draft_options: DraftOptions, path: Path, target: LanguageModel
) -> RoundDraft | None:
    # AUTO may have chosen the algorithm.
    options.check_inside(draft_options.speculative_algorithm[0])
    is_chain = draft_options.speculative_algorithm == (NAIVE_EAGLE,)
    draft_options = named_head(draft_options)
    exchange = target.exchange if isinstance(target, CausalLM) else None
    rank = 0 if exchange is None else exchange.rank
    # Not cut over NCCL, which is for GPUs without peer access: the time of a sum there has not been measured.
    if not isinstance(exchange, PeerExchange) or not is_cut(draft_options, exchange.world, target.dtype):
        exchange = None
        if rank:
            return None
    elif not rank:
        log.info("each of %d ranks has its part of the draft model", exchange.world)
    check_drafter(draft_options, path)
    with ConsoleProgress() as progress, out_of_memory("the draft model's weights", "choose a smaller one"):
        report = None if rank else partial(progress, "loading draft weights")
        model = load_draft_model(draft_options, target.device, target.dtype, report, exchange)
    _check_vocabulary(model, target, path)
    steps, topk = options.speculative_num_steps, options.speculative_eagle_topk
    drafting = DraftingOptions(name=draft_options.speculative_algorithm[0].lower())
    if steps:
        drafting = replace(drafting, max_steps=steps)
    if topk:
        drafting = replace(drafting, branching=topk, lone_branching=topk)
    if is_chain:
        drafting = replace(drafting, max_steps=1, branching=1, lone_branching=1)
    return RoundDraft(model, drafting, is_chain)


def named_draft(options: VerifyOptions, path: Path) -> DraftOptions | None:
    """Return the options of the draft model inside rounds; None without one. N-grams are left to draft services."""
    if not options.speculative_algorithm or options.no_speculation:
        return None
    draft_options = drafters_of_service(options.draft_model(str(path)), options.model)
    names = tuple(name for name in draft_options.speculative_algorithm if name != "NGRAM")
    return replace(draft_options, speculative_algorithm=names) if names else None


def _check_vocabulary(model: DraftModel, target: LanguageModel, path: Path) -> None:
    """Raise ConfigError if rounds would look up tokens past the end of the draft model's embedding."""
    num_tokens = min(count_tokens(path), target.config.vocab_size)
    if model.target_vocab_size < num_tokens:
        raise ConfigError(
            f"--speculative-draft-model-path: knows {model.target_vocab_size} tokens, and the target has {num_tokens}; "
            "use one with all of them, or a draft service, --draft-placement remote, which leaves such texts out"
        )


def check_model(
    config: ModelConfig | TransformersConfig, dtype: torch.dtype, device: torch.device, mem_fraction: float
) -> None:
    """Raise ConfigError for a model that cannot run on this GPU, before its weights are read."""
    check_heads(config)
    free, total = torch.cuda.mem_get_info(device)
    budget = min(int(total * mem_fraction), free)
    count = model_elements(config).total if isinstance(config, ModelConfig) else config.num_parameters
    needed = count * dtype.itemsize - config.bytes_saved(dtype.itemsize)
    if needed > budget:
        raise ConfigError(
            f"the weights take {gib(needed)} in {str(dtype).removeprefix('torch.')}, but --mem-fraction-static "
            f"{mem_fraction} of {gib(total)}, of which {gib(free)} are free, allows {gib(budget)}; choose a smaller "
            "model or another GPU, or end what else runs on this one"
        )


def kv_tokens(model: LanguageModel, mem_fraction: float, reserve: int, beside: int = 0) -> int:
    """Return how many tokens' KV fits beside the loaded weights. Raises ConfigError for too few.

    `reserve`: bytes to keep for graphs and activations. `beside`: bytes that a token takes beside its KV.
    """
    per_token = model.kv_bytes + beside
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    room = free - int(total * (1 - mem_fraction)) - reserve
    if room < LEAST_SIZED_TOKENS * per_token:
        raise ConfigError(
            f"--mem-fraction-static: {mem_fraction} of {gib(total)} leaves {max(room, 0) / 2**30:.2f} GiB for KV, too "
            f"little for {LEAST_SIZED_TOKENS} tokens of {per_token / 1024:.0f} KiB; raise it (at most 0.98) or choose "
            "a smaller model"
        )
    return room // per_token
