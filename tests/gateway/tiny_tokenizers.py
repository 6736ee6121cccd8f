"""Small tokenizers of the two kinds that models have."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris. What is the capital of France? def main(): return 0\n",
    "Grüße aus München, 東京, Ελλάδα, Привет! 🙂🙃👨‍👩‍👧 stop strings cross token borders: STOP END stop\n",
    "0123456789 one two three four five six seven eight nine ten   spaces\tand\ttabs\n\n",
]


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens(["<tool é>"])  # an added token that is not special
    return inner


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Like Llama 2's: words with a mark for spaces, and byte tokens for everything else."""
    pieces = ["▁", "▁the", "▁of", "a", "b", "c", "▁Paris", "Ä", "�", "s", "t", "o", "p"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + pieces:
        vocabulary[piece] = len(vocabulary)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner
