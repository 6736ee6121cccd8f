"""Builds an engine from options: model, KV memory, executor, cost model and limits; and its profile for the door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import torch

from outrider import __version__
from outrider.attention.base import AttentionBackend
from outrider.attention.flashinfer_backend import FlashInferAttention, FlashInferShape
from outrider.attention.triton_backend import TritonAttention
from outrider.config.verify import VerifyOptions
from outrider.device import out_of_memory
from outrider.drafting.model.round_drafter import MAX_CHOSEN
from outrider.drafting.registry import build_drafter
from outrider.drafting.requests import introduce
from outrider.errors import ConfigError
from outrider.grammar.compiler import GrammarVocabulary
from outrider.graphs import compile_aside
from outrider.host.rank_memory import RankMemory
from outrider.host.worker import disable_automatic_collection, pin_to_cores
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.capacity import SCRATCH_BYTES, cpu_tokens, usable_cores
from outrider.models.cuts import check_plain_attention
from outrider.models.decoder import CausalLM
from outrider.models.drafters.kinds import drafters_of_service, without_model
from outrider.models.progress import ConsoleProgress
from outrider.models.store import served_name
from outrider.models.store_folder import count_tokens, hash_token_ids, hash_tokenizer
from outrider.protocol.generation import VerifyInfo
from outrider.sampling.sampler import AcceptRule
from outrider.tree.handshake import HandshakeError, agree
from verify_service.engine.engine import VerifyEngine, VerifyInbox
from verify_service.engine.loading import RoundDraft, kv_tokens, load, load_draft, named_draft
from verify_service.engine.memory import Memory
from verify_service.engine.postprocessor import Observer
from verify_service.engine.round import Growth
from verify_service.engine.round_growth import GrowthPolicy, RoundGrowth
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.base import Executor
from verify_service.executors.cuda import MEASURED_CONTEXT as CUDA_CONTEXT
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.ranks import Followers, LeadingModel, RankLink
from verify_service.executors.round_buffers import MAX_DEPTH
from verify_service.executors.torch_executor import MEASURED_CONTEXT, TorchExecutor
from verify_service.frames import TargetProfile
from verify_service.speculation.budget import WIDTHS, ContextCost, CostModel, unpadded
from verify_service.speculation.colocated_draft import ColocatedDraft

log = get_logger(__name__)


def assemble(options: VerifyOptions, inbox: VerifyInbox, observer: Observer) -> tuple[VerifyEngine, TargetProfile]:
    """Build an engine, ready to run, and its profile for the door. Raises ConfigError.

    Loading and warming up takes from seconds to minutes.
    """
    pin_to_cores(options.engine_cpus)
    torch.set_num_threads(choose_threads(options))
    ranks = Followers(options) if options.tensor_parallel_size > 1 else None
    path, model = load(options, None if ranks is None else ranks.memory)
    draft = load_draft(options, path, model)
    link: RankLink | None = None
    if ranks is not None:
        ranks.memory.trade(b"loaded")
        link = link_ranks(model, ranks.memory)
        model = model if link is not None else LeadingModel(model, ranks.memory)
    parts = build(options, path, model, draft, link)
    limits = parts.limits
    info = VerifyInfo(
        model=options.served_model_name or served_name(options.model),
        model_path=str(path),
        tokenizer_hash=hash_tokenizer(path),
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=tuple(model.config.eos_token_ids),
        version=__version__,
    )
    served = TargetProfile(
        info,
        max_running=limits.max_running,
        max_waiting=limits.max_waiting,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
        device=str(model.device),
        token_ids_hash=hash_token_ids(path),
    )
    vocabulary = _grammar_vocabulary(path, limits.vocab_size, model.config.eos_token_ids)
    colocated = None if model.device.type == "cuda" else _colocated_draft(options, path, model, served, vocabulary)
    if colocated is not None and (left := limits.unserved_by(colocated.terms)):
        log.warning("drafters in this process guess nothing for %s", left)
    drafting = colocated or (named_draft(options, path) if draft is not None else None)
    if drafting is not None:
        served = msgspec.structs.replace(served, drafters=drafting.speculative_algorithm)
    engine = VerifyEngine(
        *(parts.executor, parts.memory, parts.cost, limits, observer, inbox, vocabulary, parts.growth, colocated)
    )
    if ranks is not None:
        ranks.started()
    # An automatic garbage collection could fall between two rounds.
    disable_automatic_collection()
    return engine, served


def _colocated_draft(
    options: VerifyOptions,
    path: Path,
    model: LanguageModel,
    served: TargetProfile,
    vocabulary: GrammarVocabulary | None,
) -> ColocatedDraft | None:
    """Return the draft on the engine's thread, if the options name one. Raises ConfigError.

    If the draft model cannot be used and n-grams are named beside it, they draft alone.
    """
    if not options.speculative_algorithm or options.no_speculation:
        return None
    draft_options = drafters_of_service(options.draft_model(str(path)), options.model)
    if warning := draft_options.unused():
        log.warning("%s", warning)
    draft_options = replace(
        draft_options,
        lockstep=options.lockstep,
        device="cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )
    try:
        drafter = build_drafter(draft_options)
        terms = agree(served.hello(), introduce(drafter, draft_options))
    except (ConfigError, HandshakeError) as error:
        draft_options = without_model(draft_options, error)
        drafter = build_drafter(draft_options)
        terms = agree(served.hello(), introduce(drafter, draft_options))
    log.info("%s draft in this process", ", ".join(draft_options.speculative_algorithm))
    return ColocatedDraft(drafter, draft_options, terms, served.token_ids_hash, vocabulary)


def _grammar_vocabulary(path: Path, vocab_size: int, end_ids: Sequence[int]) -> GrammarVocabulary | None:
    """Return the tokenizer as grammars see it; None, to refuse grammars, if the grammar library cannot read it."""
    try:
        return GrammarVocabulary.from_folder(path, vocab_size, end_ids)
    except ConfigError as error:
        log.warning("requests with a grammar will be refused: %s", error.message)
        return None


CPU_CHUNK = 256
GPU_CHUNK = 2048
DETERMINISTIC_CHUNK = 512
"""Every prompt is padded to this size, so a larger one would make short prompts wait."""
LOCKSTEP_HOLD_MS = 1000.0
"""How long a healthy draft has to answer in lockstep."""
_FAR_CONTEXT = 16
"""Cached tokens behind which a round is timed to find their cost, as a multiple of those behind other timed rounds."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine."""

    memory: Memory
    executor: Executor
    cost: CostModel
    limits: EngineLimits
    growth: RoundGrowth | None = None
    """Decides on trees that grow inside rounds, if any do."""


