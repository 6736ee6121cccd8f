"""True features as they come, made into what a draft model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from outrider.drafting.model.feature_batch import PartOfRows
from outrider.models.drafters.base import DraftModel
from outrider.protocol.messages import Features

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def working_on(device: torch.device) -> AbstractContextManager[None]:
    """Work on a device meanwhile, whichever thread this is, and without gradients.

    Where that is so already, to find it out takes a tenth of the time that entering takes.
    """
    if torch.is_inference_mode_enabled() and (device.type != "cuda" or torch.cuda.current_device() == device.index):
        return nullcontext()
    return _enter(device)


@contextmanager
def _enter(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


class Projector:
    """Brings features to a model's device and projects them; what came together at once."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def project(self, features: object) -> Tensor:
        """See BurstRunner."""
        if not isinstance(features, Features):
            with working_on(self._model.device):
                return self._model.project(self._taken(as_tensor(features)))
        part = features.rows
        if not isinstance(part, PartOfRows):
            return self._project(features, features.data if part is None else part, features.count)
        joined = part.joined
        made: Tensor = joined.made(self, lambda: self._project(features, joined.rows, joined.count))
        # There is one of these for each request: nothing but a view may be made for it.
        return made[part.start : part.start + features.count]

    def join(self, parts: Sequence[object]) -> Tensor:
        """See BurstRunner. A lone part is not copied."""
        rows = [_moved(as_tensor(part), self._model.device, self._model.dtype) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _project(self, features: Features, given: object, count: int) -> Tensor:
        """Rows [count, feature_size] of values that are bytes of any kind, in the format of `features`."""
        dtype = _DTYPES[features.dtype]
        with working_on(self._model.device):
            if isinstance(given, Tensor):  # read from a ring: nobody else has it
                rows = given.view(dtype).view(count, -1).to(self._model.device, self._model.dtype)
            elif isinstance(given, bytes | memoryview):
                rows = self._taken(torch.frombuffer(bytearray(given), dtype=dtype).view(count, -1))
            else:
                raise ValueError(f"features must be bytes, not {type(given).__name__}")
            return self._model.finish_product(rows) if features.projected else self._model.project(rows)

    def _taken(self, rows: Tensor) -> Tensor:
        """A copy on the model's device, whose source is free when this returns, though bursts may be under way."""
        device, dtype = self._model.device, self._model.dtype
        if device.type != "cuda":
            return rows.to(device, dtype, copy=True)
        if not rows.is_cuda:
            return rows.to(dtype).pin_memory().to(device, non_blocking=True)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            copied = rows.to(device, dtype, copy=True)
        stream.synchronize()
        copied.record_stream(torch.cuda.current_stream())
        return copied


def join_rows(parts: Sequence[Tensor], into: Tensor) -> None:
    """Copy parts [N, feature_size], one behind the other, to `into`: one launch where they lie on its device."""
    if len(parts) == 1:
        into.copy_(parts[0], non_blocking=True)
        return
    # What came without a projector may be elsewhere, and `cat` does not copy between devices.
    torch.cat([_moved(part, into.device, into.dtype) for part in parts], out=into)


def _moved(part: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same there. Nearly always it is there, and asking costs a tenth of a call of `to`."""
    return part if part.device == device and part.dtype == dtype else part.to(device, dtype)


def as_tensor(value: object) -> Tensor:
    """What plans call an object, because they know nothing of torch. Raises ValueError for anything else."""
    if not isinstance(value, Tensor):
        raise ValueError(f"features must be a tensor, not {type(value).__name__}")
    return value
