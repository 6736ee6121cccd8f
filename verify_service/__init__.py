"""The verify service: holds the target model and its KV cache, runs rounds, and owns the truth."""
