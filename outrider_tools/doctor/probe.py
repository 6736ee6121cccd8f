"""Checks that need torch: GPUs, and whether target and draft load and fit. Runs as its own process, and prints JSON.

    python -m outrider_tools.doctor.probe TARGET IMPL [options of the draft service]

The loaders run on the meta device: they check every name and shape and read no weights. If a driver crashes, only this
process dies.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from kernels.cpu.isa import cpu_flags
from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.device import cpu_dtype
from outrider.errors import OutriderError
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.kinds import named_head
from outrider.models.drafters.loader import load_draft_model
from outrider.models.loader import load_model
from outrider.models.store import resolve_model
from outrider.models.store_folder import hash_token_ids, hash_tokenizer
from outrider.protocol.speculation import PROTOCOL_VERSION, Hello
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import agree

_META = torch.device("meta")


def main() -> int:
    """Print the report. An empty TARGET checks GPUs alone; IMPL: see --model-impl; no options mean no draft model."""
    target, impl, *words = sys.argv[1:]
    draft = parse_options(DraftOptions, words) if words else None
    models = check_models(target, draft, impl) if target else []
    print(json.dumps({"torch": _torch(), "gpus": _gpus(), "peers": _peers(), "models": models}))
    return 0


def _torch() -> dict[str, Any]:
    dtype, why = cpu_dtype()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": sorted(cpu_flags()),
        "cpu_dtype": [str(dtype).removeprefix("torch."), why],
    }


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = [properties.major, properties.minor]
        found.append({"name": properties.name, "capability": capability, "free": free, "total": total})
    return found


def _peers() -> list[list[bool]]:
    """Return for each GPU whether it can reach each GPU's memory."""
    every = range(torch.cuda.device_count())
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in every] for one in every]


def check_models(target: str, draft: DraftOptions | None, impl: str = "auto") -> list[dict[str, str]]:
    """Return findings on the target and the draft model that the options describe: check, level, text."""
    findings: list[dict[str, str]] = []
    found = _try(findings, "target", lambda: _target(target, impl))
    if draft is None:
        return findings
    model = _try(findings, "draft model", lambda: _draft(draft))
    if isinstance(found, Hello) and isinstance(model, Hello):
        _try(findings, "handshake", lambda: _agree(found, model))
    return findings


def _try(findings: list[dict[str, str]], check: str, look: Any) -> Any:
    """Call `look`, and add the text that it returns as a finding. Return its value, or None if it fails."""
    try:
        value, text = look()
    except OutriderError as error:
        findings.append({"check": check, "level": "problem", "text": error.message})
        return None
    findings.append({"check": check, "level": "ok", "text": text})
    return value


def _target(name: str, impl: str) -> tuple[Hello, str]:
    path = resolve_model(name, impl=impl)
    model = load_model(path, torch.float32, _META, impl=impl)
    config = model.config
    tokens = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    vocab_size = min(config.vocab_size, tokens)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        model=path.name,
        token_ids_hash=hash_token_ids(path),
        vocab_size=vocab_size,
        max_positions=config.max_positions,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
    )
    name = config.architecture + ("" if isinstance(model, CausalLM) else " through transformers")
    text = f"{path.name}: {name}, {config.num_layers} layers of {config.hidden_size}, vocabulary of {tokens} tokens"
    more = "" if tokens <= config.vocab_size else f"; config.json allows {config.vocab_size}, the rest is never used"
    # The hash is of the file, as a running verify reports it.
    return hello, f"{text}{more}, tokenizer {hash_tokenizer(path)[:12]}"


def _draft(options: DraftOptions) -> tuple[Hello, str]:
    options = named_head(options)
    model: DraftModel = load_draft_model(options, _META, torch.float32)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        token_ids_hash=model.token_ids_hash,
        vocab_size=model.target_vocab_size,
        max_positions=model.max_positions,
        hidden_size=model.hidden_size,
        feature_layers=tuple(model.feature_layers),
    )
    words = [f"{', '.join(options.speculative_algorithm)}: {Path(options.speculative_draft_model_path).name or 'MTP'}"]
    words.append(f"{model.vocab_size} of {model.target_vocab_size} token ids")
    if model.feature_layers:
        words.append(f"features of {model.hidden_size} from layers {', '.join(map(str, model.feature_layers))}")
    return hello, ", ".join(words)


def _agree(target: Hello, draft: Hello) -> tuple[bool, str]:
    terms = agree(target, draft)
    # Draft trees stop at the shorter of both limits.
    short = f", drafts up to {draft.max_positions} tokens" if 0 < draft.max_positions < target.max_positions else ""
    return True, f"target and draft share {terms.vocab_size} token ids{short}"


if __name__ == "__main__":
    sys.exit(main())
