"""Tiny random heads in the layouts that public ones have, and what they compute, written down plainly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor
from torch.nn import functional

HIDDEN, VOCAB, MLP, HEADS, KV_HEADS, HEAD_DIM, EPS = 32, 97, 48, 4, 2, 8, 1e-5
DRAFT_IDS = [i for i in range(VOCAB) if i % 3 != 1][:50]

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

Tensors = dict[str, Tensor]


class Maker:
    """Random tensors in a fixed order."""

    def __init__(self, seed: int = 3) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * 0.2

    def norm(self, size: int) -> Tensor:
        return 1 + torch.randn(size, generator=self.generator) * 0.2

    def layer(self, prefix: str, input_size: int, bias: bool = False) -> Tensors:
        """Attention and MLP without the norms before attention."""
        found = {
            "self_attn.q_proj.weight": self.matrix(HEADS * HEAD_DIM, input_size),
            "self_attn.k_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, input_size),
            "self_attn.v_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, input_size),
            "self_attn.o_proj.weight": self.matrix(HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": self.matrix(MLP, HIDDEN),
            "mlp.up_proj.weight": self.matrix(MLP, HIDDEN),
            "mlp.down_proj.weight": self.matrix(HIDDEN, MLP),
            "post_attention_layernorm.weight": self.norm(HIDDEN),
        }
        if bias:
            for name in ("q", "k", "v"):
                rows = found[f"self_attn.{name}_proj.weight"].shape[0]
                found[f"self_attn.{name}_proj.bias"] = self.matrix(rows)
        return {f"{prefix}.{name}": tensor for name, tensor in found.items()}


def save_head(folder: Path, fields: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def eagle3_tensors(num_features: int = 3, target_hidden: int = HIDDEN, bias: bool = False) -> Tensors:
    """An EAGLE-3 head under the names of its authors' own checkpoints, with an embedding of its own."""
    make = Maker()
    offsets = torch.tensor([target - draft for draft, target in enumerate(DRAFT_IDS)])
    return {
        "fc.weight": make.matrix(HIDDEN, num_features * target_hidden),
        "midlayer.hidden_norm.weight": make.norm(HIDDEN),
        "midlayer.input_layernorm.weight": make.norm(HIDDEN),
        **make.layer("midlayer", 2 * HIDDEN, bias),
        "norm.weight": make.norm(HIDDEN),
        "lm_head.weight": make.matrix(len(DRAFT_IDS), HIDDEN),
        "embed_tokens.weight": make.matrix(VOCAB, HIDDEN),
        "d2t": offsets,
        "t2d": torch.isin(torch.arange(VOCAB), torch.tensor(DRAFT_IDS)),
    }


EAGLE3_FIELDS = {
    **FIELDS,
    "draft_vocab_size": len(DRAFT_IDS),
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}


def eagle_tensors(bias: bool = True, num_layers: int = 1) -> Tensors:
    """An EAGLE head; embedding and output matrix are the target's."""
    make = Maker()
    found = {"fc.weight": make.matrix(HIDDEN, 2 * HIDDEN)}
    if bias:
        found["fc.bias"] = make.matrix(HIDDEN)
    for number in range(num_layers):
        found |= make.layer(f"layers.{number}", HIDDEN)
        if number:
            found[f"layers.{number}.input_layernorm.weight"] = make.norm(HIDDEN)
    return found


def save_mimo(folder: Path, **changes: Any) -> Any:
    """A tiny MiMo target with its head; returns transformers' Qwen2 model of the same weights."""
    reference = save_tiny(folder, "Qwen2", **changes)
    make = Maker()
    prefix = "model.mtp_layers.0"
    tensors = load_file(folder / "model.safetensors") | {
        f"{prefix}.token_layernorm.weight": make.norm(HIDDEN),
        f"{prefix}.hidden_layernorm.weight": make.norm(HIDDEN),
        f"{prefix}.final_layernorm.weight": make.norm(HIDDEN),
        f"{prefix}.input_proj.weight": make.matrix(HIDDEN, 2 * HIDDEN),
        f"{prefix}.input_layernorm.weight": make.norm(HIDDEN),
        **make.layer(prefix, HIDDEN, bias=True),
    }
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    return reference


def rms(rows: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(heads: Tensor) -> Tensor:
    """[L, n, HEAD_DIM] at positions 0, 1, ..."""
    speeds = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turn = torch.polar(torch.ones(1), torch.arange(heads.shape[0])[:, None] * speeds)[:, None]
    low, high = heads.chunk(2, -1)
    turned = torch.complex(low, high) * turn
    return torch.cat((turned.real, turned.imag), -1)


@dataclass
class Layer:
    """A decoder layer over a whole sequence, without a cache."""

    tensors: Tensors
    prefix: str
    eps: float = EPS
    head_norms: bool = False

    def linear(self, name: str, rows: Tensor) -> Tensor:
        bias = self.tensors.get(f"{self.prefix}.{name}.bias")
        return functional.linear(rows, self.tensors[f"{self.prefix}.{name}.weight"], bias)

    def norm(self, name: str, rows: Tensor) -> Tensor:
        return rms(rows, self.tensors[f"{self.prefix}.{name}.weight"], self.eps)

    def __call__(self, rows: Tensor, stream: Tensor) -> Tensor:
        length = rows.shape[0]
        q, k, v = (self.linear(f"self_attn.{name}_proj", rows).view(length, -1, HEAD_DIM) for name in "qkv")
        if self.head_norms:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q, k = rotate(q), rotate(k)
        mixed = []
        for head in range(HEADS):
            own = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, own].T / HEAD_DIM**0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            mixed.append(scores.softmax(-1) @ v[:, own])
        stream = stream + self.linear("self_attn.o_proj", torch.cat(mixed, 1))
        rows = self.norm("post_attention_layernorm", stream)
        gated = functional.silu(self.linear("mlp.gate_proj", rows)) * self.linear("mlp.up_proj", rows)
        return stream + self.linear("mlp.down_proj", gated)
