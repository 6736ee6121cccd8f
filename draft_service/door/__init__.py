"""The process that verify services talk to. Torch-free."""
