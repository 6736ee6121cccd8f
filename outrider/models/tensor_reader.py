"""Single tensors of a model folder, read when they are asked for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.weights import open_shard, shard_paths


class TensorReader:
    """Keeps a folder's safetensors files mapped; use it in a `with`.

    Raises:
        ConfigError: the folder has no weights, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._shards: dict[str, Any] = {}
        for path in shard_paths(folder):
            shard = self._stack.enter_context(open_shard(path))
            self._shards.update(dict.fromkeys(shard.keys(), shard))

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, in the checkpoint's dtype. Raises ConfigError when there is none of that name."""
        if name not in self._shards:
            raise ConfigError(f"{self._folder}: tensor {name} missing from the checkpoint")
        found: Tensor = self._shards[name].get_tensor(name)
        return found
