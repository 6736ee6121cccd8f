"""What an interrupted training is taken up from: one safetensors file, with all that is no tensor as JSON in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError

_RECORD = "training"


def save_state(path: Path, head: dict[str, Tensor], optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Write the file, whole or not at all. `record` is what JSON holds."""
    tensors = {f"head.{name}": tensor for name, tensor in head.items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    part = path.with_name(path.name + ".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {_RECORD: json.dumps(record)})
    os.replace(part, path)


def load_state(path: Path, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The head's tensors, in host memory, and the record; the optimizer's state goes to it.

    Raises:
        ConfigError: the file is not what `save_state` wrote.
    """
    head: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    try:
        with safe_open(path, "pt") as file:
            record: dict[str, Any] = json.loads(file.metadata()[_RECORD])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition(".")
                if kind == "head":
                    head[name] = file.get_tensor(key)
                else:
                    number, _, name = name.partition(".")
                    state.setdefault(int(number), {})[name] = file.get_tensor(key)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no state of a training ({error}); remove it") from None
    # Groups follow from options, which the record holds.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return head, record
