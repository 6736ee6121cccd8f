"""Code that both doors of the gateway share: validation, tokenizer, routing, limits, answers. Torch-free."""