def choose_threads(options: VerifyOptions) -> int:
    """Return the number of threads for a rank's forward."""
    return options.threads or max(usable_cores() // options.tensor_parallel_size, 1)


def link_ranks(model: LanguageModel, memory: RankMemory) -> RankLink | None:
    """Return the link of a rank's executor to the other ranks; None on a CPU, where ranks meet at the model."""
    if model.device.type != "cuda" or not isinstance(model, CausalLM) or model.exchange is None:
        return None
    return RankLink(memory, model.exchange)


def following_executor(
    options: VerifyOptions, path: Path, model: LanguageModel, draft: RoundDraft | None, link: RankLink
) -> CudaExecutor:
    """Return the executor of a rank above 0, which replays rounds. `draft`: None unless cut. Raises ConfigError."""
    tokens = link.least(options.max_total_tokens or gpu_tokens(options, model, draft))
    num_pages = tokens // options.page_size
    limits = _limits(options, path, model, num_pages)
    with out_of_memory("KV cache and rounds", "lower --max-total-tokens or --mem-fraction-static"):
        return _cuda_executor(options, model, num_pages, limits, draft, link)


def build(
    options: VerifyOptions,
    path: Path,
    model: LanguageModel,
    draft: RoundDraft | None = None,
    link: RankLink | None = None,
) -> EngineParts:
    """Build an engine's parts around a loaded model, warmed up and measured. Raises ConfigError."""
    on_gpu = model.device.type == "cuda"
    tokens = options.max_total_tokens or (
        gpu_tokens(options, model, draft) if on_gpu else cpu_tokens(model.kv_bytes, options.tensor_parallel_size)
    )
    tokens = tokens if link is None else link.least(tokens)
    num_pages = tokens // options.page_size
    num_tokens = num_pages * options.page_size
    limits = _limits(options, path, model, num_pages)
    keep = not options.disable_radix_cache
    memory = Memory(num_pages, options.page_size, keep_prefixes=keep, share_generated=not options.deterministic)
    fix = "lower --max-total-tokens, --mem-fraction-static, --max-running-requests or --context-length"
    with out_of_memory("KV cache and rounds", fix):
        executor: CudaExecutor | TorchExecutor
        is_chain = draft is not None and draft.is_chain
        if on_gpu:
            executor = gpu = _cuda_executor(options, model, num_pages, limits, draft, link)
            with ConsoleProgress() as progress, compile_aside():
                gpu.capture(lambda done, total: progress("capturing CUDA graphs", done, total))
                gpu.capture_drafting(lambda rows: node_counts(gpu, rows, is_chain))
            near, widths = CUDA_CONTEXT, gpu.buckets.widths
            # A padded round takes as long as its bucket, unless padding leaves most weights unread, as with experts.
            width_of = unpadded if model.has_experts and not options.deterministic else gpu.buckets.width
        else:
            executor = TorchExecutor(model, num_pages, options.page_size, _accept_rule(options))
            near, widths, width_of = MEASURED_CONTEXT, WIDTHS, unpadded
        far = min(_FAR_CONTEXT * near, min(num_tokens, limits.context_length) - 1)
        context_cost = ContextCost.measured(executor.measure, near, far)
        cost = CostModel.measured(executor.measure, widths, width_of, context_cost)
    fixed = Growth(draft.options.max_steps, limits.max_nodes) if draft and options.lockstep else None
    growth = round_growth(executor, memory, cost, fixed, is_chain) if isinstance(executor, CudaExecutor) else None
    rows = ", ".join(f"{width}: {seconds * 1e3:.1f}" for width, seconds in cost.table().items())
    log.info("KV cache of %d tokens; ms of a round by tokens: %s", num_tokens, rows)
    return EngineParts(memory, executor, cost, limits, growth)


def _accept_rule(options: VerifyOptions) -> AcceptRule:
    return AcceptRule(options.accept_threshold_single, options.accept_threshold_acc)


def _cuda_executor(
    options: VerifyOptions,
    model: LanguageModel,
    num_pages: int,
    limits: EngineLimits,
    draft: RoundDraft | None,
    link: RankLink | None,
) -> CudaExecutor:
    executor = CudaExecutor(
        model,
        num_pages,
        options.page_size,
        limits,
        attention_backend(options.attention_backend, model, options.page_size),
        link,
        max_graph_rows=options.cuda_graph_max_bs,
        use_graphs=not options.disable_cuda_graph,
        rule=_accept_rule(options),
    )
    if draft is not None:
        executor.draft_inside(draft.model, draft.options)
    return executor


def node_counts(executor: CudaExecutor, num_rows: int, is_chain: bool) -> Sequence[int]:
    """Return the numbers of nodes that fill rounds of `num_rows` requests up to a bucket, ascending."""
    most = min(executor.limits.max_nodes, MAX_CHOSEN)
    if is_chain:
        return (min(num_rows, most),) if most else ()
    return sorted({min(tokens - num_rows, most) for tokens in executor.buckets.tokens if tokens > num_rows})


def round_growth(
    executor: CudaExecutor, memory: Memory, cost: CostModel, fixed: Growth | None = None, is_chain: bool = False
) -> RoundGrowth | None:
    """Return what decides on growth inside rounds; None if the executor does not draft. `fixed`: see GrowthPolicy."""
    drafts, buckets = executor.drafts, executor.buckets
    if drafts is None:
        return None

    @cache
    def sizes(num_rows: int) -> Sequence[int]:
        return node_counts(executor, num_rows, is_chain)

    policy = GrowthPolicy(cost.seconds, drafts.cost, sizes, drafts.max_steps, fixed)
    return RoundGrowth(drafts, policy, memory, lambda rows: buckets.fit(1, rows).rows, executor.limits)


def attention_backend(name: str, model: LanguageModel, page_size: int) -> AttentionBackend:
    """Return the backend that --attention-backend names. Raises ConfigError if it cannot run here."""
    # FlashInfer takes 0.7 of our time for the attention of prompts, which is a few percent of prefill; but it may need
    # to be compiled first, with nvcc.
    if name in ("auto", "triton"):
        return TritonAttention()
    config = model.config
    check_plain_attention(config)
    shape = FlashInferShape(config.num_heads, config.num_kv_heads, config.head_dim, page_size, model.dtype)
    return FlashInferAttention(shape, model.device, trees=name == "flashinfer")


def gpu_tokens(options: VerifyOptions, model: LanguageModel, draft: RoundDraft | None) -> int:
    """Return how many KV tokens fit in what --mem-fraction-static leaves beside weights, tables and logits."""
    rows = options.max_running_requests + 1 + options.max_round_tokens
    reserve = rows * model.config.vocab_size * SCRATCH_BYTES
    if draft is None:
        return kv_tokens(model, options.mem_fraction_static, reserve)
    slots = options.max_running_requests * draft.options.region
    reserve += slots * draft.token_bytes + rows * draft.model.vocab_size * SCRATCH_BYTES
    reserve += (options.max_running_requests + 1) * draft.model.block_bytes
    return kv_tokens(model, options.mem_fraction_static, reserve, draft.token_bytes)


def _limits(options: VerifyOptions, path: Path, model: LanguageModel, num_pages: int) -> EngineLimits:
    """Return limits with which a lone request always fits, tree included: preemption could not make room for it."""
    on_gpu = model.device.type == "cuda"
    num_tokens = num_pages * options.page_size
    options.check_lengths(model.config.max_positions, num_tokens)
    most = min(model.config.max_positions, options.longest_request(num_tokens))
    if most < model.config.max_positions and not options.context_length:
        log.info(
            "context of %d tokens, not the model's %d: a KV cache of %d has to hold %d draft tokens, too; "
            "--max-total-tokens raises it",
            *(most, model.config.max_positions, num_tokens, options.max_draft_tokens),
        )
    limits = EngineLimits(
        # Output matrices are often padded past the tokenizer; tokens without text are never sampled.
        vocab_size=min(model.config.vocab_size, count_tokens(path)),
        context_length=options.context_length or most,
        max_running=options.max_running_requests,
        max_waiting=options.max_queued_requests,
        chunk_size=options.chunked_prefill_size or CPU_CHUNK,
        max_nodes=options.max_draft_tokens,
        max_hold_seconds=max(options.max_hold_ms, LOCKSTEP_HOLD_MS if options.lockstep else 0.0) / 1e3,
        lockstep=options.lockstep,
        shares_cores=not on_gpu,
        steady_rows=model.steady_rows,
    )
    if not on_gpu:
        return limits
    return replace(
        limits,
        chunk_size=options.chunked_prefill_size or (DETERMINISTIC_CHUNK if options.deterministic else GPU_CHUNK),
        max_round_tokens=options.max_round_tokens,
        max_depth=MAX_DEPTH,
        root_apart=True,
        spin=True,
        deterministic=options.deterministic,
    )
