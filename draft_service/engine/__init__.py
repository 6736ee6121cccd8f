"""The process that grows trees: messages in, growth, messages out."""
