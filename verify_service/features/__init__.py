"""The target's hidden states, kept beside the KV pages and sent to drafts."""
