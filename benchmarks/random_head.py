"""An EAGLE-3 head of random weights for a target: a draft that is never right, at the full cost of one.

python benchmarks/random_head.py --target /models/llama-8b --out /models/random-eagle3

Names, shapes and dtype are those of public EAGLE-3 heads: `fc` of three layers' features, one decoder layer with
queries, keys and values of twice the hidden size, and an output matrix over `--draft-vocab` tokens, spread evenly.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

DEVIATION = 0.02


def head_shapes(hidden: int, queries: int, keys: int, mlp: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name; `queries` and `keys` are heads times their size."""
    layer = "midlayer."
    return {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (mlp, hidden),
        f"{layer}mlp.up_proj.weight": (mlp, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, mlp),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def make_head(target: Path, out: Path, draft_vocab: int, seed: int) -> int:
    """Write the head; returns its parameters."""
    fields = json.loads((target / "config.json").read_text("utf-8"))
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    keys, size = fields.get("num_key_value_heads", heads), fields.get("head_dim") or hidden // heads
    vocab = fields["vocab_size"]
    draft_vocab = min(draft_vocab, vocab)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    shapes = head_shapes(hidden, heads * size, keys * size, fields["intermediate_size"], draft_vocab)
    for name, shape in shapes.items():
        values = torch.ones(shape) if "norm" in name else DEVIATION * torch.randn(shape, generator=generator)
        tensors[name] = values.to(torch.bfloat16)
    ids = torch.linspace(0, vocab - 1, draft_vocab, dtype=torch.float64).round().long()
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    others = ("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    config = {name: fields[name] for name in (*kept, *others) if fields.get(name) is not None}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"hidden_act": "silu", "draft_vocab_size": draft_vocab, "tie_word_embeddings": False}
    config["torch_dtype"] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))


def main() -> None:
    """Make a head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count = make_head(arguments.target, arguments.out, arguments.draft_vocab, arguments.seed)
    print(f"{arguments.out}: {count / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
