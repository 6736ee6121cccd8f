"""Draft models: heads that take the target's features, and small language models."""
