"""The messages between services and between their processes, and their codecs."""
