"""Tiny block heads in their public layouts, and what they compute, written down plainly."""

from __future__ import annotations

from typing import Any

import torch
from tiny_heads import EPS, FIELDS, HEADS, HIDDEN, KV_HEADS, VOCAB, Maker, Tensors, rms
from torch import Tensor
from torch.nn import functional

RANK, BLOCK, LAYERS, MASK = 6, 5, 2, 90
HEAD_DIM = 16
"""The least that kernels run with."""

QWEN3 = {**FIELDS, "model_type": "qwen3", "num_hidden_layers": LAYERS, "head_dim": HEAD_DIM, "block_size": BLOCK}
ZLAB_FIELDS: dict[str, Any] = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["full_attention"] * LAYERS,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}
DEEPSPEC_FIELDS: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": MASK,
    "target_layer_ids": [-1, 1],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
}


def backbone() -> Tensors:
    """z-lab's tensors: no embedding and no output matrix of its own."""
    make = Maker()
    found = {"fc.weight": make.matrix(HIDDEN, 2 * HIDDEN), "hidden_norm.weight": make.norm(HIDDEN)}
    for number in range(LAYERS):
        prefix = f"layers.{number}"
        found |= make.layer(prefix, HIDDEN)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = make.matrix(heads * HEAD_DIM, HIDDEN)
        found[f"{prefix}.self_attn.o_proj.weight"] = make.matrix(HIDDEN, HEADS * HEAD_DIM)
        found[f"{prefix}.input_layernorm.weight"] = make.norm(HIDDEN)
        found[f"{prefix}.self_attn.q_norm.weight"] = make.norm(HEAD_DIM)
        found[f"{prefix}.self_attn.k_norm.weight"] = make.norm(HEAD_DIM)
    return found | {"norm.weight": make.norm(HIDDEN)}


def dspark_tensors(kind: str = "vanilla") -> Tensors:
    """DeepSpec's: with embedding, output matrix, the sequential part and a confidence head."""
    make = Maker(5)
    found = backbone() | {
        "embed_tokens.weight": make.matrix(VOCAB, HIDDEN),
        "lm_head.weight": make.matrix(VOCAB, HIDDEN),
        "markov_head.markov_w1.weight": make.matrix(VOCAB, RANK),
        "markov_head.markov_w2.weight": make.matrix(VOCAB, RANK) * 3,
        "confidence_head.proj.weight": make.matrix(1, HIDDEN + RANK),
        "confidence_head.proj.bias": make.matrix(1),
    }
    if kind == "gated":
        found |= {"markov_head.gate_proj.weight": make.matrix(RANK, HIDDEN + RANK)}
        found |= {"markov_head.gate_proj.bias": make.matrix(RANK)}
    if kind == "rnn":
        found |= {"markov_head.joint_proj.weight": make.matrix(3 * RANK, 2 * RANK + HIDDEN)}
        found |= {"markov_head.joint_proj.bias": make.matrix(3 * RANK)}
    return found


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """[L, n, HEAD_DIM] rotated for positions [L]."""
    speeds = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * speeds)[:, None]
    low, high = heads.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()), -1)


def plain_block(tensors: Tensors, embedding: Tensor, raw: Tensor, root: int, seen: Tensor | None = None) -> Tensor:
    """Rows [BLOCK, HIDDEN] of the block of a token behind L positions with raw features [L, 2 * HIDDEN].

    `seen` int64: positions of the context that it sees, all unless given; right before it, whatever lies between.
    """
    length = raw.shape[0]
    seen = torch.arange(length) if seen is None else seen
    context = rms(raw @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])[seen]
    stream = embedding[torch.tensor([root] + [MASK] * (BLOCK - 1))]
    places = torch.arange(length, length + BLOCK)
    near = torch.arange(length - len(seen), length)
    for number in range(LAYERS):
        layer = {name.removeprefix(f"layers.{number}."): value for name, value in tensors.items()}
        rows = rms(stream, layer["input_layernorm.weight"])
        both = torch.cat((context, rows))
        q = (rows @ layer["self_attn.q_proj.weight"].T).view(BLOCK, HEADS, HEAD_DIM)
        k = (both @ layer["self_attn.k_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        v = (both @ layer["self_attn.v_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        q = turned(rms(q, layer["self_attn.q_norm.weight"], EPS), places)
        k = turned(rms(k, layer["self_attn.k_norm.weight"], EPS), torch.cat((near, places)))
        mixed = []
        for head in range(HEADS):
            own = head * KV_HEADS // HEADS
            mixed.append((q[:, head] @ k[:, own].T / HEAD_DIM**0.5).softmax(-1) @ v[:, own])
        stream = stream + torch.cat(mixed, 1) @ layer["self_attn.o_proj.weight"].T
        rows = rms(stream, layer["post_attention_layernorm.weight"])
        gated = functional.silu(rows @ layer["mlp.gate_proj.weight"].T) * (rows @ layer["mlp.up_proj.weight"].T)
        stream = stream + gated @ layer["mlp.down_proj.weight"].T
    return rms(stream, tensors["norm.weight"])


def plain_logits(tensors: Tensors, output: Tensor, rows: Tensor, path: list[int], kind: str = "") -> Tensor:
    """Logits after each token of a path, the root first, from the block's guessing rows; `kind` of sequential part."""
    found, memory = [], torch.zeros(RANK)
    for row, token in zip(rows, path, strict=False):
        logits = output @ row
        if kind:
            values = tensors["markov_head.markov_w1.weight"][token]
            if kind == "gated":
                gate = tensors["markov_head.gate_proj.weight"] @ torch.cat((row, values))
                values = values * (gate + tensors["markov_head.gate_proj.bias"]).sigmoid()
            if kind == "rnn":
                all_in = torch.cat((memory, values, row))
                joint = tensors["markov_head.joint_proj.weight"] @ all_in + tensors["markov_head.joint_proj.bias"]
                keep, fresh, values = joint.chunk(3)
                memory = keep.sigmoid() * memory + (1 - keep.sigmoid()) * fresh.tanh()
                values = values.tanh()
            logits = logits + tensors["markov_head.markov_w2.weight"] @ values
        found.append(logits)
    return torch.stack(found)
