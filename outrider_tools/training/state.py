"""What an interrupted training is taken up from: one safetensors file, with all that is no tensor as JSON in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError

_RECORD = "training"


def save_state(
    path: Path, weights: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], record: dict[str, Any]
) -> None:
    """Write the file, whole or not at all. `record` is what JSON holds."""
    tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
    for place, optimizer in enumerate(optimizers):
        for number, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{place}.{number}.{name}": value for name, value in values.items()}
    part = path.with_name(path.name + ".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {_RECORD: json.dumps(record)})
    os.replace(part, path)


def load_state(path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, in host memory, and the record; the optimizers' state goes to them.

    Raises:
        ConfigError: the file is not what `save_state` wrote.
    """
    weights: dict[str, Tensor] = {}
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    try:
        with safe_open(path, "pt") as file:
            record: dict[str, Any] = json.loads(file.metadata()[_RECORD])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition(".")
                if kind == "weights":
                    weights[name] = file.get_tensor(key)
                elif kind == "optimizer":
                    place, number, name = name.split(".", 2)
                    # Another number of optimizers is another training, which the record tells.
                    if int(place) < len(states):
                        states[int(place)].setdefault(int(number), {})[name] = file.get_tensor(key)
                else:
                    raise ValueError(f"{kind} is unknown")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no state of a training ({error}); remove it") from None
    # Groups follow from options, which the record holds.
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return weights, record
