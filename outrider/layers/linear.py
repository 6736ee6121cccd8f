"""RMS norms, and matrix products with the fastest kernel for the device, dtype, shape and storage of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.rows import fits_norm
from kernels.cpu.rows import rms_norm as cpu_rms_norm
from kernels.elementwise import add_rms_norm, gate_mul, rms_norm
from kernels.launch import use_triton
from kernels.linear import MAX_FP8_ROWS, dequantize, fits_fp8_linear, fp8_linear, norm_linear, ring_pays, stream_linear
from kernels.linear_configs import MAX_QUANTIZED_ROWS, fits_row_kernel, row_kernel_pays, worth_streaming
from kernels.linear_configs import MAX_ROWS as MAX_STREAM_ROWS
from kernels.quant_weight import QuantWeight, joined, reordered
from outrider.layers.cpu_weight import CpuWeight
from outrider.layers.formats import decode, weight_tensors
from outrider.layers.humming_weight import HummingWeight, humming_weight
from outrider.models.quantization import Scheme


class RMSNorm:
    """Scales rows to unit root mean square, then by a weight. Checkpoints have the weight minus `offset`."""

    def __init__(
        self, shape: tuple[int, ...], eps: float, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        # In half precision, weight plus offset is near one and would lose bits that the checkpoint has.
        self.weight = torch.empty(shape, dtype=torch.float32 if offset else dtype, device=device)
        self.eps = eps
        self._offset = offset
        self._done: tuple[Tensor, Tensor] | None = None
        self._wide: Tensor | None = None

    def finish_loading(self) -> None:
        """Add the offset. Called once when the weight is filled."""
        if self._offset:
            self.weight += self._offset

    @property
    def wide_weight(self) -> Tensor:
        """The weight in float32, once it is loaded."""
        if self._wide is None:
            self._wide = self.weight.float()
        return self._wide

    def note(self, rows: Tensor, normed: Tensor) -> None:
        """Have the next call return `normed` if it is for `rows`: another kernel has computed it already."""
        self._done = rows, normed

    def __call__(self, rows: Tensor) -> Tensor:
        """Norm [..., size], with the mean over the last dimension; return the same shape."""
        done, self._done = self._done, None
        if done is not None and done[0] is rows:
            return done[1]
        if self.weight.ndim == 1 and rows.ndim == 2 and use_triton(rows):
            return rms_norm(rows, self.weight, self.eps)
        if self.weight.ndim == 1 and fits_norm(rows):
            return cpu_rms_norm(rows, self.wide_weight, self.eps)
        return functional.rms_norm(rows, rows.shape[-1:], None, self.eps).mul_(self.weight)


class Linear:
    """x W^T + b for rows x [M, in]. A loader fills `weight` [out, in] and `bias` [out], and then calls `pack`.

    On a CPU, `pack` lays the weight out for its fastest product (CpuWeight).

    On a GPU, few rows go through our weight-streaming kernel, which also applies gate and residual; cuBLAS does the
    rest.

    With a `scheme` the loader fills the checkpoint's own tensors (outrider.layers.formats), and `pack` converts them.
    On a GPU in half precision it makes `library`, if the scheme allows it and the library supports the matrix, or else
    `quantized`, which stays in few bits and is dequantized only for many rows. Elsewhere it dequantizes to `weight`
    once. Activations keep their dtype even if the checkpoint has scales for them: rounding them to fp8 costs
    SmolLM2-135M 0.4 to 1.1 % of perplexity beyond what fp8 weights cost. For many rows of fp8 weights, two fp8 products
    keep all bits of the rows (kernels.linear.fp8_linear), but for schemes that let rows be rounded.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
    ) -> None:
        self.num_out, self.size = out_features, in_features
        self.weight = torch.empty(0 if scheme else out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.quantized: QuantWeight | None = None
        self.library: HummingWeight | None = None
        self._in_fp8 = False
        self._rounds_rows = False
        self._scheme = scheme
        self._stored: list[dict[str, Tensor]] = []
        self.on_cpu: CpuWeight | None = None

    def tensors(self, *names: str, rows: Sequence[int] = ()) -> dict[str, Tensor]:
        """Return the weights and biases to fill, by their names in a checkpoint: stacked matrices with these `rows`.

        Without `rows` there is one matrix.
        """
        sizes = list(rows) or [self.num_out]
        if self._scheme is None:
            found = {f"{name}.weight": view for name, view in zip(names, self.weight.split(sizes), strict=True)}
        else:
            scheme, device = self._scheme, self.weight.device
            self._stored = [weight_tensors(scheme, count, self.size, device) for count in sizes]
            parts = zip(names, self._stored, strict=True)
            found = {f"{name}.{end}": tensor for name, part in parts for end, tensor in part.items()}
        if self.bias is not None:
            found |= {f"{name}.bias": view for name, view in zip(names, self.bias.split(sizes), strict=True)}
        return found

    def pack(self, order: Tensor | None = None) -> None:
        """Choose the fastest layout for this device and dtype. `weight` is freed if another layout replaces it.

        `order`, int64 [out], gives the checkpoint's row for each row of the matrix, if they are not in place.
        """
        if order is not None:
            self.weight = self.weight[order] if self._scheme is None else self.weight
            self.bias = None if self.bias is None else self.bias[order]
        quantized = None
        if self._scheme is not None:
            quantized = joined([decode(self._scheme, part) for part in self._stored])
            quantized = quantized if order is None else reordered(quantized, order)
            self._stored = []
            if self.weight.is_cuda and self.weight.dtype != torch.float32 and quantized.streams:
                if self._scheme.library and not ring_pays(quantized, self.weight.dtype):
                    self.library = humming_weight(quantized, self.bias, self.weight.dtype)
                self.quantized = None if self.library is not None else quantized.for_streaming()
                self._in_fp8 = self._scheme.library and fits_fp8_linear(quantized, self.weight.dtype)
                self._rounds_rows = self._in_fp8 and self._scheme.rounds_rows
                return
            self.weight = quantized.dequantized(self.weight.dtype)
        self.on_cpu = CpuWeight.of(self.weight, quantized)
        if self.on_cpu is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows [M, in] to [M, out]."""
        if self.library is not None:
            return self.library(rows)
        if self._streams(rows):
            return self._streamed(rows)
        if self.on_cpu is not None:
            return self.on_cpu.product(rows, self.bias)
        return functional.linear(rows, self.wide(), self.bias)

    def add_to(self, residual: Tensor, rows: Tensor, next_norm: RMSNorm | None = None) -> Tensor:
        """Return residual [M, out] plus the product for rows [M, in], in one kernel if there is one.

        `next_norm` is the norm that follows; it may have been applied to the sum already (`RMSNorm.note`).
        """
        if self.library is not None:
            return _added(residual, self.library(rows), next_norm)
        if self.uses_row_kernel(rows, whole=False):
            return norm_linear(rows, self.weight, bias=self.bias, residual=residual)
        if self._streams(rows):
            return self._streamed(rows, residual=residual)
        if self.on_cpu is not None:
            return self.on_cpu.product(rows, self.bias, residual)
        if self.bias is None and rows.is_cuda:
            return torch.addmm(residual, rows, self.wide().t())
        return residual + self(rows)

    def gated(self, rows: Tensor, gelu: bool = False) -> Tensor:
        """Return silu(gate) * up [M, out / 2] for rows [M, in]; gate and up are the halves of the product.

        `gelu`: use gelu(gate) instead, approximated by tanh.
        """
        if not gelu and self._streams(rows):
            return self._streamed(rows, gated=True)
        gate_up = self(rows)
        if gate_up.is_cuda:
            return gate_mul(gate_up, gelu)
        gate, up = gate_up.chunk(2, 1)
        return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up

    def normed_gated(self, stream: Tensor, norm: RMSNorm | None, gelu: bool = False) -> Tensor:
        """Return `gated` of the residual stream [M, in], normed if there is a norm; in one launch if rows are few and
        narrow."""
        if norm is not None and not gelu and self.uses_row_kernel(stream, gated=True):
            return norm_linear(stream, self.weight, norm=norm.weight, eps=norm.eps, bias=self.bias, gated=True)
        return self.gated(stream if norm is None else norm(stream), gelu)

    def uses_row_kernel(self, rows: Tensor, whole: bool = True, gated: bool = False) -> bool:
        """Whether products of `rows` [M, in] are small enough for the kernel that also applies norm and residual.

        `whole`: the rows are to be normed. `gated`: the product is to be gated.
        """
        if not self.weight.numel() or not use_triton(rows):
            return False
        count, (num_out, size) = rows.shape[0], self.weight.shape
        if not rows.is_cuda:
            return fits_row_kernel(count, size, whole)
        return rows.dtype != torch.float32 and row_kernel_pays(count, num_out, size, whole, gated)

    def to_float32(self, rows: Tensor) -> Tensor:
        """Map rows [M, in] to float32 [M, out]; our kernels do not round to the weight's dtype in between."""
        if self._streams(rows):
            return self._streamed(rows, out_dtype=torch.float32)
        if self.library is None and rows.is_cuda and self.bias is None and rows.dtype != torch.float32:
            return torch.mm(rows, self.wide().t(), out_dtype=torch.float32)
        if self.on_cpu is not None and self.bias is None:
            return self.on_cpu.to_float32(rows)
        return self(rows).float()

    def wide(self) -> Tensor:
        """Return [out, in] in the dtype of activations: `weight`, or `quantized`, dequantized in each call."""
        return self.weight if self.quantized is None else dequantize(self.quantized, self.weight.dtype)

    def _streams(self, rows: Tensor) -> bool:
        if self.library is not None:
            return False
        if self.quantized is not None:
            return self._rounds_rows or rows.shape[0] <= (MAX_FP8_ROWS if self._in_fp8 else MAX_QUANTIZED_ROWS)
        return rows.is_cuda and rows.dtype != torch.float32 and worth_streaming(rows.shape[0], self.weight.numel())

    def _streamed(
        self, rows: Tensor, *, residual: Tensor | None = None, gated: bool = False, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the product if `_streams`: the weights are read as they are stored."""
        weight = self.quantized or self.weight
        if self._in_fp8 and isinstance(weight, QuantWeight) and rows.shape[0] > MAX_STREAM_ROWS:
            rounds_rows = self._rounds_rows
            return fp8_linear(
                rows,
                weight,
                bias=self.bias,
                residual=residual,
                gated=gated,
                out_dtype=out_dtype,
                rounds_rows=rounds_rows,
            )
        return stream_linear(rows, weight, bias=self.bias, residual=residual, gated=gated, out_dtype=out_dtype)


def _added(stream: Tensor, part: Tensor, norm: RMSNorm | None) -> Tensor:
    """Return the sum, and note its norm, if there is one, computed by the same kernel."""
    if norm is None:
        return stream + part
    total, normed = add_rms_norm(stream, part, norm.weight, norm.eps)
    norm.note(total, normed)
    return total


def has_small_products(width: int) -> bool:
    """Whether products of a model with a residual stream of `width` use `norm_linear`, on a GPU and not in float32."""
    return row_kernel_pays(1, width, width, whole=True)
