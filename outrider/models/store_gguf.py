"""From a GGUF file of the Llama family to a Hugging Face folder, without torch.

Weights become float32: a 4-bit weight is scale * q + offset with half-precision scale and offset, which neither
float16 nor bfloat16 can hold exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.errors import ConfigError
from outrider.models.progress import Progress

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
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


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`.

    `folder` exists and is empty. Progress is told in bytes of float32 weights, as the stage "converting".
    Raises ConfigError when the file is no GGUF file, or its architecture, tokenizer or tensors are not known.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{source.name} is not a GGUF file that can be read: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields, {tensor.name for tensor in reader.tensors})
    write_tokenizer(fields, folder)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(config))

    weights: dict[str, NDArray[np.float32]] = {}
    done, total = 0, sum(4 * int(tensor.n_elements) for tensor in reader.tensors)
    for name, weight in read_weights(reader, config["num_attention_heads"], config["num_key_value_heads"]):
        progress("converting", done, total)
        # save_file writes the memory as it lies, whatever the strides say.
        weights[name] = np.ascontiguousarray(weight)
        done += weight.nbytes
    path = folder / "model.safetensors"
    save_file(weights, path, {"format": "pt"})
    # safetensors lets the owner alone read it, but a cache may be shared like any folder.
    path.chmod(0o644)
    progress("converting", total, total)


def model_config(fields: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """The metadata `fields` as the dictionary of config.json."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"the GGUF file holds a model of architecture {architecture!r}; only 'llama' is converted")
    if unread := sorted(name for name in fields if name.startswith("llama.rope.scaling")):
        raise ConfigError(f"the GGUF file scales its rotary positions ({unread[0]}); that is not converted")
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", num_heads),
        "head_dim": fields.get("llama.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": "float32",
    }
    for key, word in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        token_id = fields.get(f"tokenizer.ggml.{word}_token_id")
        if token_id is not None:
            config[key] = token_id
    return config


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """The token ids that end and pad a generation."""
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def read_weights(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor with its Hugging Face name, float32, matrices as [out_features, in_features]."""
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        weight = dequantized(tensor)
        projection = name.split(".")[-2]
        if projection in heads:
            weight = unpermute(weight, heads[projection])
        yield name, weight


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. Raises ConfigError for an unknown name."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES and layer.isdecimal():
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ConfigError(f"the GGUF file has a tensor that a Llama model does not: {name}")


def dequantized(tensor: ReaderTensor) -> NDArray[np.float32]:
    """The tensor's values as float32; GGUF lists its dimensions from the innermost outwards."""
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    return values.reshape([int(size) for size in reversed(tensor.shape)])


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k, [num_heads * head_dim, hidden_size].

    llama.cpp rotates neighbouring rows as pairs, Hugging Face rotates row i with row i + head_dim / 2: within
    each head the pairs are interleaved there and split in two halves here.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an indented JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


# gguf.TokenType: the vocabulary entries that are matched in the text before any merge.
CONTROL_TOKEN = 3
USER_TOKEN = 4


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) for the GGUF metadata `fields`.

    Raises ConfigError for a tokenizer of another kind than byte-level BPE with known splitting.
    """
    tokenizer = build_tokenizer(fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tokenizer_config(fields)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE of the GGUF metadata: vocabulary, merges, pre-tokenizer, decoder and added tokens."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"the GGUF file has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is read")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    token_types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [pair(line) for line in fields["tokenizer.ggml.merges"]]

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer(fields.get("tokenizer.ggml.pre", ""))
    tokenizer.decoder = decoders.ByteLevel()
    # The ids stay as they are, because the added tokens are in the vocabulary already.
    typed = list(zip(tokens, token_types, strict=True))
    tokenizer.add_special_tokens([added_token(text, special=True) for text, type_ in typed if type_ == CONTROL_TOKEN])
    tokenizer.add_tokens([added_token(text, special=False) for text, type_ in typed if type_ == USER_TOKEN])
    return tokenizer


def pair(line: str) -> tuple[str, str]:
    """The two halves of a merge. The byte alphabet has no space, so the one in the line parts them."""
    left, right = line.split(" ")
    return left, right


def added_token(text: str, *, special: bool) -> AddedToken:
    """A token matched verbatim: surrounding spaces stay, and nothing is normalised."""
    return AddedToken(text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)


def pre_tokenizer(word: str) -> pre_tokenizers.PreTokenizer:
    """How text is split before merging, for the word that GGUF has for it."""
    if word == "smollm":
        split: pre_tokenizers.PreTokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return split
    raise ConfigError(f"the GGUF file splits text in a way not known here: tokenizer.ggml.pre is {word!r}")


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json says: the roles of the special tokens and the chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # This class takes tokenizer.json as it is. Model-named classes rebuild parts of it by rules of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for role, word in roles.items():
        token_id = fields.get(f"tokenizer.ggml.{word}_token_id")
        if token_id is not None:
            config[role] = tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
