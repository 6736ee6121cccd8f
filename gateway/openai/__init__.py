"""OpenAI's routes and shapes over the gateway's own types."""
