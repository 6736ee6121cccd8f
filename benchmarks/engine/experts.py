"""A model with experts, plain and with a draft inside its rounds, against the bytes that it must read.

    python -m benchmarks.engine.experts --prompts mt_bench.jsonl --draft STANDALONE=/models/noisy-0.10 --out FILE.json

The model is the inflated `--model` (see `outrider inflate`), made on the device and never written; it generates the
same as its source. Drives the engine without doors and processes; rates are those of decoding, after the prompts. The
floor is the device's copy rate applied to the weights that a round of so many tokens is expected to read. Options that
are not listed are verify's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import PROMPTS, device_name
from benchmarks.engine.timing import copy_rate
from benchmarks.split.load import chat_prompts
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.base import parse_options
from outrider.config.verify import VerifyOptions
from outrider.host.worker import disable_automatic_collection
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.elements import model_elements
from outrider.models.fields import read_json
from outrider.models.loader import decoder_tensors, load_model
from outrider.models.store import resolve_model
from outrider.models.store_folder import WEIGHTS_FILE
from outrider.models.weights import fill, save_tensors
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, write_report
from outrider_tools.files import copy_files
from outrider_tools.inflate.shapes import ShapeMap, parse_shape
from outrider_tools.inflate.tensors import EMBEDDING, HEAD, Inflater, inflated_fields
from outrider_tools.quantize import FORMATS, is_quantized
from verify_service.engine.build import EngineParts, build
from verify_service.engine.engine import Action, VerifyEngine
from verify_service.engine.loading import load_draft
from verify_service.engine.request import Request
from verify_service.engine.round import Entry
from verify_service.frames import RoundFigures

GROUP = 128
"""Group size of formats that have groups of weights."""


@torch.inference_mode()
def made_on_device(source: Path, shape: str, folder: Path, form: str = "") -> CausalLM:
    """Make the inflated model in bfloat16, or quantized as `form` says (see `outrider quantize`).

    `folder` gets the files that drafts look for: config, tokenizer, embedding and output matrix.
    """
    device, dtype = torch.device("cuda"), torch.bfloat16
    own = ModelConfig.from_folder(source)
    shape_map = ShapeMap.of(own, parse_shape(shape))
    inflater = Inflater(decoder_tensors(source, own), own, shape_map, own.vocab_size, dtype, device, seed=0)
    fields = inflated_fields(read_json(source / "config.json"), shape_map, own.vocab_size, inflater.rms_norm_eps, dtype)
    if form:
        fields["quantization_config"] = FORMATS[form].config(GROUP)
    model = CausalLM(ModelConfig.from_fields(fields, {}), dtype, device)
    encoded: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        module = name.rpartition(".")[0]
        if not form or not is_quantized(f"{module}.weight"):
            return inflater.tensor(name)
        if name not in encoded:
            encoded.clear()
            matrix = inflater.tensor(f"{module}.weight").float()
            made = FORMATS[form].encode(matrix, FORMATS[form].fit(matrix, GROUP), GROUP)
            encoded.update({f"{module}.{end}": tensor for end, tensor in made.items()})
        return encoded[name]

    tensors = model.checkpoint_tensors()
    # Sorted, so that tensors that are encoded together come together.
    fill({name: tensors[name] for name in sorted(tensors)}, read, None)
    (folder / "config.json").write_text(json.dumps(fields), "utf-8")
    save_tensors({name: inflater.tensor(name).cpu() for name in (EMBEDDING, HEAD)}, folder / WEIGHTS_FILE)
    copy_files(source, folder)
    model.finish_loading()
    return model


def logits_of(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """Return a prompt's logits, float32 [tokens, vocabulary]."""
    count = len(ids)
    order = torch.arange(count, device=model.device)
    batch = ForwardBatch(torch.tensor(ids, device=model.device), order, [Segment(count, order)])
    return model.logits(model.forward(batch, model.new_kv(count), TorchAttention()))


