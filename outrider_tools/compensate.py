"""Rounding of a matrix so that weights rounded later make up for the error of each weight.

The error that counts is that of products with rows as the model sees them, so their second moments steer the rounding:
the method of GPTQ (arXiv 2210.17323), with the columns of the largest inputs first. The rows come from reading text;
without any, the model writes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.base import expand
from outrider.errors import ConfigError, reason_of
from outrider.layers.linear import Linear, RMSNorm
from outrider.models.config import text_fields
from outrider.models.decoder import CausalLM, GatedMlp
from outrider.models.fields import read_json
from outrider.models.loader import load_decoder
from outrider_tools.inflate.folder import tokenize

DAMPING = 0.01
"""Share of the mean moment that is added to all: errors in directions that no row took must not be free."""
BLOCK = 128
"""Number of columns whose errors are passed on to the columns behind them together."""
OWN_TEXTS, OWN_TOKENS, TEXT_TOKENS = 16, 512, 1024
MAX_TEXTS = 64


class _Observed:
    """A product that also sums x x^T over its rows x."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        size, device = linear.size, linear.weight.device
        self.moments = torch.zeros(size, size, dtype=torch.float32, device=device)

    def _see(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        self.moments.addmm_(wide.T, wide)
        return rows

    def __call__(self, rows: Tensor) -> Tensor:
        return self._linear(self._see(rows))

    def add_to(self, residual: Tensor, rows: Tensor, next_norm: RMSNorm | None = None) -> Tensor:
        return self._linear.add_to(residual, self._see(rows), next_norm)

    def normed_gated(self, stream: Tensor, norm: RMSNorm | None, gelu: bool = False) -> Tensor:
        return self._linear.gated(self._see(stream if norm is None else norm(stream)), gelu)


class InputMoments:
    """Second moments of the inputs of a model's matrices, by layer. Layers must be asked for in order."""

    def __init__(self, model: CausalLM, texts: Sequence[Sequence[int]]) -> None:
        """Prepare `model` to read `texts`, which are token ids."""
        self._model = model
        self._layer = 0
        device, kv = model.device, model.new_kv(sum(map(len, texts)))
        ids = torch.tensor([token for text in texts for token in text], device=device)
        starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
        slots = [torch.arange(start, start + len(text)) for start, text in zip(starts, texts, strict=True)]
        places = torch.cat([torch.arange(len(text)) for text in texts]).to(device)
        segments = [Segment(len(own), own.to(device)) for own in slots]
        batch = ForwardBatch(ids, places, segments)
        self._plan = TorchAttention().plan(batch, kv, model.config.num_heads, model.rotary)
        self._stream = model.embedded(ids)

    @torch.inference_mode()
    def of(self, layer: int) -> dict[str, Tensor]:
        """Return the moments of `layer`, float32 [in, in] by the last part of a module's name. Experts have none."""
        while self._layer < layer:
            self._run(self._layer)
        return self._run(layer) if layer == self._layer else {}

    def _run(self, number: int) -> dict[str, Tensor]:
        layer = self._model.layers[number]
        attention, mlp = layer.attention, layer.mlp
        places: list[tuple[object, str, tuple[str, ...]]] = [
            (attention, "qkv", ("q_proj", "k_proj", "v_proj", "qkv_proj")),
            (attention.output, "linear", ("o_proj",)),
        ]
        if isinstance(mlp, GatedMlp):
            places.append((mlp, "gate_up", ("gate_proj", "up_proj", "gate_up_proj")))
            places.append((mlp.down, "linear", ("down_proj",)))
        found: dict[str, Tensor] = {}
        with ExitStack() as restoring:
            for owner, name, ends in places:
                linear = getattr(owner, name)
                restoring.callback(setattr, owner, name, linear)
                observed = _Observed(linear)
                found |= dict.fromkeys(ends, observed.moments)
                setattr(owner, name, observed)
            self._stream = layer(self._stream, self._plan)
        self._layer = number + 1
        return found


def calibration_moments(source: Path, text: str, device: torch.device) -> InputMoments:
    """Return moments of a checkpoint's layers for the text file `text`, or for the model's own text if it is "own".

    Raises ConfigError if the checkpoint is no decoder of ours, or there is no text.
    """
    ids = [] if text == "own" else _read(source, text)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_decoder(source, dtype, device)
    if text == "own":
        return InputMoments(model, own_text(model, _first_token(source)))
    length = min(TEXT_TOKENS, model.config.max_positions)
    return InputMoments(model, [ids[start : start + length] for start in range(0, len(ids), length)])


def _read(source: Path, text: str) -> list[int]:
    label = f"--calibration {text}"
    try:
        content = expand(text).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: cannot be read: {reason_of(error)}; give a text file, own or none") from None
    if not content.strip():
        raise ConfigError(f"{label}: holds no text; give a text file, own or none")
    if not (source / "tokenizer.json").is_file():
        raise ConfigError(f"{label}: {source} has no tokenizer.json to read it with; use own or none")
    return tokenize(source, content)[: MAX_TEXTS * TEXT_TOKENS]


@torch.inference_mode()
def own_text(model: CausalLM, first: int, count: int = OWN_TEXTS, length: int = OWN_TOKENS) -> list[list[int]]:
    """Return texts that a model writes at temperature 1, the same ones every time."""
    length, device = min(length, model.config.max_positions), model.device
    generator = torch.Generator().manual_seed(0)
    kv, attention = model.new_kv(count * length), TorchAttention()
    slots = torch.arange(count * length, device=device).view(count, length)
    ids = torch.full((count, length), first)
    for place in range(length - 1):
        segments = [Segment(1, own[: place + 1]) for own in slots]
        positions = torch.full((count,), place, device=device)
        batch = ForwardBatch(ids[:, place].to(device), positions, segments)
        chances = model.logits(model.forward(batch, kv, attention)).float().softmax(1).cpu()
        ids[:, place + 1] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return [list(text) for text in ids.tolist()]


def _first_token(source: Path) -> int:
    fields = text_fields(read_json(source / "config.json"))
    for name in ("bos_token_id", "eos_token_id"):
        token = fields.get(name)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int):
            return token
    return 0


def compensated(matrix: Tensor, moments: Tensor, scales: Tensor, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `matrix`, float32 [out, in], with each weight rounded to a number of its grid.

    `moments` [in, in] are those of the rows. The grid is `scales` [out, in] times the numbers that `nearest` rounds to.
    """
    size = matrix.shape[1]
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    ordered = moments[order][:, order].double()
    ordered.diagonal().add_(DAMPING * float(ordered.diagonal().mean()) + 1e-12)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(ordered))
    # Row k says how the columns behind column k best make up for its error.
    factors = torch.linalg.cholesky(inverse, upper=True).float()
    left, scales = matrix[:, order], scales[:, order]
    found = torch.empty_like(left)
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        block, errors = left[:, start:end].clone(), torch.empty_like(left[:, start:end])
        for column in range(end - start):
            at = start + column
            scale = scales[:, at]
            found[:, at] = nearest(block[:, column] / scale) * scale
            errors[:, column] = (block[:, column] - found[:, at]) / factors[at, at]
            block[:, column + 1 :].addr_(errors[:, column], factors[at, at + 1 : end], alpha=-1)
        left[:, end:].addmm_(errors, factors[start:end, end:], alpha=-1)
    result = torch.empty_like(found)
    result[:, order] = found
    return result
