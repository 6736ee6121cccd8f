"""The NGRAM drafter: n-gram tries over prompts and outputs. No model, no torch."""
