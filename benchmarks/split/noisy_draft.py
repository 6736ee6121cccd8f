"""Make a worse copy of a model, as a draft model whose quality is set by its noise.

python -m benchmarks.split.noisy_draft SmolLM2-135M-Instruct /models/smollm2-noise-0.10 --noise 0.10

Every matrix but the embedding gets Gaussian noise of `--noise` times its own standard deviation; norms and biases stay.
A tied output matrix is the embedding, and stays, too.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.fields import read_json
from outrider.models.store import resolve_model
from outrider.models.store_folder import WEIGHTS_FILE
from outrider.models.weights import save_tensors, stored_tensors
from outrider_tools.files import copy_files

EMBEDDING = "model.embed_tokens.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def noisy(name: str, weight: Tensor, noise: float, seed: int, device: torch.device) -> Tensor:
    """Return `weight`, with noise if it is a matrix. The noise depends only on `seed`, name and kind of device."""
    if weight.dim() != 2 or name == EMBEDDING:
        return weight
    values = weight.to(device, torch.float32)
    # Seed and name are hashed together: the CPU's generator takes at most 32 bits.
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    added = torch.empty_like(values).normal_(0.0, 1.0, generator=generator)
    return values.add_(added, alpha=noise * float(values.std())).to(weight.dtype).cpu()


def make_noisy(
    source: Path, out: Path, noise: float, seed: int, dtype: torch.dtype | None, device: torch.device
) -> int:
    """Write the copy. Return the bytes of its weights. A `dtype` of None keeps each tensor's own.

    Raises:
        ConfigError: the source has no weights, or `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists; remove it or choose another folder")
    tensors: dict[str, Tensor] = {}
    for name, stored in stored_tensors(source).items():
        found = noisy(name, stored.read(), noise, seed, device)
        tensors[name] = found if dtype is None else found.to(dtype)
    fields = read_json(source / "config.json")
    if dtype is not None:
        fields["dtype" if "dtype" in fields else "torch_dtype"] = str(dtype).removeprefix("torch.")
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    copy_files(source, out)
    record = {"source": source.name, "noise": noise, "seed": seed, "device": device.type}
    (out / "noise.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    save_tensors(tensors, out / WEIGHTS_FILE)
    return sum(tensor.nbytes for tensor in tensors.values())


def main() -> None:
    """Parse options and write the copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a name or folder, as for the services")
    parser.add_argument("out", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--noise", type=float, default=0.10, help="of each matrix's standard deviation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights; the source's own if not given")
    parser.add_argument("--device", default="cpu", help="what draws the noise: cpu or cuda")
    options = parser.parse_args()
    dtype = DTYPES.get(options.dtype)
    device = torch.device(options.device)
    num_bytes = make_noisy(resolve_model(options.source), options.out, options.noise, options.seed, dtype, device)
    print(f"{options.out}: {num_bytes / 1e6:.0f} MB of weights")


if __name__ == "__main__":
    main()