class PostedActions:
    """The inbox of an engine that is filled by the engine's own thread."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()

    def post(self, action: Action) -> None:
        """See VerifyInbox."""
        self._actions.append(action)

    def take(self, timeout: float | None) -> list[Action]:
        """See VerifyInbox."""
        actions = list(self._actions)
        self._actions.clear()
        return actions


class Decoding(NamedTuple):
    """A batch's figures from the moment when all its requests have begun to answer until the first one ends."""

    tokens_per_second: float
    round_seconds: float
    accept_length: float
    round_tokens: float
    texts: list[list[int]]


class BatchWatch:
    """Follows a batch through an engine, and stops the engine when all requests have ended."""

    def __init__(self, parts: EngineParts, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self.texts: list[list[int]] = [[] for _ in prompts]
        self._num_begun = self._num_ended = 0
        self._began_at = self._ended_at = 0.0
        self._tokens = self._rounds = self._round_tokens = self._answers = 0
        self._engine = VerifyEngine(
            *(parts.executor, parts.memory, parts.cost, parts.limits, self, PostedActions(), None, parts.growth)
        )
        for index, prompt in enumerate(prompts):
            asked = GenerationRequest(str(index), prompt, SamplingParams(temperature=0.0), max_tokens)
            self._engine.submit(Request.begin(asked, partial(self._take, index), parts.limits.vocab_size))

    def run(self) -> Decoding:
        """Run the engine to the batch's end."""
        self._engine.run()
        seconds = self._ended_at - self._began_at
        return Decoding(
            tokens_per_second=self._tokens / seconds,
            round_seconds=seconds / self._rounds,
            accept_length=self._tokens / max(self._answers, 1),
            round_tokens=self._round_tokens / self._rounds,
            texts=self.texts,
        )

    def _take(self, index: int, update: GenerationUpdate) -> None:
        if self._num_begun == len(self.texts) and not self._num_ended:
            self._tokens += len(update.token_ids)
            self._ended_at = time.perf_counter()
        if not self.texts[index]:
            self._num_begun += 1
            self._began_at = time.perf_counter()
        self.texts[index].extend(update.token_ids)
        if update.last:
            self._num_ended += 1
            if self._num_ended == len(self.texts):
                self._engine.stop()

    def round(self, entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> None:
        """See Observer."""
        if self._num_begun == len(self.texts) and not self._num_ended:
            self._rounds += 1
            self._answers += len(entries)
            self._round_tokens += sum(entry.num_tokens for entry in entries)

    def flush(self) -> None:
        """See Observer."""


class ExpertsBench:
    """Plain decoding, then each draft, at each batch."""

    def __init__(
        self, model: LanguageModel, folder: Path, options: VerifyOptions, arguments: argparse.Namespace
    ) -> None:
        self.rows: list[Row] = []
        self._model, self._folder, self._options, self._arguments = model, folder, options, arguments
        self._prompts = chat_prompts(folder, arguments.prompts)
        self._rate = copy_rate(torch.device("cuda"))
        self._elements = model_elements(ModelConfig.from_folder(folder))
        self._plain: dict[int, Decoding] = {}
        self._words = arguments.format or "bf16"
        self._bytes = {"": 2.0, "int4": 0.5, "awq": 0.5, "gptq": 0.5, "mxfp4": 0.53}.get(arguments.format, 1.0)
        self.add("device copy", "copy_tb_per_second", self._rate / 1e12, "TB/s")

    def add(self, case: str, metric: str, value: float, unit: str = "") -> None:
        """Add a figure."""
        self.rows.append(Row(f"{self._arguments.shape} {case}", metric, value, unit))

    def run(self, draft: str, options: VerifyOptions) -> None:
        """Measure all batches with one draft, or none."""
        start = time.perf_counter()
        parts = build(options, self._folder, self._model, load_draft(options, self._folder, self._model))
        print(f"{draft}: built in {time.perf_counter() - start:.1f} s", flush=True)
        if draft == "plain":
            for width, seconds in parts.cost.table().items():
                case = f"round m{width} {self._words}"
                self.add(case, "round_ms", seconds * 1e3, "ms")
                self.add(case, "round_over_bytes", seconds / self._floor(width))
                print(f"{case}: {seconds * 1e3:.3f} ms, {seconds / self._floor(width):.2f} times its bytes")
        for batch in self._arguments.batches:
            prompts = [self._prompts[index % len(self._prompts)] for index in range(batch)]
            BatchWatch(parts, prompts, 48).run()
            self._note(draft, batch, BatchWatch(parts, prompts, self._arguments.max_tokens).run())

    def _floor(self, num_tokens: int) -> float:
        """Return the seconds that the device takes to read the weights of a round."""
        # The copy rate counts both reads and writes.
        output = self._elements.output * 2
        return ((self._elements.read_by(num_tokens) - self._elements.output) * self._bytes + output) / self._rate

    def _note(self, draft: str, batch: int, found: Decoding) -> None:
        case = f"{draft} {'' if draft == 'plain' else 'colocated '}b{batch} {self._words} greedy"
        floor = self._floor(batch)
        self.add(case, "tokens_per_second", found.tokens_per_second, "tokens/s")
        self.add(case, "round_ms", found.round_seconds * 1e3, "ms")
        self.add(case, "accept_length", found.accept_length, "tokens")
        self.add(case, "round_tokens", found.round_tokens, "tokens")
        self.add(case, "floor_ms", floor * 1e3, "ms")
        comparison = ""
        if draft == "plain":
            self._plain[batch] = found
        else:
            plain = self._plain[batch]
            self.add(case, "speedup_over_plain", found.tokens_per_second / plain.tokens_per_second)
            same = sum(one == other for one, other in zip(found.texts, plain.texts, strict=True)) / batch
            self.add(case, "equal_texts", same)
            comparison = (
                f", {found.tokens_per_second / plain.tokens_per_second:.2f} times plain, equal texts {same:.2f}"
            )
        print(
            f"{case}: {found.tokens_per_second:.0f} tokens/s, round {found.round_seconds * 1e3:.2f} ms of "
            f"{found.round_tokens:.1f} tokens, accept length {found.accept_length:.2f}; a plain round's weights "
            f"{floor * 1e3:.2f} ms{comparison}",
            flush=True,
        )


def main() -> int:
    """Parse options, make the model, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="", choices=("", *FORMATS), help="of quantized weights; bfloat16 without")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSONL, with "turns" or "prompt"')
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--draft", action="append", default=[], metavar="ALGORITHM=FOLDER")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds after which no draft is begun")
    parser.add_argument("--out", type=Path)
    arguments, others = parser.parse_known_args()
    options = parse_options(VerifyOptions, others)
    began = time.perf_counter()
    source = resolve_model(options.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = made_on_device(source, arguments.shape, folder, arguments.format)
        bench = ExpertsBench(model, folder, options, arguments)
        print(f"made in {time.perf_counter() - began:.1f} s", flush=True)
        with torch.inference_mode():
            ids = chat_prompts(folder, arguments.prompts)[0]
            expected = logits_of(load_model(source, torch.float32, "cuda"), ids)
            found = logits_of(model, ids)
        error = float((found - expected).norm() / expected.norm())
        bench.add(arguments.format or "bf16", "logits_relative_error", error)
        print(f"logits against the source's: relative error {error:.4f}", flush=True)
        disable_automatic_collection()
        try:
            bench.run("plain", options)
            for text in arguments.draft:
                if time.perf_counter() - began > arguments.stop_after:
                    print(f"{text}: no time left")
                    continue
                gc.collect()
                torch.cuda.empty_cache()
                algorithm, _, path = text.partition("=")
                speculative = replace(options, speculative_algorithm=(algorithm,), speculative_draft_model_path=path)
                bench.run(algorithm.lower(), speculative)
        finally:
            if arguments.out:
                write_report(arguments.out, "experts", device_name(), bench.rows, ("torch", "triton"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
