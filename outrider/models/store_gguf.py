"""Converts the GGUF file of the default model to a Hugging Face folder, without torch.

The file is known by its checksum, so only what it holds is supported: a Llama with tied embeddings and byte-level BPE.
Weights become float32: a 4-bit weight is scale * q + offset with half-precision scale and offset, which neither float16
nor bfloat16 can hold exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.models.progress import Progress

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""gguf.TokenType of the vocabulary entries that are matched in the text before any merge."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Roles of special tokens in Hugging Face files, and GGUF's words for them."""


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`.

    `folder` exists and is empty. Progress is reported in bytes of float32 weights, as the stage "converting".
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    write_tokenizer(fields, folder)
    write_json(folder / "config.json", config)
    generation = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(folder / "generation_config.json", {name: config[name] for name in generation})

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights: dict[str, NDArray[np.float32]] = {}
    done, total = 0, sum(4 * int(tensor.n_elements) for tensor in reader.tensors)
    for tensor in reader.tensors:
        progress("converting", done, total)
        name = hugging_face_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        # GGUF lists dimensions from the innermost outwards.
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        projection = name.split(".")[-2]
        if projection in heads:
            weight = unpermute(weight, heads[projection])
        # save_file writes the memory as it lies, whatever the strides say.
        weights[name] = np.ascontiguousarray(weight)
        done += weight.nbytes
    path = folder / "model.safetensors"
    try:
        save_file(weights, path, {"format": "pt"})
    except SafetensorError as error:  # also for a full disk
        raise OSError(str(error)) from error
    # safetensors lets only the owner read the file, but a cache may be shared like any folder.
    path.chmod(0o644)
    progress("converting", total, total)


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata `fields` as the dictionary of config.json."""
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **{f"{role}_token_id": fields[f"tokenizer.ggml.{ROLES[role]}_token_id"] for role in ("bos", "eos", "pad")},
    }


def hugging_face_name(name: str) -> str:
    """Return a tensor's Hugging Face name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *block, part, _ = name.split(".")
    return f"model.layers.{block[1]}.{LAYER_NAMES[part]}.weight" if block else f"{GLOBAL_NAMES[part]}.weight"


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k, [num_heads * head_dim, hidden_size].

    llama.cpp rotates neighbouring rows as pairs, Hugging Face rotates row i with row i + head_dim / 2: within
    each head the pairs are interleaved there and split in two halves here.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def shortest(value: float) -> float:
    """Return the shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an indented JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) for the GGUF metadata `fields`."""
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config = {
        # This class takes tokenizer.json as it is. Model-named classes rebuild parts of it by rules of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **{f"{role}_token": tokens[fields[f"tokenizer.ggml.{word}_token_id"]] for role, word in ROLES.items()},
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Build the byte-level BPE of the GGUF metadata: vocabulary, merges, pre-tokenizer, decoder and special tokens."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    # The byte alphabet has no space, so the one in a merge separates its halves.
    merges = [(left, right) for left, right in (line.split(" ") for line in fields["tokenizer.ggml.merges"])]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    # The ids stay as they are, because these tokens are in the vocabulary already. They are matched verbatim.
    types = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, kind in types if kind == CONTROL_TOKEN]
    )
    return tokenizer
