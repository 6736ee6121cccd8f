"""The process that clients, gateways and drafts talk to. Torch-free."""
